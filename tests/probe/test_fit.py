"""Fits recover what made the times, and are not led astray by single bad ones."""

import doctest

import numpy as np
import pytest

from autoshard.probe import fit, fit_line

SIZES = 2.0 ** np.arange(12, 30)


def test_examples():
    """The examples in the docstrings hold."""
    assert doctest.testmod(fit).failed == 0


@pytest.mark.parametrize(("latency", "bandwidth"), [(40e-6, 189e9), (0.0, 1e9), (1e-3, 5e12)])
def test_a_line_is_recovered(latency, bandwidth):
    """Times without noise give back the latency and the bandwidth that made them."""
    found = fit_line(SIZES, latency + SIZES / bandwidth)
    assert found == pytest.approx((latency, bandwidth), rel=1e-6, abs=1e-12)


def test_noise_that_is_relative_stays_relative():
    """With 5 % of noise on times over five orders of magnitude both ends of the line are found within 10 %."""
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal(len(SIZES))
    latency, bandwidth = fit_line(SIZES, (50e-6 + SIZES / 2e11) * noise)
    assert latency == pytest.approx(50e-6, rel=0.1) and bandwidth == pytest.approx(2e11, rel=0.1)


def test_published_all_reduces_lie_on_a_line():
    """NCCL's all-reduce on 8 A100 (nccl-tests, vTrain, MICRO 2024) is a line to 5 % from 16 MiB up."""
    table = {1: 92.15, 4: 94.03, 16: 231.0, 64: 579.6, 256: 2158.0, 1024: 8196.4}  # MiB, us in place
    nbytes, seconds = np.array(list(table)) * 2.0**20, np.array(list(table.values())) * 1e-6
    latency, bandwidth = fit_line(nbytes, seconds)
    error = np.abs((latency + nbytes / bandwidth) / seconds - 1)
    assert np.median(error[nbytes >= 16 * 2**20]) <= 0.05


def test_times_that_do_not_grow_have_no_bandwidth():
    """What is all latency has an infinite bandwidth, not a negative one."""
    assert fit_line([1e3, 1e6, 1e9], [3e-6, 2.9e-6, 2.8e-6])[1] == float("inf")


@pytest.mark.parametrize(("nbytes", "seconds"), [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0]), ([1.0, 2.0], [1.0])])
def test_too_little_is_refused(nbytes, seconds):
    """One size, no size twice, and times of zero make no line."""
    with pytest.raises(ValueError, match="two or more sizes"):
        fit_line(nbytes, seconds)
