"""Compiling for TPUs ahead of time, without one: the real compiler, in a process of its own.

Generating code is some nineteen twentieths of a compile, and nothing that is compared here but the schedule's cycles needs it: the process
is stopped once memory is assigned, which takes a second or two. Then everything is decided: partitioning, fusions, the schedule, memory.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jax.stages import Lowered

from autoshard.errors import CompilerError
from autoshard.ir import Mesh
from autoshard.verify.buffers import Buffers, read_buffers

# What libtpu reads. Without a TPU it would ask the cloud's metadata server who it is, and one process alone may load it by default.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Endings of dumped files; written in this order by libtpu 0.0.42: where the last one is, the others are whole.
ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
LIVE_RANGES = "after_optimizations-live-range.txt"
SCHEDULED = "after_optimizations.txt"
ASSIGNED = "after_optimizations_after_buffer_assignment.txt"
GENERATED = "after_codegen.txt"
POLL_SECONDS = 0.02

# "Used 22.53G of 15.75G hbm", "the total memory required for HLO temporaries (46.43G) exceeds available HBM (15.75G)"
_REFUSED = re.compile(r"([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT]?)(?:\)| hbm)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A program as the TPU compiler leaves it, or why it refuses it.

    Attributes:
        hlo: the scheduled program of one device, as text; with estimated cycles where they were asked for. Empty where it is refused.
        peak_bytes: what lives at the fullest moment, as ``memory_analysis().peak_memory_in_bytes``; None where it is refused.
        needed_bytes: what the allocator takes, fragmentation included: what has to fit. Of a refused program as the refusal has it.
        available_bytes: what there is on a device; None where the compiler did not refuse, and so did not say.
        fits: whether the compiler accepts the program.
        seconds: what compiling took.
    """

    hlo: str
    peak_bytes: float | None
    needed_bytes: float
    available_bytes: float | None
    fits: bool
    seconds: float


def compile_ahead(lowered: Lowered, mesh: Mesh, topology: str, cycles: bool = False) -> Ahead:
    """The program compiled for the devices of a TPU topology.

    Args:
        lowered: as `jax.jit(...).trace(...).lower(lowering_platforms=("tpu",))` gives it; on an abstract mesh it needs no devices.
        mesh: its mesh; the topology has as many devices.
        topology: as libtpu names it, ``"v5e:2x4"``.
        cycles: whether code is generated too, which takes most of a minute and puts ``estimated_cycles`` into the text.

    Raises:
        CompilerError: libtpu is not installed, does not know the topology, or fails on the program.
    """
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise CompilerError(
            "compiling for TPUs needs libtpu, the TPU compiler, though no TPU, and it is not installed here. "
            "Install it with pip install 'autoshard[tpu]'."
        )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        with open(folder / "module", "wb") as module:
            lowered.compiler_ir("stablehlo").operation.write_bytecode(module)  # pyright: ignore[reportOptionalMemberAccess]
        (folder / "request").write_bytes(pickle.dumps((topology, mesh)))
        log = _compiled(folder, stop=not cycles)
        return _read(folder, topology, log, time.perf_counter() - started)


def _compiled(folder: Path, stop: bool) -> str:
    """Runs the compiler until it ends or, to stop early, until memory is assigned; it never outlives this call. Returns what it logged."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "autoshard.verify.ahead_child", str(folder)]
    with open(folder / "log", "wb") as log:
        # It reads its stdin to the end, and ends itself there: if this process is killed, it ends too, once the compiler lets Python run.
        child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            while child.poll() is None and not (stop and _dumped(folder, ASSIGNED)):
                time.sleep(POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
            child.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
    return (folder / "log").read_text(errors="replace")


def _dumped(folder: Path, ending: str) -> Path | None:
    """The dumped file whose name ends so."""
    return next(folder.glob(f"module_*.{ending}"), None)


def _read(folder: Path, topology: str, log: str, seconds: float) -> Ahead:
    """What the compiler's process left."""
    failure = folder / "failure"
    if failure.exists():
        text = failure.read_text()
        refused = _REFUSED.search(text)
        if refused is None:
            raise CompilerError(f"XLA:TPU compiles the program for {topology}, and failed: {text.strip()[:2000]}")
        needed, available = _sized(*refused.groups()[:2]), _sized(*refused.groups()[2:])
        return Ahead("", None, needed, available, False, seconds)
    dumped = _dumped(folder, GENERATED) or (_dumped(folder, SCHEDULED) if _dumped(folder, ASSIGNED) else None)
    if dumped is not None and (buffers := _buffers(folder)) is not None:
        return Ahead(dumped.read_text(), buffers.peak_bytes, buffers.allocated_bytes, None, True, seconds)
    whole = folder / "compiled.json"  # a libtpu that dumps nothing, or under other names, compiled to the end
    if whole.exists():
        found = json.loads(whole.read_text())
        return Ahead(found["hlo"], found["peak_bytes"], found["needed_bytes"], None, True, seconds)
    raise CompilerError(f"XLA:TPU compiles the program for {topology}, and its process ended without a word: {log.strip()[-2000:]}")


def _buffers(folder: Path) -> Buffers | None:
    assignment, live = _dumped(folder, ASSIGNMENT), _dumped(folder, LIVE_RANGES)
    return read_buffers(assignment.read_text(), live.read_text()) if assignment and live else None


def _sized(number: str, unit: str) -> float:
    """Bytes of XLA's ``15.75G``."""
    return float(number) * 1024 ** " KMGT".index(unit or " ")
