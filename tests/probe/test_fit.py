"""Fits recover what made the times, and are not led astray by single bad ones."""

import doctest

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.probe import fit_cluster
from autoshard.probe.fit import constant, with_constant
from autoshard.probe.programs import COLLECTIVES, ELEMENTWISE, CollectiveProgram, elementwise, matrix_product
from benchmarks.cost_model import nccl
from benchmarks.cost_model.nccl import fit_line

SIZES = 2.0 ** np.arange(12, 30)


def test_examples():
    """The examples in the docstrings hold."""
    assert doctest.testmod(nccl).failed == 0


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


TRUE = {
    "device.flops_per_second.f32": 3e11,
    "device.vector_flops_per_second": 2e9,
    "device.memory_bandwidth_bytes_per_second": 1e10,
    "device.kernel_overhead_seconds": 2e-5,
    "interconnect.launch_seconds": 3e-5,
    "interconnect.latency_seconds": 2e-6,
    "interconnect.bandwidth_bytes_per_second": 7e9,
}
PROGRAMS = (
    *(matrix_product(side, side, "float32") for side in (32, 128, 512, 2048)),
    *(elementwise(name, side, "float32") for name in ELEMENTWISE for side in (128, 512, 2048)),
    *(CollectiveProgram(kind, n, sizes, 0) for kind in COLLECTIVES for n in (2**12, 2**16, 2**22) for sizes in ((8,), (2, 4))),
)


def predict(cluster):
    return np.array([program.predicted_seconds(cluster) for program in PROGRAMS])


def known():
    cluster = Cluster.parse("cpu:8")
    for name, value in TRUE.items():
        cluster = with_constant(cluster, name, value)
    return cluster


def test_constants_are_found_again():
    """From times that other constants make, the fit finds those constants, wherever it starts; the rest stays as it was."""
    found = fit_cluster(Cluster.parse("cpu:8"), tuple(TRUE), predict, predict(known()))
    assert {name: constant(found, name) for name in TRUE} == pytest.approx(TRUE, rel=0.05)
    assert constant(found, "device.flops_per_second.bf16") == constant(Cluster.parse("cpu:8"), "device.flops_per_second.bf16")


def test_single_bad_times_lead_nobody_astray():
    """With three times of forty a hundred times too long, half of all predictions stay within 5 %, and nine in ten within 25 %."""
    seconds = predict(known())
    spoilt = seconds.copy()
    spoilt[[1, 8, 20]] *= 100
    found = fit_cluster(Cluster.parse("cpu:8"), tuple(TRUE), predict, spoilt)
    errors = np.abs(predict(found) / seconds - 1)
    assert np.median(errors) < 0.05 and np.quantile(errors, 0.9) < 0.25


def test_a_constant_that_no_time_depends_on_stays():
    """What was not measured keeps the catalogue's figure."""
    start = Cluster.parse("h100:8")
    names = ("device.flops_per_second.f32", "device.flops_per_second.int8")
    found = fit_cluster(start, names, lambda cluster: predict(cluster)[:4], 2 * predict(start)[:4])
    assert constant(found, names[0]) < 0.6 * constant(start, names[0])
    assert constant(found, names[1]) == pytest.approx(constant(start, names[1]), rel=1e-6)
