"""The batch of a program, found among its arguments, and the program in microbatches of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from math import gcd
from typing import Any

import jax

from autoshard.errors import TraceError
from autoshard.ir import Graph, Rule
from autoshard.ir.rewrites import Microbatches
from autoshard.lower import AsItIs, ops_by_path
from autoshard.microbatch.nested import Steps, WithBodies, one_after_the_other, steps_inside
from autoshard.microbatch.plan import LEAST_SHARE, Loop, plan_loop
from autoshard.microbatch.rewrite import in_microbatches
from autoshard.microbatch.rules import batch_rules
from autoshard.microbatch.several import MOST_LOOPS, Pass, in_several_loops, several_passes
from autoshard.microbatch.work import Work
from autoshard.render import format_alternatives
from autoshard.search import alike_arguments
from autoshard.trace import Traced, of_jaxpr, rebuilt, types_of

ELSE = "or leave microbatches out; in stages such a step runs with microbatches=1."


class HeldUpError(TraceError):
    """A step cannot be computed in microbatches one after the other.

    Attributes:
        reason: why, and what to change in the step; the message goes on with what runs it as it is.
    """

    def __init__(self, message: str, *, reason: str = ""):
        super().__init__(message)
        self.reason = reason


NAMED = "Give the batch as an argument with a dimension of examples, and name it, as in batch='x', where it is taken for state"

CLEAR_SHARE = 0.75  # of the products in the loop: this is the batch, whatever else depends on others


def microbatched(rewrite: Microbatches, traced: Traced) -> Traced:
    """The program as a loop over so many microbatches; itself for one.

    Raises:
        TraceError: it is no positive number, divides nothing in the arguments that is a batch, or products need all examples at once.
    """
    n = rewrite.microbatches
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TraceError(f"microbatches are a whole number, 1 or more, got {n!r}. Use 2, for instance.")
    return traced if n == 1 else in_loop(traced, n, several=True)


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
    raise _inside_loops(traced, steps)


def _inside_loops(traced: Traced, steps: Steps) -> TraceError:
    return TraceError(
        f"stages are cut in one step, or a few one after the other, and this program has steps inside {_loops(traced, steps)}. Search one "
        f"of these by itself, write no more than {MOST_LOOPS} trips as a scan, or leave stages out."
    )


def _loops(traced: Traced, steps: Steps) -> str:
    return ", ".join(f"{op.primitive} at {op.origin}" for op in traced.graph.ops if op.index in steps)


def _in_each(traced: Traced, steps: Steps, n: int) -> Traced:
    """The program with a loop over ``n`` microbatches in each of its steps."""
    each = {index: [step and in_loop(step.traced, n, True, step.fixed) for step in bodies] for index, bodies in steps.items()}
    made = WithBodies(ops_by_path(traced.graph), each).remade(traced.jaxpr)
    inner = (note for bodies in each.values() for body in bodies if body is not None for note in body.graph.assumptions)
    notes = f"microbatches are those of each step in {_loops(traced, steps)}", *inner
    return rebuilt(traced, made, *Microbatches.of(n), notes=notes)


def _in_loop(traced: Traced, rules: Sequence[Rule | None], n: int, several: bool, fixed: Set[int]) -> Traced:
    """As `in_loop`, but for steps in loops and branches."""
    graph = traced.graph
    mapped = next((op for op in graph.walk() if op.mapped), None)
    loop = _most_inside(graph, rules, n, fixed) if traced.gathers is None else _of_pass(traced, rules, n)
    function, loops, at_once = in_microbatches(traced.jaxpr, graph, rules, loop), 1, 0.0
    if (error := _refusal(graph, rules, loop) if traced.gathers is None else None) is not None:
        found = in_several_loops(traced, loop) if several and mapped is None else None
        if found is None:
            raise error
        function, loops, at_once = found
    split = ", ".join(f"{_path(graph, value)} along dimension {dim}" for value, dim in loop.batch.items())
    note = f"{Microbatches(n).describe()}; split: {split}"
    if loops > 1:
        note += f"; in {loops} such loops, since later parts of the step read what comes of all examples in earlier ones"
    if at_once > LEAST_SHARE:
        note += f"; {at_once:.1%} of the {Work.of(graph).unit}s read all examples at once, as the scores of all pairs do"
    try:
        return rebuilt(traced, jax.make_jaxpr(function)(*types_of(traced.jaxpr.jaxpr.invars)), *Microbatches.of(n), notes=(note,))
    except TraceError:
        if error is None:
            raise
        raise error from None  # why one loop would not do says more than why several do not


def passes_of(traced: Traced, n: int) -> tuple[Pass, ...]:
    """The passes over microbatches of a step: programs whose batch `in_loop` finds again, each of which is one loop.

    One pass is the step itself. The last of several has the step's arguments first, whether it reads them or not, and its results. The
    trips of a scan whose body is a step, such as passes over minibatches, are written out.

    Raises:
        TraceError: nothing in the arguments is a batch that ``n`` divides, or products need all examples at once.
    """
    try:
        return _passes(traced, n)
    except TraceError:
        steps = steps_inside(traced, batch_rules(traced.graph))
        if not steps:
            raise
    if (program := one_after_the_other(traced, steps, MOST_LOOPS)) is None:
        raise _inside_loops(traced, steps)
    return passes_of(program, n)


def _passes(traced: Traced, n: int) -> tuple[Pass, ...]:
    """As `passes_of`, but for steps in loops."""
    rules = batch_rules(traced.graph)
    loop = _most_inside(traced.graph, rules, n)
    if (error := _refusal(traced.graph, rules, loop)) is None:
        return (Pass(traced, tuple(range(len(traced.graph.arguments))), {}, loop, False),)
    found = several_passes(traced, loop)
    if found is None or any(dim > 1 for each in found[0] for dim in each.batch.values()):
        raise error
    return tuple(_named(traced, each, number, number == len(found[0]) - 1) for number, each in enumerate(found[0]))


def _named(step: Traced, own: Pass, number: int, is_last: bool) -> Pass:
    """A pass with the names of what it reads and makes, without arguments that it does not read; the last one has all those of the step."""
    graph, whole = own.traced.graph, step.graph
    read = {value for op in graph.ops for value in op.operands} | set(graph.results)
    own_of_step = [is_last and isinstance(each, int) for each in own.operands]
    kept = [k for k, value in enumerate(graph.arguments) if own_of_step[k] or value in read]
    interpreter = AsItIs(ops_by_path(graph))

    def function(*arguments: Any) -> list[Any]:
        given = dict(zip(kept, arguments, strict=True))
        return interpreter.run(own.traced.jaxpr.jaxpr, own.traced.jaxpr.consts, [given.get(k) for k in range(len(graph.arguments))])

    types = types_of(own.traced.jaxpr.jaxpr.invars)
    operands = tuple(own.operands[k] for k in kept)
    batch = {place: own.batch[k] for place, k in enumerate(kept) if k in own.batch}
    first, second = (frozenset(place for place, dim in batch.items() if dim == wanted) for wanted in (0, 1))
    results = whole.result_paths if is_last else [_handed(number, k) for k in range(len(graph.results))]
    traced = of_jaxpr(
        whole.name if is_last else f"{whole.name}_pass{number}",
        jax.make_jaxpr(function)(*(types[k] for k in kept)),
        [whole.argument_paths[each] if isinstance(each, int) else _handed(*each) for each in operands],
        results,
        whole.aliases if is_last else (),
        whole.donated if is_last else (),
        examples=(first, second),
    )
    return replace(own, traced=replace(traced, gathers=own.gathers), operands=operands, batch=batch)


def _handed(number: int, k: int) -> str:
    """The name of what a pass hands on."""
    return f"pass{number}[{k}]"


def _of_pass(traced: Traced, rules: Sequence[Rule | None], n: int) -> Loop:
    """The plan of the loop of one pass, whose examples are known."""
    graph = traced.graph
    assert graph.examples is not None and traced.gathers is not None, "a pass"
    batch = {graph.arguments[k]: dim for dim, places in enumerate(graph.examples) for k in sorted(places)}
    return plan_loop(graph, rules, batch, n, traced.gathers)


def loop_of_batch(traced: Traced, rules: Sequence[Rule | None], n: int) -> Loop:
    """The plan of the batch that has most of the products in the loop.

    Raises:
        TraceError: nothing in the arguments is a batch that ``n`` divides, or products need all examples at once.
    """
    graph = traced.graph
    if traced.gathers is not None:
        return _of_pass(traced, rules, n)
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
        raise _no_batch(n, indivisible, possible)
    if not best[0][-1]:
        raise _nothing_inside(graph, best[1], indivisible)
    return best[1]


def _no_batch(n: int, indivisible: Sequence[str], possible: Sequence[int]) -> TraceError:
    """The error where nothing in the arguments is a batch that ``n`` divides."""
    why = f"of what could be one, {_listed(indivisible)} examples" if indivisible else "no argument holds examples"
    remedy = f"Use {format_alternatives(possible)}" if possible else NAMED
    return TraceError(f"the number of microbatches divides a batch among the arguments, got {n}: {why}. {remedy}.")


def _nothing_inside(graph: Graph, loop: Loop, indivisible: Sequence[str]) -> TraceError:
    """The refusal of a batch that no work is computed of, example by example; ``indivisible`` is what else could be one."""
    causes = [*(cause for cause, _ in loop.coupled), *loop.early]
    paths = _listed(_path(graph, value) for value in loop.batch)
    why = str(causes[0]) if causes else f"no {Work.of(graph).unit} is computed of single examples of {paths}"
    remedy = causes[0].remedy if causes else NAMED
    others = f"; of what else could be a batch, {_listed(indivisible)} examples, which {loop.n} does not divide" if indivisible else ""
    return _held_up(f"microbatches are computed one after the other, and {why}{others}. {remedy}")


def _refusal(graph: Graph, rules: Sequence[Rule | None], loop: Loop) -> TraceError | None:
    """Why products would be computed of all examples at once; None where they are not."""
    work = Work.of(graph)
    total = work.of_ops(graph.ops, rules, graph)
    if (held_up := loop.obstacle(total)) is None:
        return None
    return _held_up(
        f"microbatches are computed one after the other, and {held_up[0]}; {held_up[1] / total:.0%} of the {work.unit}s wait for it. "
        f"{held_up[0].remedy}"
    )


def _held_up(reason: str) -> HeldUpError:
    return HeldUpError(f"{reason}, {ELSE}", reason=reason)


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
