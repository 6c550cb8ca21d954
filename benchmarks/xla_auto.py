"""XLA's auto-sharding as a rival: a program compiled with its shardings left to XLA, in an environment of its own.

jax 0.10.0 with libtpu 0.0.40 is the last release that has it (``jax.experimental.pjit.AUTO``; gone from jax 0.10.1 and libtpu 0.0.41). The
environment is made the first time it is needed and then kept; the program is compiled there in a process of its own, for the same topology.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, CompilerError
from autoshard.ir import Mesh
from autoshard.verify import Ahead, topology_of
from autoshard.verify.aot import COMPILERS, POLL_SECONDS, read_ahead
from benchmarks.cost_model.compiled import kept_ahead

ROOT = Path(__file__).parents[1]
VERSIONS = {"jax": "0.10.0", "jaxlib": "0.10.0", "libtpu": "0.0.40"}
ENVIRONMENT = Path("~/.cache/autoshard-benchmarks/xla_auto")
MADE = "autoshard-benchmarks.json"  # in the environment: the packages that were installed, once all of them are
INSTALL_SECONDS = 1200
# libtpu's log then has a line "Auto Sharding took 53 seconds".
LOG = {"TPU_MIN_LOG_LEVEL": "0", "TPU_STDERR_LOG_LEVEL": "0", "TPU_VMODULE": "auto_sharding=1,auto_sharding_impl_internal=1"}
_TOOK = re.compile(r"Auto Sharding took (\d+) seconds")


class EnvironmentMissing(AutoshardError):
    """The environment with XLA's auto-sharding cannot be made."""


@dataclass(frozen=True, slots=True)
class AutoSharded:
    """A program as XLA's auto-sharding and the TPU compiler leave it.

    Attributes:
        ahead: the compiled program, or that it does not fit; None where there is none.
        search_seconds: of the auto-sharding pass, as libtpu logs it, in whole seconds; None where it did not end.
        failure: why there is no compiled program.
        limit_seconds: what it was given.
    """

    ahead: Ahead | None
    search_seconds: float | None
    failure: str
    limit_seconds: float


def packages() -> tuple[str, ...]:
    """What the environment has; its optax is this one, so that programs are the same."""
    return (*(f"{name}=={number}" for name, number in VERSIONS.items()), f"optax=={version('optax')}")


def environment(folder: Path) -> Path:
    """The Python of the environment in a folder, made if it is not there.

    Raises:
        EnvironmentMissing: it cannot be made.
    """
    folder = folder.expanduser().absolute()
    python, made, wanted = folder / "bin" / "python", folder / MADE, json.dumps(packages())
    if python.exists() and made.exists() and made.read_text() == wanted:
        return python
    # Where Python comes without ensurepip, this one's pip fills an environment without pip.
    failure = _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip"]
    if failure:
        failure = _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    failure = failure or _run([*pip, "install", "--quiet", "--disable-pip-version-check", *packages()])
    if failure:
        raise EnvironmentMissing(
            f"XLA's auto-sharding needs an environment with {', '.join(packages())}, and it cannot be made in {folder}: {failure} "
            "Connect to a package index, or name a folder that has the environment with --rival-env."
        )
    made.write_text(wanted)
    return python


def _run(command: list[str]) -> str:
    """Runs a command; the end of its errors where it fails, else nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"{(done.stderr.strip() or done.stdout.strip() or f'exit code {done.returncode}')[-600:]}" if done.returncode else ""


def auto_sharded(
    python: Path, model: str, sizes: Mapping[str, Any], fingerprint: str, mesh: Mesh, cluster: Cluster, limit_seconds: float
) -> AutoSharded:
    """A model of `benchmarks.models` as XLA's auto-sharding shards it; kept in the run's folder, so that nobody need ask again.

    Args:
        python: of the environment.
        sizes: what the model's maker is called with, as JSON has it.
        fingerprint: of the program.
        mesh: its axes, row-major over the cluster's devices.
        limit_seconds: after which the process is stopped.
    """
    key = hashlib.sha256(f"{packages()} {fingerprint} {mesh!r} {cluster.name}".encode()).hexdigest()[:32]
    kept = Path(os.environ["AUTOSHARD_BENCHMARK_KEEP"]) / f"auto-{key}.json.gz"
    if kept.exists():
        record = json.loads(gzip.decompress(kept.read_bytes()))
        found = AutoSharded(**record | {"ahead": kept_ahead(record["ahead"]) if record["ahead"] else None})
        if found.ahead is not None or found.limit_seconds >= limit_seconds:
            return found
    found = _compiled(python, model, sizes, mesh, cluster, limit_seconds)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(gzip.compress(json.dumps(asdict(found)).encode()))
    return found


def _compiled(python: Path, model: str, sizes: Mapping[str, Any], mesh: Mesh, cluster: Cluster, limit_seconds: float) -> AutoSharded:
    topology = topology_of(cluster)
    request = {"model": model, "sizes": dict(sizes), "topology": topology.name, "options": topology.options, "mesh": mesh.axes}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        log, ended = _logged(python, folder, limit_seconds)
        took = _TOOK.search(log)
        search_seconds = float(took[1]) if took else None
        if not ended:
            step = "its search had not ended" if took is None else "the search had ended, compiling had not"
            return AutoSharded(None, search_seconds, f"stopped after {limit_seconds:g} s: {step}", limit_seconds)
        try:
            ahead = read_ahead(COMPILERS["tpu"], folder, topology, log, time.perf_counter() - started)
        except CompilerError as error:
            return AutoSharded(None, search_seconds, str(error), limit_seconds)
        return AutoSharded(ahead, search_seconds, "", limit_seconds)


def _logged(python: Path, folder: Path, limit_seconds: float) -> tuple[str, bool]:
    """Runs the compiling process; what it logged, and whether it ended in time. It never outlives this call."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "TPU_LIBRARY_PATH")}
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "benchmarks.xla_auto_child", str(folder)]
    until = time.monotonic() + limit_seconds
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(
            command, env=others | COMPILERS["tpu"].environment | LOG | ours, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            while child.poll() is None and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            ended = child.poll() is not None
        finally:
            child.kill()
            child.wait()
            child.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
    return (folder / "log").read_text(errors="replace"), ended
