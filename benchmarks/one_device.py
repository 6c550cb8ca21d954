"""How far are predicted step times and peaks from those of a real accelerator? On one device, where nothing is communicated.

``python -m benchmarks.one_device --json measured.jsonl`` runs train steps on the device of this machine: as plain ``jax.jit``, as
searched, in microbatches, with recomputation, and with optimizer state or activations in the memory of the host. Shown are times and
peaks beside those predicted for it, and how far losses and parameters after three steps are from those of ``jax.jit``. Each row runs in a
process of its own and is kept as it ends. Searches run ahead in ``--processes``; only one process at a time is on the device.

``--cluster FILE`` predicts for a cluster that ``autoshard calibrate`` wrote, and ``--measured FILE`` for what was measured before, without
a device.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cli.terminal import show
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.probe.calibration import start_of
from autoshard.render import Paragraph, Report, Table, format_bytes, format_seconds
from benchmarks.models import F32, Program, dlrm, encoder_decoder, gpt, llama, moe, resnet, unet, vit
from benchmarks.progress import progress_bar

SUMMARY = "How far are predicted step times and peaks from those of a real accelerator?"
STEPS, WARM = 10, 3
SHARE = 0.6  # of the predicted plain peak, for recomputation and offload
ROW_SECONDS = 240.0

_GPT: dict[str, Any] = {"layers": 12, "width": 1536, "heads": 16, "vocabulary": 32_768, "batch": 16, "length": 1024}
_SMALL: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 4096, "batch": 8, "length": 32}
PROGRAMS: dict[str, Callable[..., Program]] = {
    "gpt": partial(gpt, **_GPT),
    "gpt_scan": partial(gpt, **_GPT, scan=True),
    "gpt_f32": partial(gpt, **_GPT | {"layers": 6, "batch": 8}, dtype=F32),
    "llama": partial(llama, **_GPT, kv_heads=4, ffn=4096, remat=True),
    "moe": partial(moe, **_GPT | {"layers": 6, "width": 1024}),
    "t5": partial(encoder_decoder, **_GPT | {"layers": 6, "width": 1024, "length": 512, "batch": 32}),
    "vit": partial(vit, 12, batch=128),
    "resnet": partial(resnet, (3, 4, 6, 3), batch=128),
    "unet": partial(unet, 3, batch=64),
    "dlrm": partial(dlrm),
    "tiny": partial(gpt, **_SMALL),
    "tiny_scan": partial(gpt, **_SMALL, scan=True),
}
PLAIN: dict[str, Any] = {"microbatches": None, "remat": None}
WAYS: dict[str, dict[str, Any]] = {
    "searched": PLAIN,
    "microbatches": PLAIN | {"microbatches": 4},
    "remat auto": PLAIN | {"remat": "auto"},
    "remat full": PLAIN | {"remat": "full"},
    "state on host": PLAIN | {"offload": "optimizer"},
    "activations on host": PLAIN | {"remat": "full", "offload": "activations"},
}
OWN = ("jit", "jit, by hand")  # without a search; by hand: `jax.checkpoint` around each layer
_SEARCHED = ("gpt", "gpt_scan", "llama", "vit", "resnet", "moe", "t5", "unet", "dlrm", "gpt_f32")
ROWS: tuple[tuple[str, str], ...] = (
    *((name, how) for name in ("gpt_scan", "gpt") for how in ("jit", "searched")),
    *(("gpt_scan", how) for how in ("remat full", "jit, by hand", "remat auto", "state on host", "activations on host", "microbatches")),
    *((name, "searched") for name in _SEARCHED[2:]),
    *(("gpt", how) for how in ("remat auto", "state on host", "activations on host", "jit, by hand", "microbatches", "remat full")),
    *(("llama", how) for how in ("jit", "remat auto", "jit, by hand", "microbatches", "state on host", "activations on host")),
    *((name, "jit") for name in _SEARCHED[3:]),
)
QUICK = tuple(("tiny_scan", how) for how in (*OWN, *WAYS))


@dataclass(frozen=True, slots=True)
class Row:
    """A step on the device.

    Attributes:
        program, how: the model, and how it ran.
        seconds: the median of some steps.
        peak_bytes: the most memory of the device that was in use, autotuning included; 0 where the device does not say.
        compiled_bytes: what the compiled program allocates.
        losses: of the first steps.
        check: a sum of the absolute parameters after them.
        predicted_seconds, predicted_bytes: without a search those of the plain step.
        limit_bytes: the memory that the search was given, if it was less than the device's.
        search_seconds, compile_seconds: how long these took.
        refused: why there is no such step.
    """

    program: str
    how: str
    seconds: float = 0.0
    peak_bytes: float = 0.0
    compiled_bytes: float = 0.0
    losses: tuple[float, ...] = ()
    check: float = 0.0
    predicted_seconds: float = 0.0
    predicted_bytes: float = 0.0
    limit_bytes: float = 0.0
    search_seconds: float = 0.0
    compile_seconds: float = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A search's answer for one row."""

    strategy: autoshard.Strategy
    limit_bytes: float


def searched(program: str, how: str, cluster: Cluster) -> Found:
    """The strategy of a row; of a row without a search that of the plain step."""
    function, args = PROGRAMS[program]()
    search = partial(autoshard.search, function, *args, cluster=cluster, mesh={"data": 1}, donate_argnums=0)
    if how in ("remat auto", "state on host", "activations on host"):
        plain = search(**PLAIN, memory_limit_bytes=1e15).cost.peak_bytes
        limit = SHARE * plain if how == "remat auto" else 1e15
        return Found(search(**WAYS[how], memory_limit_bytes=limit), limit if how == "remat auto" else 0.0)
    return Found(search(**WAYS.get(how, PLAIN), memory_limit_bytes=1e15), 0.0)


def run(program: str, how: str, cluster: Cluster, lock: str) -> Row:
    """Searches, waits for the device, compiles and measures."""
    started = time.perf_counter()
    try:
        found = searched(program, how, cluster)
    except AutoshardError as error:
        return Row(program, how, refused=str(error))
    took = time.perf_counter() - started
    function, args = PROGRAMS[program](**({"remat": True} if how == "jit, by hand" else {}))
    with _alone(lock):
        state, *batch = _filled(args)
        if how in OWN:
            step = jax.jit(function, donate_argnums=0)
        else:
            state, *batch = found.strategy.shard(state, *batch)
            step = found.strategy.apply(function)
        started = time.perf_counter()
        compiled = step.lower(state, *batch).compile()
        compiling = time.perf_counter() - started
        losses, seconds = [], []
        for number in range(WARM + STEPS):
            began = time.perf_counter()
            state, loss = jax.block_until_ready(compiled(state, *batch))
            seconds.append(time.perf_counter() - began)
            if number < WARM:
                losses.append(float(loss))
            if number == WARM - 1:
                check = sum(float(jnp.abs(leaf).sum(dtype=jnp.float32)) for leaf in jax.tree.leaves(state["params"]))
        stats = jax.devices()[0].memory_stats() or {}
    cost = found.strategy.cost
    return Row(
        program,
        how,
        seconds=statistics.median(seconds[WARM:]),
        peak_bytes=float(stats.get("peak_bytes_in_use", 0)),
        compiled_bytes=_needed_bytes(compiled),
        losses=tuple(losses),
        check=check,
        predicted_seconds=cost.makespan_seconds,
        predicted_bytes=cost.peak_bytes,
        limit_bytes=found.limit_bytes,
        search_seconds=took,
        compile_seconds=compiling,
    )


def _needed_bytes(compiled: jax.stages.Compiled) -> float:
    memory: Any = compiled.memory_analysis()  # None where a backend does not say
    if memory is None:
        return 0.0
    return float(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes)


@contextmanager
def _alone(lock: str) -> Iterator[None]:
    """The only process on the device."""
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _filled(args: Any) -> Any:
    """Values of a train step's arguments: random parameters, zeros as optimizer state, small integers as tokens."""

    def fill(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten_with_path(args)
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten([value(jax.tree_util.keystr(path), leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)])

    def value(path: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if "optimizer" in path:
            return jnp.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, 100, leaf.dtype)
        scale = 0.02 if "params" in path else 1.0
        return (scale * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return fill(jax.random.key(0))


def measured(rows: Sequence[tuple[str, str]], seconds: float, processes: int, cluster: str | None) -> Iterator[Row]:
    """Runs rows in processes of their own, as far as time allows, and gives each as it ends."""
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        lock = str(Path(folder) / "device")
        waiting = [pool.submit(_in_a_process, *row, ends, lock, cluster) for row in rows]
        for future in as_completed(waiting):
            yield future.result()


def _in_a_process(program: str, how: str, ends: float, lock: str, cluster: str | None) -> Row:
    left = ends - time.monotonic()
    if left <= 0:
        return Row(program, how, refused="no time was left")
    command = [sys.executable, "-m", "benchmarks.one_device", "--row", program, how, "--lock", lock]
    command += ["--cluster", cluster] if cluster else []
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    environment = memory | {"JAX_TRACEBACK_FILTERING": "off"} | os.environ
    tuned = f"--xla_gpu_per_fusion_autotune_cache_dir={Path(lock).with_name('tuned')}"  # rows of a model have most kernels in common
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {tuned}"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=min(left, ROW_SECONDS), check=False)
    except subprocess.TimeoutExpired:
        return Row(program, how, refused="no time was left")
    if done.returncode:
        return Row(program, how, refused=" ".join((done.stderr.strip() or "failed").splitlines()[-3:])[-600:])
    return _row(done.stdout.splitlines()[-1])


def _row(line: str) -> Row:
    fields = json.loads(line)
    return Row(**fields | {"losses": tuple(fields["losses"])})


def predicted_again(row: Row, cluster: Cluster) -> Row:
    """What was measured, beside predictions for another cluster."""
    if row.refused:
        return row
    cost = searched(row.program, row.how, cluster).strategy.cost
    return replace(row, predicted_seconds=cost.makespan_seconds, predicted_bytes=cost.peak_bytes)


def report(rows: Sequence[Row]) -> Report:
    """The rows, and how far predictions are off."""
    plain = {row.program: row for row in rows if row.how == "jit" and not row.refused}
    ran = [row for row in rows if not row.refused]
    off = [
        max(ratio, 1 / ratio) - 1
        for row in ran
        if row.seconds and row.how != "jit, by hand"
        for ratio in [row.predicted_seconds / row.seconds]
    ]
    columns = (
        "program",
        "how",
        ">step",
        ">predicted",
        ">ratio",
        ">of jit",
        ">peak",
        ">compiler's",
        ">predicted",
        ">ratio",
        ">losses off",
        ">parameters off",
    )
    parts: list[Any] = [Table(columns, tuple(_cells(row, plain.get(row.program)) for row in ran))]
    parts += [Paragraph(f"{row.program}, {row.how}: {row.refused}") for row in rows if row.refused]
    if off:
        parts.append(Paragraph(f"Predicted step times of {len(off)} rows are off by {100 * statistics.median(off):.0f} % in the median."))
    return Report("One device", tuple(parts))


def _cells(row: Row, plain: Row | None) -> tuple[str, ...]:
    times = format_seconds(row.seconds), format_seconds(row.predicted_seconds), f"{row.predicted_seconds / row.seconds:.2f}"
    peak = row.peak_bytes or row.compiled_bytes
    seen = (format_bytes(each) if each else "" for each in (row.peak_bytes, row.compiled_bytes))
    peaks = *seen, format_bytes(row.predicted_bytes), f"{row.predicted_bytes / peak:.2f}" if peak else ""
    if plain is None or plain is row:
        return row.program, row.how, *times, "", *peaks, "", ""
    losses = max(abs(a / b - 1) for a, b in zip(row.losses, plain.losses, strict=True))
    return (
        row.program,
        row.how,
        *times,
        f"{row.seconds / plain.seconds:.2f}",
        *peaks,
        f"{losses:.0e}",
        f"{abs(row.check / plain.check - 1):.0e}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, keeps and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_device", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), help="some models only")
    parser.add_argument("--quick", action="store_true", help="a small model only")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no row begins, and what runs is ended (default 900)")
    parser.add_argument("--processes", type=int, default=2, help="how many search and compile at a time (default 2)")
    parser.add_argument("--cluster", metavar="FILE", help="predict for this cluster: a file, or a name of the catalogue")
    parser.add_argument("--measured", metavar="FILE", help="predict again for rows that --json kept")
    parser.add_argument("--json", metavar="FILE", help="keep each row there as it ends, a line of JSON each")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row:
        cluster = Cluster.of(options.cluster) if options.cluster else start_of(jax.devices()[:1])
        print(json.dumps(asdict(run(*options.row, cluster, options.lock))))
        return 0
    if options.measured:
        before = [_row(line) for line in Path(options.measured).read_text().splitlines()]
        if options.cluster:
            before = [predicted_again(row, Cluster.of(options.cluster)) for row in before]
        show(report(before))
        return 0
    asked = QUICK if options.quick else tuple(row for row in ROWS if not options.programs or row[0] in options.programs)
    rows: list[Row] = []
    with progress_bar() as progress, Path(options.json or os.devnull).open("a") as kept:
        task = progress.add_task("measuring", total=len(asked))
        for row in measured(asked, options.seconds, options.processes, options.cluster):
            rows.append(row)
            kept.write(json.dumps(asdict(row)) + "\n")
            kept.flush()
            progress.update(task, description=f"{row.program} {row.how}", advance=1)
    order = {row: number for number, row in enumerate(asked)}
    show(report(sorted(rows, key=lambda row: order[row.program, row.how])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
