"""Ahead-of-time compilation by XLA:TPU, XLA:GPU or XLA:CPU in a separate process, without the devices.

Code generation takes about 95 % of a compilation, and only the schedule's cycles need it. So the process is stopped once memory is
assigned, after a second or two: partitioning, fusions, the schedule and memory are then final. The autotuning of XLA:GPU, which chooses a
library's algorithm and workspace for each product and convolution, needs a GPU and does not run.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from jax.stages import Lowered

from autoshard.errors import CompilerError
from autoshard.ir import Mesh
from autoshard.verify.buffers import Buffers, read_buffers
from autoshard.verify.topology import Topology

Options = Mapping[str, bool | int | float | str]
"""A compiler's options by name, as `jax.jit` takes them in ``compiler_options``."""

# Endings of dumped files.
ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
LIVE_RANGES = "after_optimizations-live-range.txt"
SCHEDULED = "after_optimizations.txt"
GENERATED = "after_codegen.txt"
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class AheadCompiler:
    """A compiler that needs no devices.

    Attributes:
        name, package: of the compiler and its package, for messages.
        modules: Python modules, any one of which shows that it is installed.
        variable: an environment variable that shows it, too.
        extra: the extra of autoshard that installs it.
        environment: environment variables of its process.
        flags: for its process, in ``XLA_FLAGS``.
        assigned: the ending of the dumped file that is written after those on the schedule and on memory are complete.
        distributions: Python distributions; the version of the first that is installed is the compiler's.
        counts_cycles: whether it estimates its schedule's cycles.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    variable: str
    extra: str
    environment: dict[str, str]
    flags: str
    assigned: str
    distributions: tuple[str, ...]
    counts_cycles: bool = False

    @property
    def installed(self) -> bool:
        """Whether the compiler is installed."""
        return any(map(_exists, self.modules)) or self.variable in os.environ

    @property
    def version(self) -> str:
        """Its distribution and version, such as ``libtpu 0.0.42``; empty where none is installed."""
        for name in self.distributions:
            with suppress(metadata.PackageNotFoundError):
                return f"{name} {metadata.version(name)}"
        return ""

    def required(self) -> None:
        """Raises `CompilerError` where the compiler is not installed."""
        if not self.installed:
            device = self.name.removeprefix("XLA:")
            raise CompilerError(
                f"compiling for {device}s needs {self.package}, which has the compiler, though no {device}, and it is not installed here. "
                f"Install it with pip install 'autoshard[{self.extra}]'."
            )


COMPILERS = {
    # libtpu 0.0.42. Without a TPU it would query the cloud's metadata server, and by default only one process may load it.
    "tpu": AheadCompiler(
        "XLA:TPU",
        "libtpu",
        ("libtpu",),
        "TPU_LIBRARY_PATH",
        "tpu",
        {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        "",
        "after_optimizations_after_buffer_assignment.txt",
        ("libtpu", "libtpu-nightly"),
        counts_cycles=True,
    ),
    # The plugins of jax 0.10.2; they check for CUDA's libraries, though only running needs them. Products are left to cuBLAS: autotuning on
    # a GPU compares its kernels with Triton's; without one Triton's are taken, even where that fails (a vision transformer's 12,608 rows).
    "cuda": AheadCompiler(
        "XLA:GPU",
        "JAX's CUDA plugin",
        ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
        "",
        "gpu-compiler",
        {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""},
        "--xla_gpu_enable_triton_gemm=false",
        "after_optimizations-memory-usage-report.txt",
        ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    ),
    # jaxlib's own; its process has as many virtual devices as the mesh.
    "cpu": AheadCompiler("XLA:CPU", "jaxlib", ("jaxlib",), "", "", {}, "", "after_optimizations-memory-usage-report.txt", ("jaxlib",)),
}

# "Used 22.53G of 15.75G hbm", "the total memory required for HLO temporaries (46.43G) exceeds available HBM (15.75G)"
_REFUSED = re.compile(r"([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT]?)(?:\)| hbm)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A compiled program, or the memory that a refused one needs.

    Attributes:
        hlo: the scheduled program of one device, as text, with estimated cycles if requested; empty if it is refused.
        peak_bytes: peak live bytes, as ``memory_analysis().peak_memory_in_bytes``; None if it is refused.
        needed_bytes: bytes allocated, fragmentation included, which have to fit; if it is refused, from the compiler's message.
        available_bytes: bytes available on a device; None if XLA:TPU, which refuses programs that do not fit, accepts it.
        fits: whether the program fits.
        seconds: time of compiling.
        alive: the instructions whose values are alive at the peak, with the bytes of each; () where the compiler does not say.
    """

    hlo: str
    peak_bytes: float | None
    needed_bytes: float
    available_bytes: float | None
    fits: bool
    seconds: float
    alive: tuple[tuple[str, float], ...] = ()


def compile_ahead(lowered: Lowered, mesh: Mesh, topology: Topology, cycles: bool = False, options: Options | None = None) -> Ahead:
    """The program compiled for the devices of a topology.

    Args:
        lowered: as `jax.jit(...).trace(...).lower(lowering_platforms=("tpu",))` gives it; on an abstract mesh it needs no devices.
        mesh: its mesh; the topology has as many devices.
        topology: of a TPU slice, of GPUs, or of virtual CPU devices.
        cycles: whether XLA:TPU generates code, too, which takes most of a minute and adds ``estimated_cycles`` to the text.
        options: of the compiler, as `jax.jit` takes them in ``compiler_options``.

    Raises:
        CompilerError: the compiler is not installed, does not know the topology or an option, or fails on the program.
    """
    with Compilation(lowered, mesh, topology, cycles, options) as running:
        while not running.over():
            time.sleep(POLL_SECONDS)
        return running.result()


class Compilation:
    """A running compilation, in a process that ends with the ``with`` block at the latest.

    Arguments are those of `compile_ahead`, which waits for one; several may run at once.
    """

    def __init__(self, lowered: Lowered, mesh: Mesh, topology: Topology, cycles: bool = False, options: Options | None = None):
        """Starts the process.

        Raises:
            CompilerError: the compiler is not installed.
        """
        self._compiler = COMPILERS[topology.platform]
        self._compiler.required()
        self._topology = topology
        self._stop_early = not cycles
        self._started = time.perf_counter()
        self._directory = tempfile.TemporaryDirectory(prefix="autoshard-")
        self._folder = Path(self._directory.name)
        self._child: subprocess.Popen | None = None
        try:
            with open(self._folder / "module", "wb") as module:
                lowered.compiler_ir("stablehlo").operation.write_bytecode(module)  # pyright: ignore[reportOptionalMemberAccess]
            (self._folder / "request").write_bytes(pickle.dumps((topology, mesh, dict(options or {}))))
            self._child = _start(self._compiler, self._folder)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def over(self) -> bool:
        """Whether the compiler has ended or, to stop early, assigned memory."""
        assert self._child is not None, "a compilation that was stopped has no process"
        return self._child.poll() is not None or (self._stop_early and _dumped(self._folder, self._compiler.assigned) is not None)

    def result(self) -> Ahead:
        """The compiled program; to be called once `over` is true.

        Raises:
            CompilerError: the compiler failed for another reason than memory.
        """
        self._end_process()
        log = (self._folder / "log").read_text(errors="replace")
        seconds = time.perf_counter() - self._started
        return read_ahead(self._compiler, self._folder, self._topology, log, seconds, whole=not self._stop_early)

    def stop(self) -> None:
        """Ends the process and removes its files."""
        self._end_process()
        self._directory.cleanup()

    def _end_process(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            child.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def _start(compiler: AheadCompiler, folder: Path) -> subprocess.Popen:
    """The compiler's process; it logs into the folder."""
    given = os.environ.get("XLA_FLAGS", "").split()  # libtpu ends at a flag of CPUs that it does not know
    own = " ".join(flag for flag in given if compiler is COMPILERS["cpu"] or not flag.startswith("--xla_cpu_"))
    flags = f"{own} {compiler.flags} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, **compiler.environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "autoshard.verify.aot_child", str(folder)]
    with open(folder / "log", "wb") as log:
        # It exits at the end of its stdin: so if this process is killed, it ends, too, once the compiler lets Python run.
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _dumped(folder: Path, ending: str) -> Path | None:
    """The dumped file with an ending, or None."""
    return next(folder.glob(f"module_*[._]{ending}"), None)


def read_ahead(compiler: AheadCompiler, folder: Path, topology: Topology, log: str, seconds: float, whole: bool = False) -> Ahead:
    """The compiled program from the files of a compiler's process: XLA's dumps, or ``failure``, the compiler's message.

    Args:
        compiler, folder, topology: the compiler, the folder of its files, and the target.
        log: the output of the process.
        seconds: time of compiling.
        whole: whether code was to be generated; a process that ended during code generation has failed then.

    Raises:
        CompilerError: the compiler failed on the program.
    """
    compiling = f"{compiler.name} compiles the program for {topology.name or 'GPUs ' + topology.options['topology']}"
    limit = topology.memory_limit_bytes

    def accepted(hlo: str, peak: float, needed: float, alive: tuple[tuple[str, float], ...] = ()) -> Ahead:
        return Ahead(hlo, peak, needed, limit, limit is None or needed <= limit, seconds, alive)

    failure = folder / "failure"
    if failure.exists():
        text = failure.read_text()
        refused = refused_bytes(text)
        if refused is None:
            raise CompilerError(f"{compiling}, and failed: {text.strip()[:2000]}")
        return Ahead("", None, *refused, False, seconds)
    scheduled = _dumped(folder, SCHEDULED) if _dumped(folder, compiler.assigned) and not whole else None
    dumped = _dumped(folder, GENERATED) or scheduled
    compiled = folder / "compiled.json"  # of a complete compilation whose dumps are missing or have other names
    try:
        if dumped is not None and (buffers := _buffers(folder)) is not None:
            return accepted(dumped.read_text(), buffers.peak_bytes, buffers.allocated_bytes, buffers.alive)
        if compiled.exists():
            found = json.loads(compiled.read_text())
            return accepted(found["hlo"], found["peak_bytes"], found["needed_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CompilerError(f"{compiling}, and left files that cannot be read: {error!r}. {log.strip()[-2000:]}") from error
    raise CompilerError(f"{compiling}, and its process ended without a word: {log.strip()[-2000:]}")


def _buffers(folder: Path) -> Buffers | None:
    assignment, live = _dumped(folder, ASSIGNMENT), _dumped(folder, LIVE_RANGES)
    return read_buffers(assignment.read_text(), live.read_text()) if assignment and live else None


def refused_bytes(message: str) -> tuple[float, float] | None:
    """The bytes that a compiler's message says a program needs on a device, and those that there are; None where it does not.

    >>> from autoshard.verify import refused_bytes
    >>> refused_bytes("RESOURCE_EXHAUSTED: Ran out of memory. Used 1.50K of 1K hbm.")
    (1536.0, 1024.0)
    """
    found = _REFUSED.search(message)
    return None if found is None else (_sized(*found.groups()[:2]), _sized(*found.groups()[2:]))


def _sized(number: str, unit: str) -> float:
    """Bytes of XLA's ``15.75G``."""
    return float(number) * 1024 ** " KMGT".index(unit or " ")
