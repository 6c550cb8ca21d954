"""Several processes: each passes the same whole arrays, or global ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_processes import outputs_of


@pytest.mark.slow
def test_two_processes_run_one_step_and_are_told_where_they_differ():
    """Typed keys and dropout work; what differs between processes is refused by name in both of them."""
    outputs = outputs_of(Path(__file__).with_name("one_of_two_processes.py"))
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)
