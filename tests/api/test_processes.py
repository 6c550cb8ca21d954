"""Several processes: each passes the same whole arrays, or global ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_two_processes_run_one_step_and_are_told_where_they_differ():
    """Typed keys and dropout work; what differs between processes is refused by name in both of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("one_of_two_processes.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen([sys.executable, script, str(port), str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)
