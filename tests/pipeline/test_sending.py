"""Stages in several processes: each runs its own, and arrays are sent between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_processes import outputs_of


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_two_processes_run_a_pipeline_as_one_device_does(stages):
    """Losses and state are equal, with stages of one process and stages of both; no process starts a task of another's stage."""
    outputs = outputs_of(Path(__file__).with_name("one_of_two_processes.py"), stages)
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("schedule", ["interleaved", "zb_v", "dual_pipe_v"])
def test_two_processes_run_several_chunks_a_stage(schedule):
    """A GPT of two chunks a stage, unrolled and with scanned layers whose rows are sent to their chunks: losses and state are equal."""
    outputs = outputs_of(Path(__file__).with_name("chunks_in_two_processes.py"), schedule)
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)
