"""A script that runs in two processes at once, which its arguments tell a free port and their number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def outputs_of(script: Path, *options: object) -> list[str]:
    """What each of two processes wrote: ``script PORT OPTIONS... NUMBER``; none outlives the call."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}  # imports are those of the tests
    commands = [[sys.executable, script, *map(str, (port, *options, n))] for n in range(2)]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) for each in commands]
    try:
        return [process.communicate(timeout=300)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
