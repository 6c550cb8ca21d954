"""Stages in several processes: each runs its own, and arrays are sent between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("stages", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_two_processes_run_a_pipeline_as_one_device_does(stages):
    """Losses and state are equal, with stages of one process and stages of both; no process starts a task of another's stage."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("one_of_two_processes.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    options = [str(port), str(stages)]
    processes = [
        subprocess.Popen([sys.executable, script, *options, str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)
