"""Copies and arrays beside values in a TPU's memory, held against peaks that XLA:TPU reported."""

from __future__ import annotations

import pytest

import autoshard
from benchmarks.evidence.programs import PROGRAMS
from benchmarks.evidence.rows import read_rows

TRANSFORMS = read_rows()["arrays of Fourier transforms"].expected


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_hold_pairs_of_real_arrays_before_and_after(name):
    """Peaks of Fourier transforms are within 2 % of those that the compiler reports."""
    program = PROGRAMS[name]
    strategy = autoshard.evaluate(program.function, *program.args, cluster="v5e:1x1", mesh={"x": 1}, in_specs={})
    assert strategy.cost.peak_bytes / 2**20 == pytest.approx(TRANSFORMS[name], rel=0.02)
