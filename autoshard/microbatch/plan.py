"""The plan of a loop over microbatches: which operations run before it, in it and after it, and what it accumulates.

- *Before*: what depends on no example, once and whole.
- *Inside*: what an example's values flow through, on the slices of one microbatch.
- *After*: what reads sums over all examples, such as an optimizer, once.

Small values that a microbatch needs of all examples, such as the number of tokens that a loss divides by, are computed before the loop as
well. Values of no example of which each microbatch reads a slice, such as the random bits of a dropout mask, are drawn inside, a slice at a
time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autoshard.ir import Graph, Op, Rule
from autoshard.microbatch.carrying import Carrier, Phase
from autoshard.microbatch.mapped import shard_maps
from autoshard.microbatch.sorted_rows import concerns
from autoshard.microbatch.status import (
    WHOLE,
    Coupled,
    Move,
    Status,
    as_it_is,
    factor_of,
    operand_statuses,
    partial,
    place_of,
    slice_along,
)
from autoshard.microbatch.work import Work
from autoshard.primitives import is_addition, is_matrix

LEAST_SHARE = 1e-3  # of a program's matrix FLOPs: what fewer of them wait for is done after the loop
SMALL_BYTES = 2**20  # of a value that may be computed twice
SMALL_BATCHES = 4  # or so many times the batch's bytes


@dataclass(frozen=True, slots=True)
class Loop:
    """How a program runs in microbatches.

    Attributes:
        n: how many there are.
        batch: per argument value that is split, its dimension.
        phases: per op index of the top level.
        twice: the ops that run inside and, whole, before the loop.
        moves: per op index, of the ops inside.
        statuses: per value, those in bodies included; absent where it is whole.
        accumulated, stacked: the values that are combined over microbatches, and those that are put together, for what runs after.
        coupled: the operations that need all examples and are not small, each with the work that they hold up.
        early: the small ones, which are computed before the loop.
        awaited: the values, combined over all examples, that such operations read beside each example: given them, those run in a loop.
        is_cut: whether it runs only once it is cut there, since what comes later reads rows in the order of a sort.
    """

    n: int
    batch: Mapping[int, int]
    phases: Mapping[int, Phase]
    twice: frozenset[int]
    moves: Mapping[int, Move]
    statuses: Mapping[int, Status]
    accumulated: tuple[int, ...]
    stacked: tuple[int, ...]
    coupled: tuple[tuple[Coupled, float], ...]
    early: tuple[Coupled, ...]
    awaited: tuple[int, ...]
    is_cut: bool = False

    def status(self, value: int) -> Status:
        """The status of a value."""
        return self.statuses.get(value, WHOLE)

    def obstacle(self, total: float) -> tuple[Coupled, float] | None:
        """The operation that holds up most of a step's ``total`` work, and how much; None where that is too little to matter."""
        most = max(self.coupled, key=lambda each: each[1], default=None)
        return None if most is None or most[1] <= LEAST_SHARE * total else most


def plan_loop(
    graph: Graph, rules: Sequence[Rule | None], batch: Mapping[int, int], n: int, gathers: bool = False, work: Work | None = None
) -> Loop:
    """The loop over ``n`` microbatches of a program whose arguments are split as ``batch`` says; linear in its operations.

    Args:
        batch: per argument value the dimension that is split; ``n`` divides its size.
        gathers: what reads values of examples that are put together anyway, as features are for the scores of all pairs, waits for nothing:
            gradients of the scores are combined with the features at once.
        work: the measure of what waits; None: the program's own.
    """
    return _Planner(graph, rules, batch, n, gathers, work or Work.of(graph)).loop()


APART = "Make that an argument of the step, or compute it of each example (for batch normalisation: group or layer normalisation)"

_ORDERED = ("bool", "int", "uint", "float", "bfloat")  # dtypes of which the largest of equal numbers is each of them


class _Planner(Carrier):
    """The state of one plan; ``late`` has ops that run after the loop because of what they make, each with what couples the examples."""

    def __init__(
        self,
        graph: Graph,
        rules: Sequence[Rule | None],
        batch: Mapping[int, int],
        n: int,
        gathers: bool,
        work: Work,
        late: Mapping[int, Coupled] | None = None,
    ):
        super().__init__(graph, rules, batch, n)
        self.gathers, self.work, self.late = gathers, work, dict(late or {})
        self.makers: dict[int, Op] = {}
        self.light = {value: True for value in (*graph.arguments, *graph.constants)}
        self.small_bytes = max(SMALL_BYTES, SMALL_BATCHES * sum(graph.values[value].nbytes for value in batch))
        self.coupled: dict[int, Coupled] = {}
        self.early: list[Coupled] = []
        self.awaited: dict[int, None] = {}
        self.waiting: dict[int, Status] = {}  # per value that comes of awaited ones its status once these are given
        self.gathered: set[int] = set()  # values of examples that are put together for ops after the loop

    def loop(self) -> Loop:
        for ops in shard_maps(self.graph.ops):
            if len(ops) > 1:
                self._place_together(ops)
            else:
                self._place(*ops)
            for op in ops:
                self.makers.update(dict.fromkeys(op.results, op))
        self.draw_inside(self.graph.ops, self.graph.results)
        needed = {value for op in self.graph.ops if self.phases[op.index] == "after" for value in op.operands} | set(self.graph.results)
        made = [value for op in self.graph.ops if self.phases[op.index] == "inside" for value in op.results if value in needed]
        whole = {value for value in made if self.status(value).is_whole}
        for value in [value for value in whole if not self.makers[value].mapped and self.graph.values[value].dtype.startswith(_ORDERED)]:
            self.statuses[value] = partial("or" if self.graph.values[value].dtype == "bool" else "max")  # of equal ones
            whole.remove(value)
        if whole:
            return self._with_late(self._together_with(whole))
        sorted_rows = {value for value in made if self.status(value).kind == "rows"}
        found = self._found(made, bool(sorted_rows))
        if sorted_rows and (not found.awaited or found.obstacle(self.work.of_ops(self.graph.ops, self.rules, self.graph)) is None):
            return self._with_late(self._making(sorted_rows))
        return found

    def _found(self, made: Sequence[int], is_cut: bool) -> Loop:
        """The loop, of which some values are read afterwards."""
        return Loop(
            self.n,
            self.batch,
            self.phases,
            frozenset(self.twice),
            self.moves,
            self.statuses,
            tuple(value for value in made if self.status(value).kind == "partial"),
            tuple(value for value in made if self.status(value).kind == "slice"),
            tuple(self._held_up()),
            tuple(self.early),
            tuple(self.awaited),
            is_cut,
        )

    def _cause(self, own: Coupled) -> Coupled:
        """What couples the examples: an earlier op, if there is one, which is why this one needs all of them; else its own reason."""
        return next(iter(self.coupled.values()), own)

    def _with_late(self, late: Mapping[int, Coupled]) -> Loop:
        """The loop with more ops after it."""
        return _Planner(self.graph, self.rules, self.batch, self.n, self.gathers, self.work, {**self.late, **late}).loop()

    def _making(self, rows: Set[int]) -> dict[int, Coupled]:
        """The ops that make rows in the order of a sort which are read after the loop."""
        makers = {self.makers[value].index: self.makers[value] for value in rows}
        what = "makes rows in the order of a sort, which are read by all examples"
        return {index: Coupled(op, what, APART) for index, op in makers.items()}

    def _together_with(self, whole: Set[int]) -> dict[int, Coupled]:
        """The ops, those of a shard_map together, that make values of examples, and others that are the same in all microbatches and are
        read afterwards.
        """
        found: dict[int, Coupled] = {}
        for ops in shard_maps(self.graph.ops):
            makes = [op for op in ops if not whole.isdisjoint(op.results)]
            if makes:
                shared = "shares a shard_map with the examples, makes" if len(ops) > 1 else "makes, beside what is of examples,"
                own = Coupled(makes[0], f"{shared} what is of none of them, and is read afterwards")
                error = self._cause(own)
                found.update((op.index, error) for op in ops)
        return found

    # -- phases ------------------------------------------------------------------------------------------------------------

    def _place(self, op: Op) -> None:
        """Decides the phase of an op of the top level."""
        reads = operand_statuses(op, self.status)
        light = self._is_light(op)
        self.light.update(dict.fromkeys(op.results, light))
        if any(status.is_split for status in reads):
            self._computed_early(op, op.operands)
            if self.n == 1:
                self._made_inside(op.operands)
            reads = operand_statuses(op, self.status)
        makers = [self.makers.get(value) for value in op.operands]
        combined = [maker for maker in makers if maker is not None and self.phases[maker.index] == "after"]
        if combined:
            self.phases[op.index] = "after"
            if any(status.is_split for status in reads):
                what = f"{combined[0].primitive} at {combined[0].origin}"
                self.coupled[op.index] = Coupled(op, f"reads each example together with what comes of all of them, of {what}", APART)
                if self.gathers and self._slices(op) <= self.gathered:
                    return
            self._wait(op, reads, [value for maker in combined for value in maker.results if value in op.operands])
            return
        if all(status.is_whole for status in reads):
            beside = any(maker is not None and self.phases[maker.index] == "inside" for maker in makers)  # made with what is of examples
            self.phases[op.index] = "inside" if beside else "before"
            self.keep(op, self.carried(op, reads))
            return
        try:
            if op.index in self.late:
                raise self.late[op.index]
            self.phases[op.index], move = self._inside(op, reads)
            if move is not None:
                self.keep(op, move)
        except Coupled as error:
            self._place_coupled(op, reads, light, error)

    def _place_coupled(self, op: Op, reads: tuple[Status, ...], light: bool, error: Coupled) -> None:
        """Decides the phase of an op that needs all examples: before the loop where that is cheap, else after it."""
        self.phases[op.index] = "after"
        if not any(status.is_split for status in reads):
            return
        if light:
            self.early.append(error)
            self._whole_before(op.operands)
            self.phases[op.index] = "before"
            self.statuses.update(self._sliced_results(op, reads))
            return
        self.coupled[op.index] = error
        summed = [value for value, status in zip(op.operands, reads, strict=True) if status.kind == "partial"]
        if summed:
            self._wait(op, reads, summed)
        else:
            self.gathered |= self._slices(op) - set(self.graph.arguments)

    def _place_together(self, ops: Sequence[Op]) -> None:
        """Decides the phase of the ops of a shard_map, which run together."""
        made = {value for op in ops for value in op.results}
        if any(self.status(value).is_split for op in ops for value in op.operands):
            self._computed_early(ops[0], [value for op in ops for value in op.operands if value not in made])
        makers = [self.makers.get(value) for op in ops for value in op.operands if value not in made]
        combined = next((maker for maker in makers if maker is not None and self.phases[maker.index] == "after"), None)
        reading = [op for op in ops if any(self.status(value).is_split for value in op.operands)]
        sums = any(self.status(value).kind == "partial" for op in ops for value in op.operands)
        phase: Phase = "inside" if reading else "after" if sums or combined else "before"
        self.light.update(dict.fromkeys(made, False))
        self.phases.update((op.index, phase) for op in ops)
        if phase == "after":
            return
        try:
            if ops[0].index in self.late:
                raise self.late[ops[0].index]
            if combined is not None:
                what = f"{combined.primitive} at {combined.origin}"
                raise self._cause(Coupled(reading[0], f"reads each example together with what comes of all of them, of {what}", APART))
            for op in ops:
                self.keep(op, self.carried(op, operand_statuses(op, self.status)))
        except Coupled as error:
            self.phases.update((op.index, "after") for op in ops)
            self.coupled.update((op.index, error) for op in reading)
            for value in made:
                self.statuses.pop(value, None)

    def _slices(self, op: Op) -> set[int]:
        """The values of examples that an op reads."""
        return {value for value in op.operands if self.status(value).is_split}

    def _wait(self, op: Op, reads: Sequence[Status], combined: Sequence[int]) -> None:
        """Notes what an op of single examples, or of what such ops make that wait, reads of all examples."""
        given = [self.waiting.get(value, WHOLE if value in combined else status) for value, status in zip(op.operands, reads, strict=True)]
        if any(status.is_split for status in given):
            self.awaited.update(dict.fromkeys(value for value in combined if value not in self.waiting))
        elif not self.waiting.keys() & set(op.operands):
            return
        try:
            makes = self.carried(op, tuple(given)).makes
        except Coupled:
            makes = (partial("sum"),) * len(op.results)  # of all examples, again
        self.waiting.update(zip(op.results, makes, strict=True))

    def _inside(self, op: Op, reads: tuple[Status, ...]) -> tuple[Phase, Move | None]:
        """The move of an op in the loop; sums over the examples that it reads beside them are computed before, where they are small."""
        if not any(status.is_split for status in reads):
            move = self.carried(op, reads)
            summed = is_addition(op.primitive) or op.primitive == "convert_element_type"  # one accumulator in place of two
            if summed or all(self.is_tally(value) for value in op.results):
                return "inside", move
            return "after", None
        summed = [value for value, status in zip(op.operands, reads, strict=True) if status.kind == "partial"]
        sorts = self.n > 1 and concerns(op, reads)
        if summed and not (op.bodies or sorts) and all(self.light.get(value, False) for value in summed):
            reads = tuple(WHOLE if status.kind == "partial" else status for status in reads)
            move = self.carried(op, reads)
            self._whole_before(summed)
            return "inside", move
        return "inside", self.carried(op, reads)

    def _sliced_results(self, op: Op, reads: tuple[Status, ...]) -> dict[int, Status]:
        """The statuses, inside, of the results of an op that is computed whole before: slices where they have the examples' dimension."""
        rule = self.rules[op.index]
        if rule is None or any(status.kind == "rows" for status in reads):
            return {}
        sliced = [(dims[status.dim], status.inner) for dims, status in zip(rule.operands, reads, strict=True) if status.kind == "slice"]
        split = {factor_of(rule, factors, inner, self.n) for factors, inner in sliced}
        if len(split) != 1 or (one := split.pop()) is None:
            return {}
        places = [place_of(rule, dims, one[0]) for dims in rule.results]
        return {value: slice_along(at[0], one[1] * at[1]) for value, at in zip(op.results, places, strict=True) if at is not None}

    def _is_light(self, op: Op) -> bool:
        """Whether an op's results cost little to compute whole: of arguments alone, without products or bodies, and small."""
        if op.bodies or op.mapped or is_matrix(op.primitive) or getattr(op.equation, "effects", ()):
            return False
        values = self.graph.values
        return all(self.light.get(value, True) for value in op.operands) and sum(values[v].nbytes for v in op.results) <= self.small_bytes

    def _computed_early(self, op: Op, values: Collection[int]) -> None:
        """Has what an op of examples reads of all of them computed before the loop, where all of that is light."""
        makers = [(self.makers.get(value), value) for value in values]
        late = [value for maker, value in makers if maker is not None and self.phases[maker.index] == "after"]
        if late and all(self.light[value] for value in late):
            self.early.append(Coupled(op, "reads each example together with what comes of all of them", APART))
            self._whole_before(late)

    def _whole_before(self, values: Collection[int]) -> None:
        """Has the ops that make light values run before the loop: what makes values of examples there as well, all else only there."""
        waiting = list(values)
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is None or self.phases[maker.index] == "before" or maker.index in self.twice:
                continue
            if self.phases[maker.index] == "inside":
                self.twice.add(maker.index)
            else:
                self.phases[maker.index] = "before"
            waiting.extend(maker.operands)

    def _made_inside(self, values: Collection[int]) -> None:
        """Has values that are computed after the loop computed in it: its only microbatch has all that they are computed of."""
        waiting = list(values)
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is not None and self.phases[maker.index] == "after":
                self.phases[maker.index] = "inside"
                self.keep(maker, as_it_is(len(maker.operands), len(maker.results)))
                waiting.extend(maker.operands)

    # -- what holds products up ------------------------------------------------------------------------------------------------

    def _held_up(self) -> Iterator[tuple[Coupled, float]]:
        """The operations that need all examples and that other work depends on, each with that work; the first one gets it."""
        cause: dict[int, int] = {}  # per value the coupled op that it comes from
        flops: dict[int, float] = {}
        for op in self.graph.ops:
            if self.phases[op.index] != "after":
                continue
            own = op.index if op.index in self.coupled else None
            first = next((cause[value] for value in op.operands if value in cause), own)
            if first is None:
                continue
            cause.update(dict.fromkeys(op.results, first))
            flops[first] = flops.get(first, 0.0) + self.work.of_ops([op], self.rules, self.graph)
        return ((self.coupled[op], found) for op, found in flops.items())
