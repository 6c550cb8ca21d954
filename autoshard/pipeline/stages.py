"""The stages of a pipeline: one ordinary program each, with what it reads, returns, sends and receives.

A stage's program reads the arguments that it needs, and of every microbatch what other stages send it, stacked. It loops over microbatches,
in which it computes its part of the forward and of the backward pass, and then does its part of what comes after: the updates of its
weights. So it is a program that can be searched like any step. The tasks of a schedule are parts of it once it is lowered
(`autoshard.pipeline.tasks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autoshard.analysis.values import makers_of
from autoshard.errors import PipelineError
from autoshard.ir import Op
from autoshard.ir.rewrites import Microbatches, Offload
from autoshard.ir.scan import num_consts
from autoshard.pipeline.around import Around, around_of
from autoshard.pipeline.cut import BY_PRODUCTS, EVERYWHERE, Cut, Weights, check_stages, cut_of
from autoshard.pipeline.layers import Divided, with_divided_layers
from autoshard.pipeline.micro import Micro, Sum, micro_of
from autoshard.pipeline.micro_ops import is_backward
from autoshard.pipeline.stage_program import LoopPart, Message, OuterPart, StageProgram
from autoshard.rewrite import rewritten
from autoshard.trace import Traced, of_jaxpr, types_of


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: from 0 for the first.
        traced: its program over all microbatches. Arguments: those at ``arguments``, then ``receives`` in order, where those of
            the loop have all microbatches along a new dimension 0. Results: those at ``results``, then ``sends``, alike.
        arguments, results: positions among the flat arguments and results of the step with its rows apart (`Staged.divided`).
        homes: which of ``arguments`` stay on this stage between steps; other stages may read them too, and are sent them each step.
        receives, sends: messages; those of the loop come last.
        forward: per result of the program's loop, carries and stacked values, whether the forward pass makes it.
        lines: the first and the last line of the user's program that it computes, in words.
    """

    number: int
    traced: Traced
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    homes: tuple[bool, ...]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    forward: tuple[bool, ...]
    lines: str


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A step cut into stages.

    Attributes:
        traced: the step as it was traced.
        divided: the step with its scans over layers in parts; arguments and results that stages have by rows are several of its own.
        micro: the same in microbatches.
        cut: plain numbers from which the same stages are made again.
        stages: the stages, first to last.
        loop_level: the level of the loop over microbatches among messages outside it.
        argument_homes, result_homes: per flat argument and result of the divided step the stage that has it between steps.
    """

    traced: Traced
    divided: Divided
    micro: Micro
    cut: Cut
    stages: tuple[Stage, ...]
    loop_level: int
    argument_homes: tuple[int, ...]
    result_homes: tuple[int, ...]

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches."""
        return self.micro.n


def stages_of(
    traced: Traced,
    n_stages: int,
    n_microbatches: int,
    cut: Cut | Weights = BY_PRODUCTS,
    rows: Collection[int] | None = None,
    micro_of: Callable[[Traced, int], Micro] = micro_of,
) -> Staged:
    """The stages of a step: parts of about equal work, cut where few bytes go from one to the next.

    Args:
        traced: the whole step, not in microbatches.
        n_stages: how many stages; with several chunks a stage, of chunks in all.
        n_microbatches: how many microbatches the batch is divided into.
        cut: the cut of an earlier call for the same step and numbers, or what it is found by.
        rows: the flat arguments of which each stage has the rows of its own layers; None: all stacked ones of which each stage has equally
            many. The first rows are on the first stage, and so on.
        micro_of: gives the program of one microbatch (`autoshard.pipeline.micro.micro_of`).

    Raises:
        TraceError: the batch has no such microbatches.
        PipelineError: the step has no such stages, or the cut is another step's.
    """
    check_stages(n_stages)
    divided = with_divided_layers(traced, n_stages, n_microbatches, rows)
    micro = micro_of(divided.traced, n_microbatches)
    if isinstance(cut, Cut) and (cut.n_stages != n_stages or len(cut.stages) != len(micro.body.ops)):
        raise PipelineError(
            f"A cut has a stage for each operation of a microbatch: got one of {cut.n_stages} stages for {len(cut.stages)} operations, "
            f"and the step has {len(micro.body.ops)} and is asked for {n_stages}. Cut the step again."
        )
    builder = _Builder(traced, divided, micro, cut_of(micro, n_stages, cut) if isinstance(cut, Weights) else cut)
    elsewhere = builder.elsewhere() if rows is None else set()
    if elsewhere:  # layers are not divided equally, or several stages read them
        left = [k for k in divided.argument_dims if k not in elsewhere]
        return stages_of(traced, n_stages, n_microbatches, cut if isinstance(cut, Weights) else BY_PRODUCTS, left, micro_of)
    return builder.staged()


def with_state_on_hosts(staged: Staged, leaves: Collection[int]) -> Staged:
    """The stages with some of the step's flat arguments in the memory of hosts: those that no other stage reads than the one that has them.

    Args:
        leaves: optimizer state (`autoshard.recompute.optimizer_state`).
    """
    parts = {part for leaf in leaves for part in staged.divided.arguments[leaf]}
    shared = {k for stage in staged.stages for k, is_home in zip(stage.arguments, stage.homes, strict=True) if not is_home}

    def hosted(stage: Stage) -> Stage:
        own = Offload.of(position for position, k in enumerate(stage.arguments) if k in parts - shared)
        return replace(stage, traced=rewritten(stage.traced, (*stage.traced.rewrites, *own)))

    return replace(staged, stages=tuple(map(hosted, staged.stages))) if leaves else staged


class _Builder:
    """What all stages of a step share while they are made."""

    def __init__(self, traced: Traced, divided: Divided, micro: Micro, cut: Cut):
        self.traced, self.divided, self.micro, self.cut = traced, divided, micro, cut
        self.ops, self.values = micro.body.ops, micro.graph.values
        self.stage_of = {value: stage for op, stage in zip(self.ops, cut.stages, strict=True) for value in op.results}
        self.backward = {op.index: backward for op, backward in zip(self.ops, is_backward(micro), strict=True)}
        self.maker = makers_of((*micro.graph.ops, *self.ops))
        self.of_sums = {op.index for each in micro.sums for op in (each.update, *each.inner)}
        self.sum_terms = {each.position: self._terms_by_stage(each) for each in micro.sums}
        self.loops = [self._loop(stage) for stage in range(cut.n_stages)]
        self.around = self._around()
        self.outside = {op.index: op for op in micro.graph.ops if op is not micro.loop}

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def _terms_by_stage(self, each: Sum) -> dict[int, list[int]]:
        """The terms of a sum by the stage that computes them."""
        at = {term: self.stage_of.get(term, EVERYWHERE) for term in each.terms}
        first = min((stage for stage in at.values() if stage != EVERYWHERE), default=0)
        found: dict[int, list[int]] = {}
        for term in each.terms:
            found.setdefault(first if at[term] == EVERYWHERE else at[term], []).append(term)
        return dict(sorted(found.items()))

    def _loop(self, stage: int) -> LoopPart:
        """What a stage computes in the loop."""
        own = {op.index for op, at in zip(self.ops, self.cut.stages, strict=True) if at == stage and op.index not in self.of_sums}
        sums = tuple(each for each in self.micro.sums if stage in self.sum_terms[each.position])
        whole = [each for each in sums if len(self.sum_terms[each.position]) == 1]
        own.update(op.index for each in whole for op in (each.update, *each.inner))
        stacked = tuple(v for v in self.micro.stacked if max(self.stage_of.get(v, 0), 0) == stage)
        wanted = {term for each in sums for term in self.sum_terms[each.position][stage]} | set(stacked)
        needed, copied = set(wanted), {op.index for op, at in zip(self.ops, self.cut.stages, strict=True) if at == EVERYWHERE}
        ops: list[Op] = []
        for op in reversed(self.ops):
            if op.index in own or (op.index in copied and any(value in needed for value in op.results)):
                ops.append(op)
                needed.update(op.operands)
        made = {value for op in ops for value in op.results}
        received = sorted(value for value in needed - made if self.stage_of.get(value, EVERYWHERE) not in (EVERYWHERE, stage))
        entering = {inner: outer for inner, outer in self.micro.entering.items() if inner in needed}
        reads_index = self.micro.index in needed
        return LoopPart(stage, tuple(reversed(ops)), entering, sums, stacked, tuple(received), reads_index)

    def _around(self) -> Around:
        reads: dict[int, set[int]] = {}
        for loop in self.loops:
            for outer in loop.entering.values():
                reads.setdefault(outer, set()).add(loop.stage)
        results = self.micro.loop.results
        totals = {results[position]: tuple(terms) for position, terms in self.sum_terms.items()}
        totals.update((results[position], (max(self.stage_of.get(value, 0), 0),)) for value, position in self.micro.stacked.items())
        return around_of(self.micro, reads, totals)

    # -- outside the loop ---------------------------------------------------------------------------------------------------

    def staged(self) -> Staged:
        """The stages."""
        outers, argument_homes, result_homes = self._homes
        messages, readers = self._messages(outers), Counter(k for outer in outers for k in outer.arguments)
        shared = {k for k, n in readers.items() if n > 1}
        stages = tuple(self._stage(outer, result_homes, argument_homes, messages, shared) for outer in outers)
        return Staged(self.traced, self.divided, self.micro, self.cut, stages, self.around.loop_level, argument_homes, result_homes)

    def elsewhere(self) -> set[int]:
        """The flat arguments of the step with rows that are not on the stages in order, or whose new rows are not."""
        _, argument_homes, result_homes = self._homes
        order = tuple(self._numbers)
        divided, aliases = self.divided, dict(self.traced.graph.aliases)
        found = {k for k in divided.argument_dims if tuple(argument_homes[part] for part in divided.arguments[k]) != order}
        return found | {aliases[k] for k in divided.result_dims if tuple(result_homes[part] for part in divided.results[k]) != order}

    @cached_property
    def _homes(self) -> tuple[list[OuterPart], tuple[int, ...], tuple[int, ...]]:
        """What each stage computes outside the loop, and the stages that have arguments and results between steps."""
        graph, around = self.micro.graph, self.around
        replaced = {result: argument for result, argument in graph.aliases}
        copied = {value for index, at in around.stages.items() if at == EVERYWHERE for value in self.outside[index].results}
        homes = []
        for position, value in enumerate(graph.results):
            is_anywhere = value in copied or (value not in self.maker and value not in graph.arguments)
            of = graph.arguments[replaced[position]] if is_anywhere and position in replaced else value
            homes.append(around.home(of))
        outers = [self._outer(stage, [v for v, home in zip(graph.results, homes, strict=True) if home == stage]) for stage in self._numbers]
        readers = {k for outer in outers for k in outer.arguments}
        of_argument = {argument: homes[result] for result, argument in graph.aliases}
        for k in set(range(len(graph.arguments))) - readers:
            at = of_argument.get(k, 0)  # where what replaces it is
            outers[at] = replace(outers[at], arguments=tuple(sorted((*outers[at].arguments, k))))
        return outers, tuple(self._argument_home(k, outers, homes) for k in range(len(graph.arguments))), tuple(homes)

    def _argument_home(self, k: int, outers: Sequence[OuterPart], result_homes: Sequence[int]) -> int:
        """The stage that has an argument between steps: of those that read it the one of what it belongs to, or that replaces it."""
        readers = [outer.stage for outer in outers if k in outer.arguments]
        replacing = [result_homes[result] for result, argument in self.micro.graph.aliases if argument == k]
        return next(stage for stage in (self.around.home(self.micro.graph.arguments[k]), *replacing, *readers) if stage in readers)

    @property
    def _numbers(self) -> range:
        return range(self.cut.n_stages)

    def _outer(self, stage: int, results: Iterable[int]) -> OuterPart:
        """What a stage computes outside the loop."""
        around, loop, graph = self.around, self.loops[stage], self.micro.graph
        first = num_consts(self.micro.loop.params)
        needed = {*results, *loop.entering.values(), *(self.micro.loop.operands[first + each.position] for each in loop.sums)}
        ops: list[Op] = []
        for op in reversed(graph.ops):
            at = None if op is self.micro.loop else around.stages[op.index]
            if at == stage or (at == EVERYWHERE and any(value in needed for value in op.results)):
                ops.append(op)
                needed.update(op.operands)
        made = {value for op in ops for value in op.results}
        of_loop = set(self.micro.loop.results)
        received = []
        for value in sorted(needed - made):
            is_made = value in of_loop or (value in self.maker and self.maker[value].index in around.stages)
            if is_made and around.home(value) != stage:
                received.append(value)
        arguments = tuple(k for k, value in enumerate(graph.arguments) if value in needed)
        return OuterPart(stage, tuple(reversed(ops)), arguments, tuple(received))

    def _messages(self, outers: Sequence[OuterPart]) -> dict[tuple[str, int, int], Message]:
        """All that stages send each other."""
        targets: dict[tuple[str, int, int], list[int]] = {}
        for outer, loop in zip(outers, self.loops, strict=True):
            for value in outer.received:
                targets.setdefault(("value", value, self.around.home(value)), []).append(outer.stage)
            for value in loop.received:
                targets.setdefault(("loop", value, self.stage_of[value]), []).append(loop.stage)
        for position, terms in self.sum_terms.items():
            owner, *others = terms
            for other in others:
                targets["part", self.micro.loop.results[position], other] = [owner]
        messages, seen = {key: self._message(*key, tuple(to)) for key, to in targets.items()}, Counter()
        for key, message in messages.items():
            seen[message.name] += 1
            if (n := seen[message.name]) > 1:
                messages[key] = replace(message, name=f"{message.name} {n}")
        return messages

    def _message(self, kind: str, value: int, source: int, targets: tuple[int, ...]) -> Message:
        level = 0 if kind == "loop" else 1 + (self.around.loop_level if kind == "part" else self.around.levels.get(value, 0))
        found, maker = self.values[value], self.maker.get(value)
        origin = "" if maker is None else f"{maker.primitive} at {maker.origin}"
        backward = kind == "loop" and maker is not None and self.backward[maker.index]
        what = {"part": "partial_sum", "value": "value", "loop": "gradient" if backward else "activation"}[kind]
        place = "" if maker is None else maker.origin.place
        name = f"{what}_from_stage{source} ({place})" if place else f"{what}_from_stage{source}"
        return Message(kind, value, source, targets, level, backward, found.shape, found.dtype, origin, name)

    def _stage(
        self,
        outer: OuterPart,
        result_homes: tuple[int, ...],
        argument_homes: tuple[int, ...],
        messages: Mapping[tuple[str, int, int], Message],
        shared: Collection[int],
    ) -> Stage:
        graph, stage, loop = self.micro.graph, outer.stage, self.loops[outer.stage]
        results = tuple(position for position, home in enumerate(result_homes) if home == stage)

        def sorted_of(found: Iterable[Message]) -> tuple[Message, ...]:
            return tuple(sorted(found, key=lambda message: (message.kind == "loop", message.key)))

        receives = sorted_of(message for message in messages.values() if stage in message.targets)
        sends = sorted_of(message for message in messages.values() if message.source == stage)
        function = StageProgram(self.micro, self.sum_terms, outer, loop).function(results, receives, sends)
        types = types_of([self.micro.traced.jaxpr.jaxpr.invars[k] for k in outer.arguments])
        types += [self._type(message) for message in receives]
        homes = tuple(argument_homes[k] == stage for k in outer.arguments)
        donated = {k for k in graph.donated if k not in shared}  # chunks on the same devices read the same array
        places = {position: k for k, position in enumerate(outer.arguments)}
        replaced = dict(graph.aliases)
        aliases = tuple((k, places[replaced[position]]) for k, position in enumerate(results) if replaced.get(position) in places)
        traced = of_jaxpr(
            f"{graph.name}_stage{stage}",
            jax.make_jaxpr(function)(*types),
            argument_paths=[*(graph.argument_paths[k] for k in outer.arguments), *(message.name for message in receives)],
            result_paths=[*(graph.result_paths[k] for k in results), *(f"sent.{message.name}" for message in sends)],
            aliases=aliases,
            donated=tuple(k for k, position in enumerate(outer.arguments) if position in donated and homes[k]),
            rewrites=Microbatches.of(self.micro.n),
            examples=self._examples(outer, receives),
        )
        return Stage(stage, traced, outer.arguments, results, homes, receives, sends, self._forward(loop, sends), _lines(loop.ops))

    def _examples(self, outer: OuterPart, receives: Sequence[Message]) -> tuple[frozenset[int], frozenset[int]] | None:
        """The arguments of a stage's program that may hold examples: of its own and of the step's, and all that it receives."""
        graph, n = self.micro.graph, len(outer.arguments)
        own = graph.examples_at([[outer.arguments.index(k)] if k in outer.arguments else [] for k in range(len(graph.arguments))])
        received = range(n, n + len(receives))
        return None if own is None else (own[0].union(received), own[1].union(received))

    def _type(self, message: Message) -> jax.ShapeDtypeStruct:
        aval = self._aval(message)
        shape = (self.micro.n, *aval.shape) if message.kind == "loop" else aval.shape
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    def _aval(self, message: Message) -> Any:
        maker = self.maker[message.value]
        return maker.equation.outvars[maker.results.index(message.value)].aval

    def _forward(self, loop: LoopPart, sends: Sequence[Message]) -> tuple[bool, ...]:
        """Per result of a stage's loop whether the forward pass makes it: carries, then stacked values, then messages."""

        def is_forward(value: int) -> bool:
            maker = self.maker.get(value)
            return maker is None or not self.backward.get(maker.index, False)

        carries = [all(map(is_forward, self.sum_terms[each.position][loop.stage])) for each in loop.sums]
        return (*carries, *map(is_forward, loop.stacked), *(not message.backward for message in sends if message.kind == "loop"))

def _lines(ops: Iterable[Op]) -> str:
    """The first and the last line of the user's program among the origins of ops with products, or of all where there are none."""
    places = [op.origin for op in ops if op.origin.file]
    if not places:
        return "unknown source"
    file = max(dict.fromkeys(place.file for place in places), key=[place.file for place in places].count)
    lines = [place.line for place in places if place.file == file]
    return f"{file}:{min(lines)} to {max(lines)}"
