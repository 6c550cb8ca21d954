"""A section in a process of its own: its memory is capped, and whatever it does ends with it."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from importlib import import_module
from multiprocessing.connection import Connection

from autoshard.cli.terminal import progress
from autoshard.errors import AutoshardError
from benchmarks.cost_model.findings import Findings


def isolated(name: str, quick: bool, memory: float, quiet: bool) -> Findings | str:
    """What a section found, or why it could not run. Its process ends with it, whatever happens."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(name, quick, memory, there))
    process.start()
    there.close()
    try:
        with progress(quiet) as tell:
            while True:
                message = here.recv()
                if isinstance(message, Findings | str):
                    return message
                tell(f"{name}: {message[0]}", message[1])
    except EOFError:
        process.join()
        return f"its process ended with exit code {process.exitcode} (out of memory? --memory gives it more)"
    finally:
        if process.is_alive():
            process.join(1)
            process.terminate()
        process.join()


def _run(name: str, quick: bool, memory: float, parent: Connection) -> None:
    """In the section's process: sends progress as pairs, then `Findings` or why there are none."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what it started ends too
    limit = int(memory * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        parent.send(import_module(f"benchmarks.cost_model.{name}").run(quick, lambda what, fraction: parent.send((what, fraction))))
    except AutoshardError as error:
        parent.send(str(error))
    except KeyboardInterrupt:
        parent.send("interrupted")
