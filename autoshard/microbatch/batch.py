"""The batch of a program, found among its arguments, and the program in microbatches of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from math import gcd
from typing import Any

import jax

from autoshard.errors import TraceError
from autoshard.ir import Graph, Rule
from autoshard.lower import ops_by_path
from autoshard.microbatch.nested import Steps, WithBodies, steps_inside
from autoshard.microbatch.plan import LEAST_SHARE, Loop, plan_loop
from autoshard.microbatch.rewrite import in_microbatches
from autoshard.microbatch.rules import batch_rules
from autoshard.microbatch.several import in_several_loops
from autoshard.microbatch.work import Work
from autoshard.render import format_alternatives
from autoshard.search import alike_arguments
from autoshard.trace import Traced, rebuilt, types_of

ELSE = "or leave microbatches out; in stages such a step runs with microbatches=1."

NAMED = "Give the batch as an argument with a dimension of examples, and name it, as in batch='x', where it is taken for state"

CLEAR_SHARE = 0.75  # of the products in the loop: this is the batch, whatever else depends on others


def microbatched(traced: Traced, n: int) -> Traced:
    """The program as a loop over ``n`` microbatches; itself for one.

    Results are those of the whole batch, up to the order in which sums are added.

    Raises:
        TraceError: ``n`` is no positive number, nothing in the arguments is a batch that it divides, or products need all examples at once.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TraceError(f"microbatches are a whole number, 1 or more, got {n!r}. Use 2, for instance.")
    return traced if n == traced.microbatches else in_loop(traced, n, several=True)


def in_loop(traced: Traced, n: int, several: bool = False, fixed: Set[int] = frozenset()) -> Traced:
    """The program as a loop over ``n`` microbatches, of one trip for one.

    Args:
        several: allow loops one after the other, where a later part of the step reads what comes of all examples in an earlier one, and
            loops in each of several steps that the program has in loops and branches of its own.
        fixed: the positions of arguments that hold no examples, beside those that the step replaces.

    Raises:
        TraceError: nothing in the arguments is a batch that ``n`` divides, or products need all examples at once.
    """
    rules = batch_rules(traced.graph)
    try:
        return _in_loop(traced, rules, n, several, fixed)
    except TraceError:
        steps = steps_inside(traced, rules, fixed)
        if not steps:
            raise
    made = _in_each(traced, steps, n)
    if several:
        return made
    raise TraceError(
        f"stages are cut in one step, and this program has steps inside {_loops(traced, steps)}. Search one of these by itself, or leave "
        "stages out."
    )


def _loops(traced: Traced, steps: Steps) -> str:
    return ", ".join(f"{op.primitive} at {op.origin}" for op in traced.graph.ops if op.index in steps)


def _in_each(traced: Traced, steps: Steps, n: int) -> Traced:
    """The program with a loop over ``n`` microbatches in each of its steps."""
    each = {index: [step and in_loop(step.traced, n, True, step.fixed) for step in bodies] for index, bodies in steps.items()}
    interpreter = WithBodies(ops_by_path(traced.graph), each)

    def function(*arguments: Any) -> list[Any]:
        return interpreter.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, arguments)

    made = rebuilt(traced, jax.make_jaxpr(function)(*types_of(traced.jaxpr.jaxpr.invars)), n)
    notes = (note for bodies in each.values() for body in bodies if body is not None for note in body.graph.assumptions)
    note = f"microbatches are those of each step in {_loops(traced, steps)}"
    return replace(made, graph=replace(made.graph, assumptions=tuple(dict.fromkeys((*made.graph.assumptions, note, *notes)))))


def _in_loop(traced: Traced, rules: Sequence[Rule | None], n: int, several: bool, fixed: Set[int]) -> Traced:
    """As `in_loop`, but for steps in loops and branches."""
    graph = traced.graph
    mapped = next((op for op in graph.walk() if op.mapped), None)
    if mapped is not None and not several:
        raise TraceError(
            f"stages compute parts of a step on parts of the devices, and the shard_map at {mapped.origin} computes on shards of all "
            "devices, as its mesh fixes them. Write its work with sharding constraints instead, or leave stages out."
        )
    loop = _most_inside(graph, rules, n, fixed)
    function, loops, at_once = in_microbatches(traced.jaxpr, graph, rules, loop), 1, 0.0
    if (error := _refusal(graph, rules, loop)) is not None:
        found = in_several_loops(traced, loop) if several and mapped is None else None
        if found is None:
            raise error
        function, loops, at_once = found
    split = ", ".join(f"{_path(graph, value)} along dimension {dim}" for value, dim in loop.batch.items())
    try:
        made = rebuilt(traced, jax.make_jaxpr(function)(*types_of(traced.jaxpr.jaxpr.invars)), n)
    except TraceError:
        if error is None:
            raise
        raise error from None  # why one loop would not do says more than why several do not
    note = f"the step computes {n} microbatches one after the other, each of one example in {n}, and adds gradients up; split: {split}"
    if loops > 1:
        note += f"; in {loops} such loops, since later parts of the step read what comes of all examples in earlier ones"
    if at_once > LEAST_SHARE:
        note += f"; {at_once:.1%} of the {Work.of(graph).unit}s read all examples at once, as the scores of all pairs do"
    return replace(made, graph=replace(made.graph, assumptions=(*made.graph.assumptions, note)))


def loop_of_batch(graph: Graph, rules: Sequence[Rule | None], n: int) -> Loop:
    """The plan of the batch that has most of the products in the loop.

    Raises:
        TraceError: nothing in the arguments is a batch that ``n`` divides, or products need all examples at once.
    """
    loop = _most_inside(graph, rules, n)
    if (error := _refusal(graph, rules, loop)) is not None:
        raise error
    return loop


def _most_inside(graph: Graph, rules: Sequence[Rule | None], n: int, fixed: Set[int] = frozenset()) -> Loop:
    """The plan of what is most likely the batch: most of the products are in its loop, or it leads arrays, or most products depend on it.

    Raises:
        TraceError: nothing in the arguments is a batch that ``n`` divides.
    """
    work = Work.of(graph)
    total = work.of_ops(graph.ops, rules, graph)
    best: tuple[tuple[bool, bool, bool, float, float], Loop] | None = None
    seen: list[set[tuple[int, int]]] = []
    indivisible: list[str] = []
    possible: list[int] = []  # of what is tried first
    for batch in _batches(graph, fixed):
        sizes = {value: graph.values[value].shape[dim] for value, dim in batch.items()}
        wrong = [f"{_path(graph, value)} has {size}" for value, size in sizes.items() if size % n]
        if wrong:
            indivisible += wrong
            common = gcd(*sizes.values())
            numbers = [k for k in range(2, common + 1) if common % k == 0]
            possible = possible or numbers
            if numbers and _work_inside(graph, rules, work, plan_loop(graph, rules, batch, numbers[0])) >= total * (1 - LEAST_SHARE):
                break  # this is the batch, and no other dimension is one
            continue
        loop = plan_loop(graph, rules, batch, n)
        inside = _work_inside(graph, rules, work, loop)
        runs, pairs = loop.obstacle(total) is None, set(batch.items())
        is_part = any(pairs < others for others in seen)
        seen.append(pairs)
        waiting = sum(flops for _, flops in loop.coupled)
        first = inside > 0 and not any(batch.values())
        key = runs and inside >= CLEAR_SHARE * total, runs and not is_part and first, first, inside + waiting, inside
        if best is None or key > best[0]:
            best = key, loop
        if inside >= total * (1 - LEAST_SHARE):
            break
    if best is None:
        why = f"of what could be one, {_listed(indivisible)} examples" if indivisible else "no argument holds examples"
        remedy = f"Use {format_alternatives(possible)}" if possible else NAMED
        raise TraceError(f"the number of microbatches divides a batch among the arguments, got {n}: {why}. {remedy}.")
    if not best[0][-1]:
        raise _nothing_inside(graph, best[1], indivisible)
    return best[1]


def _nothing_inside(graph: Graph, loop: Loop, indivisible: Sequence[str]) -> TraceError:
    """The refusal of a batch that no work is computed of, example by example; ``indivisible`` is what else could be one."""
    causes = [*(cause for cause, _ in loop.coupled), *loop.early]
    paths = _listed(_path(graph, value) for value in loop.batch)
    why = str(causes[0]) if causes else f"no {Work.of(graph).unit} is computed of single examples of {paths}"
    remedy = causes[0].remedy if causes else NAMED
    others = f"; of what else could be a batch, {_listed(indivisible)} examples, which {loop.n} does not divide" if indivisible else ""
    return TraceError(f"microbatches are computed one after the other, and {why}{others}. {remedy}, {ELSE}")


def _refusal(graph: Graph, rules: Sequence[Rule | None], loop: Loop) -> TraceError | None:
    """Why products would be computed of all examples at once; None where they are not."""
    work = Work.of(graph)
    total = work.of_ops(graph.ops, rules, graph)
    if (held_up := loop.obstacle(total)) is None:
        return None
    return TraceError(
        f"microbatches are computed one after the other, and {held_up[0]}; {held_up[1] / total:.0%} of the {work.unit}s wait for it. "
        f"{held_up[0].remedy}, {ELSE}"
    )


def divisors(traced: Traced, fixed: Set[int] = frozenset()) -> tuple[int, ...]:
    """The numbers, ascending, that divide the batch of a program; of what may be the batch, that which most of the products depend on.

    Of steps in loops and branches those that divide the batch of each.

    Args:
        fixed: as for `in_loop`.
    """
    graph, rules = traced.graph, batch_rules(traced.graph)
    work = Work.of(graph)
    total = work.of_ops(graph.ops, rules, graph)
    most, found = -1.0, 1
    for batch in _batches(graph, fixed):
        size = gcd(*(graph.values[value].shape[dim] for value, dim in batch.items()))
        least = next((n for n in range(2, size + 1) if size % n == 0), None)
        inside = 0.0 if least is None else _work_inside(graph, rules, work, plan_loop(graph, rules, batch, least))
        if inside > most:
            most, found = inside, size
        if inside >= total * (1 - LEAST_SHARE):
            break
    if most <= 0:
        inside = steps_inside(traced, rules, fixed)
        sizes = [divisors(step.traced, step.fixed)[-1] for bodies in inside.values() for step in bodies if step is not None]
        found = gcd(*sizes) if sizes else found
    return tuple(n for n in range(1, found + 1) if found % n == 0)


def _work_inside(graph: Graph, rules: Sequence[Rule | None], work: Work, loop: Loop) -> float:
    return work.of_ops([op for op in graph.ops if loop.phases[op.index] == "inside"], rules, graph)


def _batches(graph: Graph, fixed: Set[int] = frozenset()) -> Iterator[dict[int, int]]:
    """What may be the batch: arrays that may hold examples, of one size along dimension 0, or 1; see `in_loop`."""
    for dim in (0, 1):
        for values in alike_arguments(graph, dim, graph.without_examples(dim) | {graph.arguments[k] for k in fixed}):
            if graph.values[values[0]].shape[dim] > 1:
                yield dict.fromkeys(values, dim)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _path(graph: Graph, value: int) -> str:
    return graph.argument_paths[graph.arguments.index(value)]
