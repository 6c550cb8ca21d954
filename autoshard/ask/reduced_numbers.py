"""Numbers of a program's kernels next to those of the program as it is written, at a reduced size: forward and gradients.

Attention that was made fused is compared with the operations that it replaces, and each kernel that the program calls, in parts on several
devices, with the whole kernel. Kernels run in interpret mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.ask.kernel_checks import difference, filled, in_parts, least_divisor, place_of, ran
from autoshard.cluster import Cluster
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.rewrites import FusedAttention
from autoshard.lower.interpret import bind_unplaced
from autoshard.lower.kernels import on_shards
from autoshard.lower.narrow import WITHIN, error_of
from autoshard.render import Paragraph, Part, Table, format_flops
from autoshard.rewrite import compared
from autoshard.rewrite.ring_attention import IMPLEMENTATIONS
from autoshard.rules import rules_of
from autoshard.rules.kernels import kernel_rule
from autoshard.run.padded import PaddedArguments
from autoshard.run.sharded import plain
from autoshard.strategy import Record
from autoshard.trace import Traced, trace
from autoshard.verify import several_devices

FUSED_WITHIN = 1e-4
"""Of the largest element: float32 against float64, in sums over a thousand positions."""

MOST_FLOPS, MOST_BYTES = 2e10, 1e9
"""Of a kernel that is run: seconds of a CPU."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """One kernel's numbers.

    Attributes:
        place: its source line, and what it is.
        compared: with what, and at which size, in words.
        forward, gradients: the largest difference of results and of gradients, of the largest element; None where there are none. A kernel
            that the program calls in its backward pass has results of its own.
        within: what rounding makes of it.
        missing: why nothing was compared; empty where it was.
    """

    place: str
    compared: str = ""
    forward: float | None = None
    gradients: float | None = None
    within: float = FUSED_WITHIN
    missing: str = ""

    @property
    def agree(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return max(self.forward or 0.0, self.gradients or 0.0) <= self.within


def reduced_numbers(fn: Callable[..., Any], args: tuple[Any, ...], record: Record, known: Traced | None = None) -> tuple[Numbers, ...]:
    """The numbers of a program's kernels; none of one without.

    Args:
        fn, args, record: the program and its strategy.
        known: as the strategy has it.
    """
    if known is not None and not any(op.kernel is not None for op in known.graph.walk()):
        return tuple(_sums(record))
    args = PaddedArguments(record).as_written(args)
    traced = trace(plain(fn), *args, donate_argnums=record.donate_argnums, axis_names=record.mesh.all_names)
    found = [*_sums(record)]
    found += [each for rewrite in record.program.rewrites if isinstance(rewrite, FusedAttention) for each in _fused(traced, rewrite)]
    seen: set[tuple] = set()
    for op, rule in zip(traced.graph.walk(), rules_of(traced.graph), strict=True):
        key = str(op.origin), op.primitive, *(traced.graph.values[value].shape for value in (*op.operands, *op.results))
        if op.kernel is not None and rule is not None and not op.mapped and key not in seen:
            seen.add(key)
            found.append(_of_kernel(traced, op, rule))
    return tuple(found)


def numbers_parts(numbers: Sequence[Numbers]) -> Iterator[Part]:
    """The table of a report."""
    if not numbers:
        return
    rows = [(each.place, each.compared or "not compared", _shown(each.forward), _shown(each.gradients), _verdict(each)) for each in numbers]
    notes = ("Differences are of the largest element, at a reduced size, of kernels in interpret mode.",)
    yield Table(("kernel", "compared", ">results differ by", ">gradients by", ""), tuple(rows), notes)
    yield from (Paragraph(f"{each.place} is not compared: {each.missing}.") for each in numbers if each.missing)


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _verdict(numbers: Numbers) -> str:
    return "" if numbers.agree else "differs"


def _sums(record: Record) -> Iterator[Numbers]:
    """The error of sums that cross a level of the cluster in a narrow type."""
    for level in Cluster.from_dict(record.cluster).levels:
        if level.sums:
            how = f"with a sum in float32: normal numbers of {level.size} {level.name}"
            yield Numbers(f"sums between {level.name} in {level.sums}", how, error_of(level.sums, level.size), within=WITHIN[level.sums])


def _fused(traced: Traced, rewrite: FusedAttention) -> Iterator[Numbers]:
    implementation = IMPLEMENTATIONS[rewrite.kernel]
    stands_in = f"; of {implementation.interpreted}" if implementation.interpreted else ""
    for each in compared(traced, implementation):
        size = f"with the operations that it replaces: {each.sizes}{stands_in}" if each.sizes else ""
        yield Numbers(f"attention at {each.place}", size, each.forward, each.backward, missing=each.missing)


# -- kernels of the program ----------------------------------------------------------------------------------------------------


def _of_kernel(traced: Traced, op: Op, rule: Rule) -> Numbers:
    place = f"{op.primitive} at {place_of(op)}"
    if reason := _obstacle(rule):
        return Numbers(place, missing=reason)
    try:
        small, less = _smaller(op, rule, traced.graph)
        if small.kernel is not None and (small.kernel.flops > MOST_FLOPS or small.kernel.nbytes > MOST_BYTES):
            return Numbers(place, missing=f"it cannot be made small, and {format_flops(small.kernel.flops)} are too many for a CPU")
        return _in_parts(traced, small, less, place)
    except Exception as error:  # a kernel's body or a foreign function may raise anything here
        reason = str(error).split("\n")[0].rstrip(".")[:160]
        return Numbers(place, missing=f"it does not run on this machine's devices ({type(error).__name__}: {reason})")


def _obstacle(rule: Rule) -> str:
    if not any(factor.shardable for factor in rule.factors):
        return "it stays whole on each device, so there are no parts"
    if len(several_devices()) == 1:
        return "there is one device; XLA_FLAGS=--xla_force_host_platform_device_count=8 gives more of a CPU"
    return ""


def _in_parts(traced: Traced, op: Op, rule: Rule, place: str) -> Numbers:
    assert op.equation is not None and op.kernel is not None
    equation = op.equation
    operands = _operands(traced, op)

    def bound(*operands: Any, **replaced: Any) -> list[Any]:
        return bind_unplaced(equation, operands, **replaced)

    factors = _parted(rule, len(devices := several_devices()))
    if not factors:
        return Numbers(place, missing=f"its parts are more than the {len(devices)} devices that there are")
    with jax.default_device(devices[0]):
        whole = ran(bound, operands)
    parts = in_parts(op, rule, factors, bound, operands, whole, devices)
    found = [difference(a, b) for k, (a, b) in enumerate(zip(whole, parts, strict=True)) if k not in op.kernel.unread]
    if not any(0 < scale < np.inf for _, scale, _ in found):
        return Numbers(place, missing="its results are zero, or no numbers, of those that are made up for it")
    of, allowed = max(((differs / (scale or 1.0), allowed / (scale or 1.0)) for differs, scale, allowed in found), default=(0.0, 0.0))
    shapes = ", ".join(str(list(np.shape(x))) for x in whole)
    n = math.prod(factors.values())
    return Numbers(place, f"in {n} parts with the whole kernel, of results {shapes}", of, within=allowed)


def _parted(rule: Rule, devices: int) -> dict[int, int]:
    """Into how many parts factors are cut: each into as few as it can be, while there are devices."""
    found: dict[int, int] = {}
    for factor, n in _counts(rule).items():
        if math.prod(found.values()) * n <= devices:
            found[factor] = n
    return found


def _counts(rule: Rule) -> dict[int, int]:
    """The factors that may be cut, of each dimension the first, each with the least number of equal parts."""
    sizes = [factor.size for factor in rule.factors]
    own = [[f for f in dim if sizes[f] > 1] for dims in (*rule.operands, *rule.results) for dim in dims]
    minor = {f for dim in own for f in dim[1:]}
    return {f: least_divisor(sizes[f]) for f, each in enumerate(rule.factors) if each.shardable and sizes[f] > 1 and f not in minor}


def _operands(traced: Traced, op: Op) -> list[Any]:
    """The operands of a kernel: constants as they are, random numbers, and ones as integers, which are valid lengths and positions."""
    assert op.equation is not None
    known = _constants(traced)
    types = [x.aval for x in op.equation.invars]
    values = [known.get(value) for value in op.operands] if len(op.operands) == len(types) else [None] * len(types)
    pairs = enumerate(zip(values, types, strict=True))
    return [x if x is not None and np.shape(x) == aval.shape else filled(aval, seed) for seed, (x, aval) in pairs]


def _constants(traced: Traced) -> dict[int, Any]:
    """The values of a program that are constants, in loops as well."""
    graph = traced.graph
    known: dict[int, Any] = dict(zip(graph.literals, graph.written, strict=False))
    if len(graph.constants) == len(traced.jaxpr.consts):
        known |= dict(zip(graph.constants, traced.jaxpr.consts, strict=True))
    for op in graph.walk():
        for holder in op.holders:
            (first, *rest) = holder.sources or (None,)
            if first is not None and not rest and not first.shift and first.value in known:
                known |= dict.fromkeys((holder.value, *holder.views), known[first.value])
    return known


def _smaller(op: Op, rule: Rule, graph: Graph) -> tuple[Op, Rule]:
    """A kernel of fewer blocks, with its rule; as it is where it has no grid."""
    if op.primitive != "pallas_call" or op.equation is None:
        return op, rule
    sizes = _counts(rule)

    def shapes(tensors: Sequence[Sequence[Sequence[int]]], values: Sequence[int]) -> list[tuple[int, ...]]:
        whole = [graph.values[value].shape for value in values]
        cut = [[math.prod(rule.factors[f].size // sizes[f] for f in dim if f in sizes) for dim in dims] for dims in tensors]
        return [tuple(size // n for size, n in zip(shape, by, strict=True)) for shape, by in zip(whole, cut, strict=True)]

    operands, results = shapes(rule.operands, op.operands), shapes(rule.results, op.results)
    mapping = op.params["grid_mapping"]
    scalars = len(operands) - mapping.num_inputs
    operands[:scalars] = [graph.values[value].shape for value in op.operands[:scalars]]  # the body expects them whole
    params = {**op.params, **on_shards(op.params, operands, results)}
    invars = [x if x.aval.shape == shape else _typed(x, shape) for x, shape in zip(op.equation.invars, operands, strict=True)]
    outvars = [_typed(x, shape) for x, shape in zip(op.equation.outvars, results, strict=True)]
    assert op.kernel is not None
    equation = op.equation.replace(params=params, invars=invars, outvars=outvars)
    n = math.prod(rule.factors[f].size // least for f, least in sizes.items())
    work = {name: getattr(op.kernel, name) / n for name in ("matrix_flops", "vector_flops", "nbytes")}
    kernel = replace(op.kernel, **work)
    return replace(op, params=params, equation=equation, kernel=kernel), kernel_rule(params, operands, op.kernel.unread)


def _typed(x: Any, shape: tuple[int, ...]) -> Any:
    return type(x)(x.aval.update(shape=shape))
