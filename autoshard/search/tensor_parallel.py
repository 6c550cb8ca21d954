"""Tensor parallelism: data parallelism over all mesh axes but the last, and split contraction pairs over that, detected in any program.

*Fixed choices.* The last mesh axis is the *model* axis, the others split the batch (found as `data_parallel` finds it). A *contraction
pair* is a product with a weight whose output feature goes, never reduced on the way, to products with weights that contract it: up and down
projections; query, key and value against output projections, by their heads; convolutions, by their channels. Both are split over the model
axis by that feature, which leaves one reduction a pair (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). A product whose output
feature is only reduced, such as logits whose loss sums over a vocabulary, is split by it where that is faster, and so are look-up tables.
Where a feature is taken apart on the way, such as fused query, key and value, the second products are split by the parts that reach them,
and the op that makes the feature follows. Names are not read.

In loops over microbatches, where time would be saved by whole sums of gradients, state and what the loops read and add up of it are split
over the other axes as well, as without such loops: memory is what microbatches are for.
*All other choices* follow by sharding propagation (`autoshard.search.sharding_propagation`): gradients and state like weights, and values
between pairs replicated or, where that is faster, split as in sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198). Repeated
layers have equal labels (`autoshard.reductions.symmetry`).
*Objective.* The judge's makespan among the variants, within each the propagation's. *Ties.* The variant that splits more.

Complexity: weight products x ops that read a feature, then that of sharding propagation for each variant. A heuristic.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from autoshard.errors import InfeasibleError
from autoshard.ir import NOWHERE, Assignment, Dims, Flow, Holder, Op, Rule
from autoshard.ir.naming import is_backward
from autoshard.memory_limit.lagrangian import fastest_within
from autoshard.primitives import is_matrix, moves
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, silent
from autoshard.reductions import symmetry
from autoshard.search.baselines import split_batch, state_in_loops
from autoshard.search.propagation import Propagation
from autoshard.search.searcher import Searcher, Solution
from autoshard.search.sharding_propagation import Part, PropagationSearch

TAKES_APART = frozenset({"split", "slice", "reshape"})

Splits = dict[int, int]
"""Per op index, the factor that the model axis splits."""


@dataclass(frozen=True, slots=True)
class TensorParallel(Searcher):
    """The tensor-parallel baseline.

    Attributes:
        sequence: whether values between pairs may be split over the model axis where that is faster; else a pair ends in an all_reduce.
        vocabulary: whether products whose features are only reduced, and look-up tables, may be split over the model axis.
        state: whether loops over microbatches keep state and sums of gradients split over the other axes, too; else where that is faster.
    """

    name: ClassVar[str] = "tensor_parallel"
    differs_by_mesh: ClassVar[bool] = True

    sequence: bool = True
    vocabulary: bool = True
    state: bool = True

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The best variant of the hybrid.

        Raises:
            InfeasibleError: none fits the memory limit; names the smallest peak found.
        """
        started = time.perf_counter()
        progress("finding contraction pairs", 0.0)
        batch = split_batch(problem)
        arguments = {value for value in problem.graph.arguments if any(dim >= 0 for dim in batch.layout(value))}
        features = contraction_pairs(problem, set(problem.graph.arguments) - arguments if problem.mesh.axes else set())
        model = len(problem.mesh.axes) - 1 if features.pairs else len(problem.mesh.axes)
        leaders = {variable.leader: index for index, variable in enumerate(problem.decisions.variables) if variable.leader >= 0}
        by_batch = [_batch_parts(problem, batch, arguments, axis) for axis in range(model)]
        variants = [features.pairs | features.ends, features.pairs] if self.vocabulary and features.ends else [features.pairs]
        in_loops = state_in_loops(problem) if self.state and model else {}
        judgements, refused = [], []
        for splits in variants:
            led = {op: factor for op, factor in splits.items() if op in leaders}  # a product that contracts nothing may follow its weight
            last = {leaders[op]: (factor, -1) if op in features.seconds and not self.sequence else factor for op, factor in led.items()}
            fixed = [*by_batch, last][: len(problem.mesh.axes)]
            run = _propagation(fixed, problem, progress)
            if in_loops:
                parts = _state_parts(problem, run.search({})[0].assignment, in_loops, model)
                run = _propagation([split | by for split, by in zip(parts, fixed, strict=True)], problem, progress)
            try:
                judgements.append(fastest_within(run.problem, run.search, steps=4, repairs=False, hints=hints)[0])
            except InfeasibleError as error:
                refused.append(error)
        if not judgements:
            raise min(refused, key=lambda error: error.smallest_peak_bytes or float("inf"))
        judgement = min(judgements, key=lambda one: one.cost.makespan_seconds)
        return Solution(
            judgement=judgement,
            lower_bound_seconds=min(problem.compute_bound(), judgement.cost.objective_seconds),
            stats={
                "n_variables": problem.n_variables,
                "pairs": len(features.pairs) - len(features.seconds),
                "search_seconds": time.perf_counter() - started,
            },
            hints=hints,
        )


def _batch_parts(problem: Problem, batch: Propagation, arguments: Collection[int], axis: int) -> dict[int, Part]:
    """The parts of labels under data parallelism over a mesh axis: dimensions of the batch, and factors of the ops that follow from it."""
    home = problem.decisions.home
    fixed: dict[int, Part] = {home[value][0]: batch.layout(value)[axis] for value in sorted(arguments) if value in home}
    for index, variable in enumerate(problem.decisions.variables):
        if variable.leader >= 0 and (factor := batch.choices.get(variable.leader, (NOWHERE,) * (axis + 1))[axis][0]) >= 0:
            fixed[index] = factor
    return fixed


def _propagation(fixed: Iterable[Mapping[int, Part]], problem: Problem, progress: Progress) -> PropagationSearch:
    """The search for what follows from fixed parts, on the smaller problem of equal layers where these have equal parts."""
    parts = tuple(fixed)
    small = symmetry.apply(problem)
    projected = small and small.project_parts(parts)
    if small and projected:
        return PropagationSearch(small, projected, last_first=True, progress=progress)
    return PropagationSearch(problem, parts, last_first=True, progress=progress)


def _state_parts(problem: Problem, found: Assignment, state: Mapping[int, tuple[int, int]], n_batch: int) -> list[dict[int, Part]]:
    """Per mesh axis the parts that split state in loops: as products read it, and over the first axes along dimensions that are whole."""
    variables, home, sizes = problem.decisions.variables, problem.decisions.home, problem.mesh.sizes
    last: dict[int, tuple[int, int]] = {}  # by whole value the one of its parts that products are next to, and the dimensions that it lacks
    for value, (whole, lacks) in state.items():
        last[whole] = max(last.get(whole, (value, 0)), (value, lacks), key=lambda part: part[1])
    layouts: dict[int, list[int]] = {}
    for whole, (value, lacks) in last.items():
        shape = problem.graph.values[whole].shape
        layout = layouts[whole] = [dim + lacks if dim >= 0 else -1 for dim in found.layout(value)]
        for axis in (axis for axis in range(n_batch) if layout[axis] < 0):
            split = [dim for dim in range(lacks, len(shape)) if dim not in layout and shape[dim] % sizes[axis] == 0]
            layout[axis] = max(split, key=lambda dim: shape[dim], default=-1)
    parts: list[dict[int, Part]] = [{} for _ in sizes]
    for value, (whole, lacks) in state.items():
        index = home[value][0] if value in home else -1
        for axis, dim in enumerate(layouts[whole]):
            if index >= 0 and dim >= 0 and variables[index].leader < 0:
                parts[axis][index] = dim - lacks
    return parts


@dataclass(frozen=True, slots=True)
class Pairs:
    """The ops that are split by features.

    Attributes:
        pairs: the products of contraction pairs.
        seconds: the second ones of pairs, which leave partial sums.
        ends: products whose feature is only reduced, and table look-ups.
    """

    pairs: Splits
    seconds: frozenset[int]
    ends: Splits


def contraction_pairs(problem: Problem, weights: Iterable[int]) -> Pairs:
    """The contraction pairs of a program; of conflicting ones the first in program order.

    Args:
        weights: the arguments outside the batch; results of ops that only move a weight count as weights.
    """
    flow = _FeatureFlow(problem, weights)
    pairs: Splits = {}
    ends: Splits = {}
    seconds: set[int] = set()
    for op in problem.graph.walk():
        rule = problem.rules[op.index]
        if rule is None or is_backward(op) or op.index in pairs:
            continue
        if op.primitive == "gather" and op.operands[0] in flow.weights:
            ends.update((op.index, factor) for factor in _looked_up(rule))
            continue
        side = flow.weight_side(op)
        if side is None:
            continue
        for factor in _output_features(rule, side):
            use = flow.use(op.results[0], _dim(rule.results[0], factor))
            if use is None:
                continue
            if use.contracted and all(pairs.get(second, by) == by for second, by in use.contracted.items()):
                pairs |= use.contracted if use.taken_apart else {op.index: factor, **use.contracted}
                seconds |= set(use.contracted)
                break
            if use.reduced:
                ends[op.index] = factor
                break
    return Pairs(pairs, frozenset(seconds), {op: factor for op, factor in ends.items() if op not in pairs})


def _output_features(rule: Rule, side: int) -> list[int]:
    """The factors of the weight's own dimensions in the result, largest first."""
    weight, other, made = (_factors(dims) for dims in (rule.operands[side], rule.operands[1 - side], rule.results[0]))
    own = [f for f in sorted((weight & made) - other) if rule.factors[f].shardable and rule.factors[f].size > 1]
    return sorted(own, key=lambda factor: -rule.factors[factor].size)


def _looked_up(rule: Rule) -> list[int]:
    """The factor of a look-up table's rows: a reduction over the table alone. A list of one, or empty."""
    table = _factors(rule.operands[0])
    return [f for f in sorted(table) if rule.factors[f].kind == "reduction" and rule.factors[f].size > 1][:1]


def _factors(dims: Dims) -> set[int]:
    return {factor for dim in dims for factor in dim}


@dataclass(slots=True)
class _FeatureUse:
    """The ways in which a feature is used.

    Attributes:
        contracted: products with weights that contract it, or parts of it.
        reduced: whether another op reduces it.
        taken_apart: whether an op takes it apart.
    """

    contracted: Splits = field(default_factory=dict)
    reduced: bool = False
    taken_apart: bool = False


class _FeatureFlow:
    """The flow of features forward through a program, by ops that do not reduce them."""

    def __init__(self, problem: Problem, weights: Iterable[int]):
        self.problem = problem
        self.weights = set(weights)
        self.readers: dict[int, list[tuple[Op, int]]] = defaultdict(list)
        self.entered: dict[int, list[tuple[Holder, Flow]]] = defaultdict(list)
        for op in problem.graph.walk():
            for position, value in enumerate(op.operands):
                self.readers[value].append((op, position))
            for holder in op.holders:
                for flow in holder.sources:
                    self.entered[flow.value].append((holder, flow))
                if len(holder.sources) == 1 and not holder.sources[0].inside and holder.sources[0].value in self.weights:
                    self.weights.update((holder.value, *holder.views))
            if moves(op.primitive) and op.operands[0] in self.weights:
                self.weights.update(op.results)

    def weight_side(self, op: Op) -> int | None:
        """The position of the weight among a product's operands; None where none or both are weights, or the op is no product."""
        sides = [position for position, value in enumerate(op.operands[:2]) if value in self.weights]
        return sides[0] if is_matrix(op.primitive) and len(sides) == 1 else None

    def use(self, value: int, dim: int) -> _FeatureUse | None:
        """The uses of the feature in a dimension; None where it is returned or needed whole, or is contracted as well as reduced."""
        use = _FeatureUse()
        waiting = deque([(value, dim)])
        seen = set(waiting)
        while waiting:
            value, dim = waiting.popleft()
            if dim < 0 or value in self.problem.graph.results:
                return None
            steps = [(view, dim - flow.shift) for holder, flow in self.entered[value] for view in (holder.value, *holder.views)]
            for reader, position in self.readers[value]:
                if reader.bodies or is_backward(reader):
                    continue
                further = self._through(reader, position, dim, use)
                if further is None or (use.reduced and use.contracted):
                    return None
                steps += further
            waiting += [step for step in dict.fromkeys(steps) if step not in seen]
            seen.update(steps)
        return use

    def _through(self, op: Op, position: int, dim: int, use: _FeatureUse) -> list[tuple[int, int]] | None:
        """The values and dimensions in which an op's results have a feature that it reads; None where it needs all of the feature."""
        rule = self.problem.rules[op.index]
        if rule is None:
            return None
        factor = _major(rule, rule.operands[position][dim])
        if op.primitive in TAKES_APART and (factor < 0 or rule.factors[factor].size % self.problem.mesh.sizes[-1]):
            return self._parts(op, dim, use)
        if factor < 0:
            return None
        if rule.factors[factor].kind == "reduction":
            if self.weight_side(op) == 1 - position:
                use.contracted[op.index] = factor
            else:
                use.reduced = True
            return []
        made = [(value, _dim(dims, factor)) for value, dims in zip(op.results, rule.results, strict=True) if factor in _factors(dims)]
        return made if made and all(at >= 0 for _, at in made) else None

    def _parts(self, op: Op, dim: int, use: _FeatureUse) -> list[tuple[int, int]] | None:
        """Adds the uses of the parts into which an op takes a feature, each in the first dimension in which only products contract it."""
        rule, shapes, n = self.problem.rules[op.index], self.problem.graph.values, self.problem.mesh.sizes[-1]
        assert rule is not None
        taken = set(rule.operands[0][dim])
        for value, dims in zip(op.results, rule.results, strict=True):
            parts = [at for at, factors in enumerate(dims) if taken & set(factors)] if op.primitive == "reshape" else [dim]
            uses = (self.use(value, at) for at in parts if shapes[value].shape[at] % n == 0)
            contracting = next((one for one in uses if one is not None and one.contracted), None)
            if contracting is None:
                return None
            use.contracted |= contracting.contracted
        use.taken_apart = True
        return []


def _major(rule: Rule, factors: Sequence[int]) -> int:
    """The factor that an axis on a dimension of these factors splits; -1 where it can split none."""
    major = next((factor for factor in factors if rule.factors[factor].size > 1), -1)
    return major if major >= 0 and rule.factors[major].shardable else -1


def _dim(dims: Dims, factor: int) -> int:
    """The dimension whose first factor is the given one; -1: there is none."""
    return next((dim for dim, factors in enumerate(dims) if factors and factors[0] == factor), -1)
