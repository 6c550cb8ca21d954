"""Is recomputation never worse than the better of keeping everything and `jax.checkpoint` around each layer by hand, when it is compiled?

``python -m benchmarks.recomputation`` compiles the train steps of twelve models for one TPU chip, without one: as traced, with
`jax.checkpoint` by hand around each layer (an LSTM's cell), with ``remat="full"``, and with what ``remat="auto"`` finds for the memory
halfway between the first two. Shown are compiled peaks and FLOPs. Two models more are GPTs of 1.3B parameters' width, of which the plain
step needs 1.5 times the memory of ``"auto"``. ``--cycles`` has the compiler estimate cycles, too, minutes for each.

``--choices`` compiles each choice of what one GPT keeps, and ``--offload`` what is found with all on the chip, and with optimizer state or
activations in the memory of its host, next to predicted peaks; ``--layers`` and the other sizes are that GPT's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.cli.terminal import show
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.errors import InfeasibleError
from autoshard.ir import Mesh
from autoshard.ir.rewrites import Recompute
from autoshard.recompute import Options
from autoshard.render import Report, Table, format_bytes, format_seconds
from autoshard.rewrite import applied, rewritten
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace
from autoshard.verify import compile_ahead, compiled_kernels, dot_flops, topology_of
from benchmarks.models import Program, bert, encoder_decoder, gpt, llama, lstm, mlp, moe, resnet, unet, vit

SUMMARY = "Is recomputation never worse than the better of none and jax.checkpoint around each layer by hand, when it is compiled?"
CHIP = "v5e:1x1"
UNLIMITED_BYTES = 1e12  # so that no choice is refused before it is compiled
PLAIN_SHARE = 1.5  # of the memory that the plain step of `WIDE` needs

_GPT: dict[str, Any] = {"layers": 4, "width": 1024, "heads": 16, "vocabulary": 8192, "batch": 8, "length": 1024}
_LLAMA: dict[str, Any] = _GPT | {"kv_heads": 4, "ffn": 2816}
PROGRAMS: dict[str, Callable[..., Program]] = {
    "gpt": partial(gpt, **_GPT),
    "gpt_scan": partial(gpt, **_GPT, scan=True),
    "llama": partial(llama, **_LLAMA),
    "llama_scan": partial(llama, **_LLAMA, scan=True),
    "moe": partial(moe, **_GPT | {"layers": 2}),
    "t5": partial(encoder_decoder, **_GPT | {"layers": 2, "length": 512, "batch": 16}),
    "bert_scan": partial(bert, **_GPT | {"batch": 16, "length": 512}, scan=True),
    "vit": partial(vit, 4, batch=64),
    "unet": partial(unet, batch=64, side=128),
    "resnet": partial(resnet, (2, 2, 2, 2), batch=64, groups=8),
    "lstm": partial(lstm, batch=128, length=128),
    "mlp": partial(mlp, 4, 1024, 4096, batch=32_768),
}
WIDE: dict[str, Callable[..., Program]] = {
    "gpt_1.3B": partial(gpt, 4, 2048, 16, 50_304, batch=4, length=2048),
    "gpt_1.3B_scan": partial(gpt, 4, 2048, 16, 50_304, batch=4, length=2048, scan=True),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled step.

    Attributes:
        program, how: the model and what it keeps.
        peak_bytes: its peak, or the memory that the compiler says it needs where it refuses it.
        flops: of its products; 0 where it is refused.
        cycles: that the compiler estimates, if it is asked.
        limit_bytes: the memory that was given to the search for it.
        predicted_bytes: the predicted peak of that search.
        refused: why there is no such step.
    """

    program: str
    how: str
    peak_bytes: float = 0.0
    flops: float = 0.0
    cycles: float = 0.0
    limit_bytes: float = 0.0
    predicted_bytes: float = 0.0
    refused: str = ""


def compared(name: str, chip: str, cycles: bool) -> Iterator[Compiled]:
    """A model's step as traced, by hand, with full recomputation, and with what a search finds for the memory in between."""
    make, cluster = (PROGRAMS | WIDE)[name], Cluster.parse(chip)
    compiled = partial(_compiled, name, cluster=cluster, cycles=cycles)
    function, arguments = make(remat=False)
    plain, by_hand = (trace(*_flat(make(remat=remat)), donate_argnums=0) for remat in (False, True))
    yield (kept := compiled("none", plain))
    yield (hand := compiled("by hand", by_hand))
    full = _options(plain, cluster).full
    yield Compiled(name, "full", refused="nothing to compute again") if full is None else compiled("full", applied(Recompute(full), plain))
    limit = kept.peak_bytes / PLAIN_SHARE if name in WIDE else (kept.peak_bytes + hand.peak_bytes) / 2
    asked = {"cluster": cluster, "mesh": {"data": 1}, "donate_argnums": 0, "microbatches": None, "remat": "auto"}
    try:
        found = autoshard.search(function, *arguments, **asked, memory_limit_bytes=limit)
    except InfeasibleError as error:
        yield Compiled(name, "auto", limit_bytes=limit, refused=str(error))
        return
    auto = compiled("auto", rewritten(plain, Recompute.of(found.record.program.remat)))
    yield Compiled(name, "auto", auto.peak_bytes, auto.flops, auto.cycles, limit, found.cost.peak_bytes)


def report(found: Sequence[Compiled], chip: str) -> Report:
    """The table: peaks, FLOPs and cycles in shares of those of the step as traced and of the one by hand."""
    columns = ["program", "", ">peak", ">of the limit", ">of predicted"]
    columns += [column for what in ("peak", "FLOPs", "cycles") for column in (f">{what} of none", ">of by hand")]
    known = {(each.program, each.how): each for each in found}
    rows = []
    for each in found:
        shares = [_share(each.peak_bytes, each.limit_bytes), _share(each.peak_bytes, each.predicted_bytes)]
        for what in ("peak_bytes", "flops", "cycles"):
            others = (known.get((each.program, how), each) for how in ("none", "by hand"))
            shares += [_share(getattr(each, what), getattr(other, what)) for other in others]
        rows.append((each.program, each.how, format_bytes(each.peak_bytes), *shares, each.refused[:60]))
    return Report(f"Recomputation on {chip}", (Table((*columns, ""), tuple(rows)),))


def _share(value: float, of: float) -> str:
    return f"{value / of:.3f}" if value and of else ""


def _flat(program: Program) -> tuple[Any, ...]:
    return program[0], *program[1]


def _options(traced: Traced, cluster: Cluster) -> Options:
    return Options(traced, program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster)), cluster.device)


def _compiled(name: str, how: str, program: Traced, cluster: Cluster, cycles: bool) -> Compiled:
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=whole) for v in program.jaxpr.jaxpr.invars]
    jitted = jax.jit(jaxpr_as_fun(program.jaxpr), donate_argnums=program.graph.donated)
    lowered = jitted.trace(*types).lower(lowering_platforms=("tpu",))
    ahead = compile_ahead(lowered, Mesh.of({"data": 1}), topology_of(cluster), cycles)
    if ahead.peak_bytes is None:
        return Compiled(name, how, ahead.needed_bytes)
    scheduled = sum(each.runs * (each.cycles or 0) for each in compiled_kernels(ahead.hlo)) if cycles else 0
    return Compiled(name, how, ahead.peak_bytes, dot_flops(ahead.hlo).total, float(scheduled))


def _choices(make: Callable[..., Program], cluster: Cluster, cycles: bool) -> Iterator[Compiled]:
    """A step as traced, with each choice of what it keeps, and by hand."""
    plain, by_hand = (trace(*_flat(make(remat=remat)), donate_argnums=0) for remat in (False, True))
    compiled = partial(_compiled, "", cluster=cluster, cycles=cycles)
    yield compiled("none", plain)
    yield compiled("by hand", by_hand)
    for number, remat in enumerate(_options(plain, cluster).all):
        yield compiled(f"choice {number}", applied(Recompute(remat), plain))


def _show_offload(make: Callable[..., Program], cluster: Cluster) -> None:
    """Prints what is found with all on the chip, and with state or activations in the memory of its host, predicted and compiled."""
    step, arguments = make()
    common = {"cluster": cluster, "mesh": {"data": 1}, "donate_argnums": 0, "microbatches": None, "memory_limit_bytes": UNLIMITED_BYTES}
    target = "tpu" if topology_of(cluster).platform == "tpu" else "gpu"
    for offload in (None, "optimizer", "activations"):
        strategy = autoshard.search(step, *arguments, remat="full", offload=offload, **common)
        found = autoshard.verify(strategy, step, *arguments, target=target)
        compiled = "refused" if found.actual_peak_bytes is None else format_bytes(found.actual_peak_bytes)
        cost = strategy.cost
        predicted = f"predicted peak {format_bytes(cost.peak_bytes)}, step {format_seconds(cost.makespan_seconds)}"
        print(f"offload={offload!r:13}  {predicted}; compiled peak {compiled}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recomputation", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=(*PROGRAMS, *WIDE), default=[*PROGRAMS], help="some models only")
    parser.add_argument("--chip", default=CHIP, help="a cluster of one chip")
    parser.add_argument("--cycles", action="store_true", help="have the compiler estimate cycles")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each step")
    parser.add_argument("--choices", action="store_true", help="compile each choice of what a GPT keeps")
    parser.add_argument("--offload", action="store_true", help="compile a GPT with state and activations on the chip and on its host")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--scan", action="store_true")
    asked = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cluster = Cluster.parse(asked.chip)
    sizes = {"batch": asked.batch, "length": asked.length, "scan": asked.scan, "vocabulary": asked.vocabulary}
    one = partial(gpt, asked.layers, asked.width, **sizes)
    if asked.offload:
        _show_offload(one, cluster)
        return 0
    found: list[Compiled] = []
    table = (each for name in asked.programs for each in compared(name, asked.chip, asked.cycles))
    steps = _choices(one, cluster, asked.cycles) if asked.choices else table
    try:
        for each in steps:
            found.append(each)
            if asked.json:
                print(json.dumps(asdict(each)), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(found)} steps", file=sys.stderr)
    if not asked.json:
        show(report(found, asked.chip))
    return 0


if __name__ == "__main__":
    sys.exit(main())
