"""Fallback rules for unregistered primitives: the equation is lowered, and Shardy's rules of its operations are composed.

Lowering one equation takes 5-10 ms. Each StableHLO operation's rule says which dimensions of its tensors are the same
factor; following the values through calls, loops and branches unifies factors, so that a dimension of the equation's
operands and results is a sequence of unified factors. A factor can be sharded where that needs no collective but its
own reduction:

- no operation needs it whole, and it occurs at most once in every tensor, intermediates included;
- a value that is partial over a factor is a result, and is not read again, which would need it combined first;
- a minor factor of an intermediate's dimension follows its majors in an operand or result, whose layout orders them.

Constants, iota and values computed from those alone are free: every use has factors of its own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from autoshard.errors import RuleError
from autoshard.ir import Factor, Rule
from autoshard.primitives import is_opaque
from autoshard.rules.registry import assemble

LEGALIZE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
POPULATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"

# Operations that XLA gathers although Shardy has a rule for them (seen in compiled modules, jaxlib 0.10.2).
GATHERED = frozenset({"stablehlo.fft", "stablehlo.triangular_solve"})
REPLACED = frozenset({"chlo.top_k", "chlo.ragged_dot"})  # they have rules as StableHLO, but XLA implements them by itself

IDENTITIES = frozenset({"stablehlo.optimization_barrier", "sdy.sharding_constraint"})
BROADCASTS = frozenset({"stablehlo.broadcast_in_dim"})  # new dimensions are factors of the result alone
CONSTANTS = frozenset({"stablehlo.constant", "stablehlo.iota"})
RETURNS = frozenset({"func.return", "stablehlo.return"})

# How partial results combine, by the one operation of a reduction's body.
OPERATORS = {
    "stablehlo.add": "sum",
    "stablehlo.multiply": "prod",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
NEUTRAL = {"sum": 0.0, "prod": 1.0}
SUMS = frozenset({"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution", "stablehlo.gather"})

_RULE = re.compile(r"op_sharding_rule<(?P<rule>.*?)(?: blocked_propagation=\{[^}]*\})?(?:, custom)?>$")


def lowered_rule(eqn: JaxprEqn) -> Rule | None:
    """The rule composed from an equation's StableHLO operations; None where it cannot be lowered alone, or has no shardable factor.

    >>> jaxpr = jax.make_jaxpr(jax.numpy.matmul)(jax.numpy.ones((8, 4)), jax.numpy.ones((4, 2)))
    >>> str(lowered_rule(jaxpr.eqns[0]))
    '([i, k], [k, j])->([i, j]) {i=8, j=2, k=4} reduction={k}'
    """
    if eqn.effects or is_opaque(eqn.primitive.name):
        return None
    try:
        rule = composed(lowered(eqn), ranks(eqn))
    except Exception:  # a primitive's own lowering may raise anything: it then stays replicated
        return None
    return rule if any(factor.shardable for factor in rule.factors) else None


def ranks(eqn: JaxprEqn) -> list[int]:
    """The rank of each operand, then of each result of an equation."""
    return [len(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]


def same_on_shards(eqn: JaxprEqn, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an equation lowers to the same operations and constants for operands of these shapes, so that no size enters its arithmetic.

    An unregistered primitive can then run on shards. Takes 5-10 ms for each of the two lowerings.
    """
    try:
        whole, shard = (_operations(lowered(eqn, operands)) for operands in (None, shapes))
    except Exception:  # a primitive's own lowering may raise anything: it then runs whole
        return False
    return whole == shard


def _operations(module: ir.Module) -> list[tuple[str, str]]:
    """The names of a module's operations in order, with the values of constants that are one number."""
    found = []
    for op in _walk(module.operation):
        splat = re.search(r"dense<([^\[\]]*?)>", str(op)) if op.name == "stablehlo.constant" else None
        found.append((op.name, splat[1] if splat else ""))
    return found


def lowered(eqn: JaxprEqn, shapes: Sequence[tuple[int, ...]] | None = None) -> ir.Module:
    """The StableHLO module of one equation, for operands of other shapes if given."""

    def function(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [aval.shape for aval in avals] if shapes is None else shapes
    pairs = zip(avals, shapes, strict=True)
    types = [jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval, shape in pairs]
    with eqn.ctx.manager if eqn.ctx.cur_abstract_mesh.empty else nullcontext():
        traced = jax.jit(function, keep_unused=True).trace(*types)
        module: Any = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")  # any platform: it is never compiled
    return module


def composed(module: ir.Module, ranks: Sequence[int], as_partitioned: bool = True) -> Rule:
    """The composed rule of a module's ``main``; linear in its operations. Modifies the module.

    Args:
        module: as `lowered` gives it.
        ranks: of each operand, then of each result; further dimensions of a tensor (the words of a typed key) stay whole.
        as_partitioned: whether factors that XLA is known to gather stay whole; otherwise Shardy's rules are followed.
    """
    stablehlo.register_stablehlo_passes()
    replaced = any(op.name in REPLACED for op in _walk(module.operation))
    with module.context:
        for pipeline in (LEGALIZE, POPULATE):
            PassManager.parse(pipeline).run(module.operation)
    functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in _walk(module.operation) if op.name == "func.func"}
    program = _Program(functions, as_partitioned)
    block = _block(functions["main"])
    operands = [program.tensor(argument.type) for argument in block.arguments]
    returned = program.run(block, operands, {})
    results = [found if found is not None else program.tensor(kind) for found, kind in returned]
    if replaced and as_partitioned:
        program.keep_whole(*operands, *results)
    return program.rule(operands, results, ranks)


def _walk(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


def _block(op: Any, region: int = 0) -> Any:
    (block,) = op.regions[region].blocks
    return block


def _shape(kind: Any) -> list[int]:
    return list(ir.RankedTensorType(kind).shape) if isinstance(kind, ir.RankedTensorType) else []  # a token has none


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor: per dimension its factors, major first, and whether an operation reads it."""

    dims: list[list[int]]
    read: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Reduction:
    """A tensor that is partial over factors, and the operator that combines it."""

    result: _Tensor
    factors: tuple[int, ...]
    operator: str


class _Factors:
    """A union-find structure of factors, each of which may also be split into a major and a minor one."""

    def __init__(self):
        self.sizes: list[int] = []
        self.whole: list[bool] = []
        self._next: list[tuple[int, ...]] = []  # empty, the factor that this one was unified with, or the two it was split into

    def new(self, size: int, whole: bool = False) -> int:
        self.sizes.append(size)
        self.whole.append(whole)
        self._next.append(())
        return len(self.sizes) - 1

    def parts(self, factors: Sequence[int]) -> list[int]:
        """The current representatives of a sequence of factors, without those of size one."""
        found = []
        for factor in factors:
            while len(self._next[factor]) == 1:
                (factor,) = self._next[factor]
            if self._next[factor]:
                found += self.parts(self._next[factor])
            elif self.sizes[factor] > 1:
                found.append(factor)
        return found

    def keep_whole(self, factors: Sequence[int]) -> None:
        for part in self.parts(factors):
            self.whole[part] = True

    def unify(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Unifies two sequences of equal product, from the major end; digits that interleave stay whole."""
        a, b = self.parts(left), self.parts(right)
        while a and b:
            common = math.gcd(self.sizes[a[0]], self.sizes[b[0]])
            if common > 1:
                self._same(self._split(a, common), self._split(b, common))
                continue
            products = [1, 1]
            while True:
                behind = int(products[1] < products[0])
                factor = (a, b)[behind].pop(0)
                self.whole[factor] = True
                products[behind] *= self.sizes[factor]
                if products[0] == products[1]:
                    break

    def _split(self, sequence: list[int], size: int) -> int:
        """The major part of this size, removed from the sequence."""
        factor = sequence.pop(0)
        if self.sizes[factor] == size:
            return factor
        whole = self.whole[factor]
        major, minor = self.new(size, whole), self.new(self.sizes[factor] // size, whole)
        self._next[factor] = (major, minor)
        sequence.insert(0, minor)
        return major

    def _same(self, a: int, b: int) -> None:
        if a != b:
            self._next[a] = (b,)
            self.whole[b] |= self.whole[a]


Known = Mapping[Any, "_Tensor | None"]
"""The tensor of each MLIR value; None for one computed from constants alone, of which every use has factors of its own."""


class _Program:
    """The factors of a module's tensors, while its operations are followed."""

    def __init__(self, functions: Mapping[str, Any], as_partitioned: bool):
        self.functions = functions
        self.as_partitioned = as_partitioned
        self.factors = _Factors()
        self.tensors: list[_Tensor] = []
        self.reductions: list[_Reduction] = []

    def tensor(self, kind: Any) -> _Tensor:
        """A new tensor with a new factor for each dimension."""
        return self._made([[self.factors.new(n)] for n in _shape(kind)])

    def _made(self, dims: list[list[int]]) -> _Tensor:
        self.tensors.append(_Tensor(dims))
        return self.tensors[-1]

    def keep_whole(self, *tensors: _Tensor) -> None:
        for tensor in tensors:
            for dim in tensor.dims:
                self.factors.keep_whole(dim)

    def run(self, block: Any, arguments: Sequence[_Tensor | None], outside: Known) -> list[tuple[_Tensor | None, Any]]:
        """The tensors that a block returns, with their types."""
        known = {**outside, **dict(zip(block.arguments, arguments, strict=True))}
        for op in (each.operation for each in block.operations):
            if op.name in RETURNS:
                return [(known[value], value.type) for value in op.operands]
            known.update(zip(op.results, self._results(op, known), strict=True))
        return []

    def _results(self, op: Any, known: Known) -> Sequence[_Tensor | None]:
        operands = [known[value] for value in op.operands]
        if op.name in CONSTANTS:
            return [None]
        if op.name in IDENTITIES:
            return operands
        if op.name == "func.call":
            callee = self.functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
            return [tensor for tensor, _ in self.run(_block(callee), operands, {})]
        if op.name == "stablehlo.while":
            return self._loop(op, known)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return self._branches(op, known)
        if operands and not any(operands) and not op.regions and len(op.results) == 1:
            return [None]
        return self._ruled(op, [self._read(value, known) for value in op.operands])

    def _read(self, value: Any, known: Known) -> _Tensor:
        tensor = known[value]
        if tensor is None:
            return self.tensor(value.type)
        tensor.read = True
        return tensor

    def _loop(self, op: Any, known: Known) -> list[_Tensor]:
        """The carries: initial value, body argument, body result and loop result are one tensor."""
        carries = [self.tensor(value.type) for value in op.operands]
        self._unify(carries, [self._read(value, known) for value in op.operands])
        for region in (0, 1):
            returned = self.run(_block(op, region), carries, known)
            for tensor, _ in returned:
                if tensor is not None:
                    tensor.read = True
            if region:
                self._unify(carries, [tensor for tensor, _ in returned])
        return carries

    def _branches(self, op: Any, known: Known) -> list[_Tensor]:
        results = [self.tensor(value.type) for value in op.results]
        for region in range(len(op.regions)):
            returned = [tensor for tensor, _ in self.run(_block(op, region), (), known)]
            for tensor in filter(None, returned):
                tensor.read = True
            self._unify(results, returned)
        return results

    def _unify(self, lefts: Sequence[_Tensor], rights: Sequence[_Tensor | None]) -> None:
        for left, right in zip(lefts, rights, strict=True):
            if right is not None:
                for a, b in zip(left.dims, right.dims, strict=True):
                    self.factors.unify(a, b)

    def _ruled(self, op: Any, operands: list[_Tensor]) -> list[_Tensor]:
        """The results of an operation by Shardy's rule; without one its operands and results stay whole."""
        if "sdy.sharding_rule" not in op.attributes or (self.as_partitioned and _gathered(op)):
            results = [self.tensor(value.type) for value in op.results]
            self.keep_whole(*operands, *results)
            return results
        rule = _parsed(op.attributes["sdy.sharding_rule"])
        numbers = [self.factors.new(factor.size, not factor.shardable) for factor in rule.factors]
        results = []
        for dims, value in zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True):
            made = [[numbers[f] for f in dim] for dim in dims]
            for d, (dim, n) in enumerate(zip(made, _shape(value.type), strict=True)):
                if math.prod(self.factors.sizes[f] for f in dim) != max(n, 1):  # a slice, say, of a factor
                    self.factors.keep_whole(dim)
                    made[d] = [self.factors.new(n, True)]
            results.append(self._made(made))
        inputs, results = results[: len(operands)], results[len(operands) :]
        for f in self._lost(op, rule):
            self.factors.keep_whole([numbers[f]])
        self._unify(operands, inputs)
        operator = _operator(op)
        reduced = tuple(number for number, factor in zip(numbers, rule.factors, strict=True) if factor.kind == "reduction")
        if operator is None:
            self.factors.keep_whole(reduced)
        elif reduced:
            self.reductions += [_Reduction(result, reduced, operator) for result in results]
        return results

    def _lost(self, op: Any, rule: Rule) -> list[int]:
        """The pass-through factors that not both operands and results have, and the factors that XLA does not split as Shardy does."""
        read, left = ({f for dims in tensors for dim in dims for f in dim} for tensors in (rule.operands, rule.results))
        kept = left if op.name in BROADCASTS else read & left
        if self.as_partitioned and op.name == "stablehlo.dynamic_update_slice":
            kept &= {f for dim in rule.operands[1] for f in dim}
        lost = [f for f, factor in enumerate(rule.factors) if factor.kind == "pass_through" and f not in kept]
        if self.as_partitioned and op.name == "stablehlo.pad":  # what is shifted goes from shard to shard
            low = ir.DenseI64ArrayAttr(op.attributes["edge_padding_low"])
            lost += [f for d, positions in enumerate(low) if positions for f in rule.operands[0][d]]
        if self.as_partitioned and op.name == "stablehlo.convolution":  # sums over spatial dimensions would need halos
            features = rule.operands[0][stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"]).input_feature_dimension]
            lost += [f for f, factor in enumerate(rule.factors) if factor.kind == "reduction" and f not in features]
        return lost

    def rule(self, operands: Sequence[_Tensor], results: Sequence[_Tensor], ranks: Sequence[int]) -> Rule:
        """The rule of the module, once all factors are known; ``ranks`` are those of the operands, then of the results."""
        parts, whole = self.factors.parts, self.factors.whole
        ranked = [*zip((*operands, *results), ranks, strict=True)]
        for tensor, rank in ranked:
            for dim in tensor.dims[rank:]:
                self.factors.keep_whole(dim)
        outside = [[parts(dim) for dim in tensor.dims[:rank]] for tensor, rank in ranked]
        ordered = {tuple(dim[a : b + 1]) for dims in outside for dim in dims for b in range(len(dim)) for a in range(b)}
        operators = self._operators(results)
        for tensor in self.tensors:
            seen: set[int] = set()
            for dim in map(parts, tensor.dims):
                for k, part in enumerate(dim):
                    if part in seen or (k and tuple(dim[: k + 1]) not in ordered):
                        whole[part] = True
                    seen.add(part)
        for dim in (dim for dims in outside for dim in dims):  # minors of an unshardable factor are unshardable
            for major, minor in itertools.pairwise(dim):
                whole[minor] |= whole[major]
        made: dict[int, Factor] = {}

        def factor(part: int) -> Factor:
            if whole[part]:
                return Factor(self.factors.sizes[part], "need_replication")
            kind = "reduction" if part in operators else "pass_through"
            return made.setdefault(part, Factor(self.factors.sizes[part], kind, operators.get(part)))

        tensors = [[tuple(map(factor, dim)) for dim in dims] for dims in outside]
        return assemble(tensors[: len(operands)], tensors[len(operands) :])

    def _operators(self, results: Sequence[_Tensor]) -> dict[int, str]:
        """The operator of each reduced factor; factors over which not every result is partial stay whole."""
        found: dict[int, dict[str, list[_Tensor]]] = {}
        for reduction in self.reductions:
            for part in self.factors.parts(reduction.factors):
                if reduction.result.read:
                    self.factors.whole[part] = True
                found.setdefault(part, {}).setdefault(reduction.operator, []).append(reduction.result)
        operators = {}
        for part, by_operator in found.items():
            (operator, tensors), *others = by_operator.items()
            if others or any(result not in tensors for result in results):
                self.factors.whole[part] = True
            operators[part] = operator
        return operators


def _parsed(attribute: Any) -> Rule:
    match = _RULE.search(str(attribute))
    if match is None:
        raise RuleError(f"Shardy's rules read '#sdy.op_sharding_rule<...>', got {attribute}. Report it with the version of jaxlib.")
    return Rule.parse(match["rule"] if "{" in match["rule"] else f"{match['rule']} {{}}")


def _gathered(op: Any) -> bool:
    """Whether XLA gathers, or aborts, where Shardy's rule needs no communication."""
    match op.name:
        case "stablehlo.custom_call":  # JAX marks those that XLA splits along the batch
            name = "mhlo.frontend_attributes"
            return name not in op.attributes or "num_batch_dims" not in ir.DictAttr(op.attributes[name])
        case "stablehlo.convolution":  # grouped
            return any(ir.IntegerAttr(op.attributes[name]).value > 1 for name in ("feature_group_count", "batch_group_count"))
    return op.name in GATHERED


def _operator(op: Any) -> str | None:
    """The operator that combines an operation's partial results; None where no collective has it."""
    if op.name in SUMS:
        return "sum"
    if op.name not in ("stablehlo.reduce", "stablehlo.scatter"):
        return None
    body = [each.operation for each in _block(op).operations]
    if len(body) != 2 or {*body[0].operands} != {*_block(op).arguments}:
        return None
    operator = OPERATORS.get(body[0].name)
    neutral = NEUTRAL.get(operator or "")
    if op.name == "stablehlo.reduce" and neutral is not None and not _is_constant(op.operands[1], neutral):
        return None  # every shard would count the initial value
    boolean = str(ir.RankedTensorType(op.results[0].type).element_type) == "i1"
    if boolean:
        return {"sum": "or", "prod": "and"}.get(operator or "", operator)
    return None if operator in ("and", "or") else operator  # XLA has these all_reduces for booleans alone


def _is_constant(value: Any, wanted: float) -> bool:
    """Whether an MLIR value is a scalar constant of this value."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "stablehlo.constant":
        return False
    text = re.search(r"dense<(.*?)>", str(value.owner))  # jaxlib 0.10.2 cannot hand out a complex attribute
    parts = re.findall(r"[^(),\s]+", text[1]) if text else []
    numbers = {"true": "1", "false": "0"}
    try:
        return bool(parts) and [float(numbers.get(part) or part) for part in parts] == [wanted, 0.0][: len(parts)]
    except ValueError:  # written as the bits of a special value
        return False
