"""The part of a program that is computed on packed rows: products with experts' weights, and what is of each row between them.

A *row* is one of those that are sorted by expert, and a value's *row dimension* has them. An equation of a region reads some operands
packed, and makes each result packed, or of all rows together:

- ``row``: each row of its results is of the same row of its operands; found by the equation's sharding rule.
- ``product``: rows by their expert's weights; ``weights``: the gradient of these, the sum over an expert's rows.
- ``sum``: a sum over all rows; ``scatter``: rows that are scattered; ``gather``: rows that are looked up.
- ``into``: rows that are scattered into sorted order.

What a region reads and does not make *enters* it: of each row what is in its slot is looked up. It begins as early as few bytes enter: the
order in which tokens are sorted rather than the sorted tokens, which so are looked up where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.ir import Op, Rule
from autoshard.primitives import is_scatter, primitive
from autoshard.recompute.block import nbytes, variables

GROUPED = "ragged_dot_general"

# Kinds of primitives that are run on other rows by their rules alone
BY_ROW = frozenset(
    (
        *("elementwise", "rearrangement", "identity", "reinterpretation", "broadcast", "slice", "reversal", "concatenation"),
        *("reduction", "cumulative", "gather", "scatter", "sort", "selection", "creation"),
    )
)
POSITIONAL = frozenset(("create_token", "iota_2x32_shape"))
DEEPEST = 64  # equations before one that reads rows, through which these are followed

Dims = tuple[Any, ...]  # each an integer, or None


def with_rows(values: Sequence[Any], dims: Dims) -> Iterator[tuple[Any, int]]:
    """Those of an equation's operands or results that are packed, each with its row dimension."""
    return ((v, dim) for v, dim in zip(values, dims, strict=True) if dim is not None)


@dataclass(frozen=True, slots=True)
class Step:
    """How an equation is computed on packed rows.

    Attributes:
        kind: one of those above.
        reads: per operand its row dimension, if it is read packed; else None.
        makes: per result its row dimension, if it is made packed; else None.
    """

    kind: str
    reads: Dims
    makes: Dims


Packable = Callable[[JaxprEqn, Step, Var, int], bool]
"""Whether an equation runs as a step, by the sizes and the number of rows."""


@dataclass(slots=True)
class Region:
    """The equations that are computed on rows packed by the same sizes.

    Attributes:
        sizes: how many rows each expert has.
        experts, rows: how many there are.
        packable: whether an equation runs as a step.
        steps: by the number of the equation.
        dims: per value that is made packed its row dimension.
        begun: those of the steps that come before the products, whose results are computed on sorted rows, too, where they are read.
    """

    sizes: Var
    experts: int
    rows: int
    packable: Packable
    steps: dict[int, Step] = field(default_factory=dict)
    dims: dict[Var, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def add(self, k: int, eqn: JaxprEqn, step: Step) -> None:
        self.steps[k] = step
        self.dims.update(with_rows(eqn.outvars, step.makes))

    def runs(self, eqn: JaxprEqn, step: Step) -> bool:
        """Whether an equation runs as a step; elementwise ones do."""
        return primitive(eqn.primitive.name).kind == "elementwise" or self.packable(eqn, step, self.sizes, self.rows)

    def makes(self, v: Any, dim: int) -> bool:
        """Whether a value is made packed along this dimension."""
        return not isinstance(v, Literal) and self.dims.get(v) == dim


def regions_of(eqns: Sequence[JaxprEqn], ops: Sequence[Op], rules: Sequence[Rule | None], packable: Packable) -> list[Region]:
    """The regions of a list of equations; ``rules`` has a rule per op of the program."""
    found: dict[Var, Region] = {}
    inside: dict[Var, Region] = {}
    for k, (eqn, op) in enumerate(zip(eqns, ops, strict=True)):
        if (step := _grouped(eqn)) is not None:
            region = _of(eqn, step, packable)
            region = found.setdefault(region.sizes, region)
        else:
            region = next((inside[v] for v in variables(eqn.invars) if v in inside), None)
            step = None if region is None else _following(region, eqn, rules[op.index])
            step = step if step is None or region is None or region.runs(eqn, step) else None
        if region is not None and step is not None:
            region.add(k, eqn, step)
            inside.update(dict.fromkeys((v for v in eqn.outvars if v in region.dims), region))
    makers = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    for region in found.values():
        _Beginning(region, eqns, ops, rules, makers).extend()
        region.steps = dict(sorted(region.steps.items()))
    return [*found.values()]


def _of(eqn: Any, step: Step, packable: Packable) -> Region:
    """The region of a grouped product, still without steps."""
    lhs, _, sizes = eqn.invars
    return Region(sizes, sizes.aval.shape[0], lhs.aval.shape[step.reads[0]], packable)


def entering(region: Region, eqns: Sequence[JaxprEqn]) -> dict[tuple[Var, int], int]:
    """What enters a region, each with its row dimension, and the first equation that reads it."""
    found: dict[tuple[Var, int], int] = {}
    for k, step in region.steps.items():
        for v, dim in with_rows(eqns[k].invars, step.reads):
            if not region.makes(v, dim):
                found.setdefault((v, dim), k)
    return found


def _grouped(eqn: Any) -> Step | None:
    """The step of a product with each expert's weights, or of these weights' gradient."""
    if eqn.primitive.name != GROUPED or eqn.params["group_offset"] is not None:
        return None
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, others), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    rank, sizes = len(eqn.invars[0].aval.shape), eqn.invars[2]
    if isinstance(sizes, Literal) or len(sizes.aval.shape) != 1 or ragged in batch:
        return None
    if ragged in contracted:
        return Step("weights", (ragged, others[list(contracted).index(ragged)], None), (None,))
    kept = [d for d in range(rank) if d not in contracted and d not in batch]
    return Step("product", (ragged, None, None), (len(batch) + kept.index(ragged),))


def _following(region: Region, eqn: JaxprEqn, rule: Rule | None) -> Step | None:
    """The step of an equation that reads what a region makes."""
    if rule is None:
        return None
    for v, dims in zip(eqn.invars, rule.operands, strict=True):
        if not isinstance(v, Literal) and v in region.dims:
            factors = dims[region.dims[v]]
            step = _along(eqn, rule, factors[0]) if len(factors) == 1 else None
            reads = () if step is None else with_rows(eqn.invars, step.reads)
            return step if all(region.dims.get(x, dim) == dim for x, dim in reads) else None
    return None


def _along(eqn: JaxprEqn, rule: Rule, factor: int) -> Step | None:
    """The step of an equation whose rows are a factor of its rule."""
    try:
        reads = tuple(_place(dims, factor) for dims in rule.operands)
        makes = tuple(_place(dims, factor) for dims in rule.results)
    except ValueError:  # rows are a part of a dimension
        return None
    name, kind = eqn.primitive.name, rule.factors[factor].kind
    if kind == "pass_through" and None not in makes and _is_by_row(eqn, reads, makes):
        return Step("row", reads, makes)
    if any(dim is not None for dim in makes):
        return None
    if is_scatter(name) and reads[0] is None and None not in reads[1:]:
        return Step("scatter", reads, makes)
    if name == "gather" and reads[1] is None and eqn.params["dimension_numbers"].start_index_map == (reads[0],):
        return Step("gather", reads, makes)
    if name in ("reduce_sum", "dot_general") and kind == "reduction":
        return Step("sum", reads, makes)
    return None


def _is_by_row(eqn: JaxprEqn, reads: Dims, makes: Dims) -> bool:
    """Whether an equation does the same with whatever rows it has."""
    name = eqn.primitive.name
    if is_scatter(name):
        return reads[2] is not None
    if name == "dynamic_update_slice":
        return reads[1] is not None
    if name == "iota":
        return eqn.params["dimension"] != makes[0]
    return not eqn.effects and (name == "dot_general" or (primitive(name).kind in BY_ROW and name not in POSITIONAL))


def _place(dims: Sequence[Sequence[int]], factor: int) -> int | None:
    """The dimension that is a factor; None where there is none.

    Raises:
        ValueError: it is one of several of a dimension.
    """
    at = next((d for d, factors in enumerate(dims) if factor in factors), None)
    if at is not None and len(dims[at]) > 1:
        raise ValueError
    return at


class _Beginning:
    """The equations before a region that it computes on packed rows as well, since fewer bytes enter then."""

    def __init__(
        self, region: Region, eqns: Sequence[JaxprEqn], ops: Sequence[Op], rules: Sequence[Rule | None], makers: Mapping[Var, int]
    ):
        self.region, self.eqns, self.ops, self.rules, self.makers = region, eqns, ops, rules, makers
        self._known: dict[tuple[Var, int], tuple[float, tuple[int, Step] | None]] = {}

    def extend(self) -> None:
        """Adds them to the region."""
        waiting = [*entering(self.region, self.eqns)]
        while waiting:
            v, dim = waiting.pop()
            _, found = self._best(v, dim, DEEPEST)
            if found is None or self.region.makes(v, dim):
                continue
            k, step = found
            if k in self.region.steps:
                continue
            self.region.add(k, self.eqns[k], step)
            self.region.begun.add(k)
            waiting += self._reads(k, step)

    def _reads(self, k: int, step: Step) -> Iterator[tuple[Var, int]]:
        return ((v, dim) for v, dim in with_rows(self.eqns[k].invars, step.reads) if not self.region.makes(v, dim))

    def _best(self, v: Var, dim: int, depth: int) -> tuple[float, tuple[int, Step] | None]:
        """The fewest bytes that enter so that a value is packed, and the step that makes it; None: it enters itself."""
        key = v, dim
        if key not in self._known:
            self._known[key] = nbytes(v), None
            made = self._making(v, dim) if depth else None
            if made is not None:
                total = sum(self._best(x, at, depth - 1)[0] for x, at in dict.fromkeys(self._reads(*made)))
                if total <= nbytes(v):
                    self._known[key] = total, made
        return self._known[key]

    def _making(self, v: Var, dim: int) -> tuple[int, Step] | None:
        """The step that makes a value packed, if its equation can."""
        k = self.makers.get(v)
        if k is None or k in self.region.steps or self.eqns[k].primitive.name == "dot_general":
            return None
        eqn, rule = self.eqns[k], self.rules[self.ops[k].index]
        factors = () if rule is None else rule.results[list(eqn.outvars).index(v)][dim]
        if rule is None or len(factors) != 1:
            return None
        if is_scatter(eqn.primitive.name) and eqn.params["dimension_numbers"].scatter_dims_to_operand_dims == (dim,):
            inserted = dim in eqn.params["dimension_numbers"].inserted_window_dims
            step = Step("into", (dim, None, None), (dim,))
            return (k, step) if inserted and self.region.runs(eqn, step) else None
        step = _along(eqn, rule, factors[0])
        return (k, step) if step is not None and step.kind == "row" and self.region.runs(eqn, step) else None
