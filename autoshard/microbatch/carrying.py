"""How the operations of a loop over microbatches carry statuses on, those of bodies included, and what they draw a slice at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from autoshard.analysis.values import operand_readers
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.scan import num_consts, scan_parts
from autoshard.microbatch.ending import ends_one_by_one
from autoshard.microbatch.provenance import Provenance
from autoshard.microbatch.sorted_rows import concerns, moved_rows, moved_search, through_trips
from autoshard.microbatch.status import (
    WHOLE,
    ZERO,
    Coupled,
    Move,
    Status,
    as_it_is,
    factor_of,
    joined,
    literal_status,
    moved,
    operand_statuses,
    partial,
    place_of,
    slice_along,
)
from autoshard.trace import subjaxprs
from autoshard.trace.structure import called_with, opened

Phase = Literal["before", "inside", "after"]

MOST_PASSES = 16  # until the statuses of a loop's carries no longer change; each pass changes one at least
_NUMBERS = (int, float, np.ndarray, np.generic)


class Carrier:
    """The statuses of a program's values as far as they are known, and how its ops carry them on.

    Attributes:
        graph, rules: the program.
        batch: per argument value that is split, its dimension.
        n: the number of microbatches.
        statuses: per value, those in bodies included; absent where it is whole.
        moves: per op index, of the ops inside the loop.
        phases: per op index of the top level.
        twice: the ops that run inside and, whole, before the loop.
    """

    def __init__(self, graph: Graph, rules: Sequence[Rule | None], batch: Mapping[int, int], n: int):
        self.graph, self.rules, self.batch, self.n = graph, rules, dict(batch), n
        zeros = (value for value, x in zip(graph.literals, graph.written, strict=True) if isinstance(x, _NUMBERS) and not np.any(x))
        self.statuses: dict[int, Status] = {**dict.fromkeys(zeros, ZERO), **{value: slice_along(dim) for value, dim in batch.items()}}
        self.moves: dict[int, Move] = {}
        self.phases: dict[int, Phase] = {}
        self.twice: set[int] = set()

    def status(self, value: int) -> Status:
        """The status of a value."""
        return self.statuses.get(value, WHOLE)

    @cached_property
    def known(self) -> Provenance:
        """What values were computed from."""
        return Provenance(self.graph)

    def keep(self, op: Op, move: Move) -> None:
        """Notes how an op runs."""
        self.moves[op.index] = move
        self.statuses.update(zip(op.results, move.makes, strict=True))

    def is_tally(self, value: int) -> bool:
        """Whether a value is a few whole numbers, such as how many tokens each expert has, which a microbatch may read its own of."""
        return self.graph.values[value].rank <= 1 and self.graph.values[value].dtype.startswith(("int", "uint"))

    # -- operations with bodies ----------------------------------------------------------------------------------------------

    def carried(self, op: Op, reads: tuple[Status, ...]) -> Move:
        """How an op runs that reads operands of these statuses.

        Raises:
            Coupled: it needs more than one microbatch at a time.
        """
        if not op.bodies:
            if self.n > 1 and concerns(op, reads):
                return moved_rows(op, self.rules[op.index], reads, self.n, self.graph.values, self.known)
            if reads == (partial("sum"),) and op.primitive == "convert_element_type" and self.is_tally(op.results[0]):
                if self.known.is_count(op.results[0]):  # whole numbers, though they may be added up as others
                    return Move(reads, reads)
            return moved(op, self.rules[op.index], reads, self.n)
        if all(status.is_whole for status in reads):
            return Move(reads, (WHOLE,) * len(op.results))
        if (search := moved_search(op, reads, self.n, self.known)) is not None:
            return search
        try:
            return Move(reads, self._of_bodies(op, reads))
        except Coupled:
            if self.n > 1 or not any(status.is_split for status in reads):
                raise
            return as_it_is(len(op.operands), len(op.results))

    def _of_bodies(self, op: Op, reads: tuple[Status, ...]) -> tuple[Status, ...]:
        match op.primitive:
            case "scan":
                return self._scanned(op, reads)
            case "while":
                return self._repeated(op, reads)
            case "cond":
                return self._chosen(op, reads)
            case "remat2" | "custom_linear_solve":
                return self._run(op, 0, [reads[k] for k in called_with(op.primitive, op.params, len(reads))])
        raise Coupled(op, "is opaque, and reads the examples")

    def _run(self, op: Op, number: int, entering: Sequence[Status]) -> tuple[Status, ...]:
        """The statuses of a body's outputs; all its ops run inside."""
        body = op.bodies[number]
        self.statuses.update(zip(body.inputs, entering, strict=True))
        for inner in body.ops:
            self.keep(inner, self._moved_in_body(inner))
        self.draw_inside(body.ops, body.outputs)
        written, _ = opened(subjaxprs(op.equation)[number])
        return tuple(literal_status(atom) or self.status(value) for atom, value in zip(written.outvars, body.outputs, strict=True))

    def _moved_in_body(self, op: Op) -> Move:
        try:
            return self.carried(op, operand_statuses(op, self.status))
        except Coupled:
            if self.n > 1:
                raise
            return as_it_is(len(op.operands), len(op.results))

    def _settled(self, op: Op, carry: Sequence[Status], trip) -> tuple[list[Status], tuple[Status, ...]]:
        """The statuses of a loop's carry, once they are those that it begins a trip with, and of the rest of what a trip makes."""
        carried = list(carry)
        for _ in range(MOST_PASSES):
            made = trip(carried)
            new = [joined(op, before, after) for before, after in zip(carried, made, strict=False)]
            if any(status.kind == "rows" for status in new):
                raise Coupled(op, "carries rows in the order of a sort from trip to trip")
            if new == carried:
                return carried, made[len(carried) :]
            carried = new
        raise Coupled(op, "carries values whose parts in microbatches change from trip to trip")

    def _scanned(self, op: Op, reads: tuple[Status, ...]) -> tuple[Status, ...]:
        consts, carry, scanned = scan_parts(op.params, reads)
        if any(status.is_split and status.dim == 0 for status in scanned):
            raise Coupled(op, "goes through the examples one after the other", "Loop over another dimension than that of the examples")
        slices = [through_trips(status, -1) for status in scanned]
        carried, stacked = self._settled(op, carry, lambda carried: self._run(op, 0, (*consts, *carried, *slices)))
        return (*carried, *(through_trips(status, 1) for status in stacked))

    def _repeated(self, op: Op, reads: tuple[Status, ...]) -> tuple[Status, ...]:
        n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        of_cond, of_body, carry = reads[:n_cond], reads[n_cond : n_cond + n_body], reads[n_cond + n_body :]
        carried, _ = self._settled(op, carry, lambda carried: self._run(op, 1, (*of_body, *carried)))
        (goes_on,) = self._run(op, 0, (*of_cond, *carried))
        if not goes_on.is_whole and not (goes_on == partial("or") and ends_one_by_one(op)):
            raise Coupled(op, "ends when all examples say so", "Loop a number of times that does not depend on them")
        return tuple(carried)

    def _chosen(self, op: Op, reads: tuple[Status, ...]) -> tuple[Status, ...]:
        if not reads[0].is_whole:
            raise Coupled(op, "chooses a branch by the examples")
        branches = [self._run(op, number, reads[1:]) for number in range(len(op.bodies))]
        made = branches[0]
        for other in branches[1:]:
            made = tuple(joined(op, one, two) for one, two in zip(made, other, strict=True))
        return made

    # -- values of no example ------------------------------------------------------------------------------------------------

    def draw_inside(self, ops: Sequence[Op], results: Collection[int]) -> None:
        """Has ops of the top level, or of a body, make slices that each microbatch reads of what they make: random bits, masks, zeros."""
        readers = operand_readers(ops)
        for op in reversed(ops):
            if op.bodies or op.mapped or len(op.results) != 1 or op.results[0] in results or getattr(op.equation, "effects", ()):
                continue
            (made,) = op.results
            is_of_none = all(each.is_whole for each in operand_statuses(op, self.status))
            if not is_of_none or self.phases.get(op.index, "before") != "before" or not self.graph.values[made].rank:
                continue
            own = readers.get(made, ())
            read = {self._sliced_at(reader, made) for reader in own}
            if len(read) == 1 and (sliced := read.pop()) is not None and (split := self._factor_at(op, sliced)) is not None:
                if op.index in self.phases:
                    self.phases[op.index] = "inside"
                self.keep(op, Move(operand_statuses(op, self.status), (sliced,), *split))
                for reader in own:  # which has taken a slice of the whole until now
                    reads = operand_statuses(reader, self.status)
                    self.keep(reader, self.carried(reader, reads) if reader.bodies else replace(self.moves[reader.index], reads=reads))

    def _sliced_at(self, op: Op, value: int) -> Status | None:
        """The slice of a value that an op inside reads; None where it reads it otherwise."""
        move, rule = self.moves.get(op.index), self.rules[op.index]
        if self.phases.get(op.index, "inside") != "inside" or op.index in self.twice:
            return None
        if op.bodies:
            return self._sliced_in_body(op, value)
        if move is None or rule is None or move.factor < 0:
            return None
        if move.made and any(made for made, read in zip(move.made, op.operands, strict=True) if read == value):
            return None
        places = {place_of(rule, rule.operands[place], move.factor) for place, read in enumerate(op.operands) if read == value}
        at = places.pop() if len(places) == 1 else None
        return None if at is None else slice_along(at[0], move.inner * at[1])

    def _sliced_in_body(self, op: Op, value: int) -> Status | None:
        """The slice of a value that all trips of an op's body read."""
        if op.primitive not in ("scan", "remat2"):
            return None
        n = num_consts(op.params) if op.primitive == "scan" else len(op.operands)
        if value in op.operands[n:]:
            return None
        body = op.bodies[0]
        inputs = {inner for inner, operand in zip(body.inputs, op.operands, strict=True) if operand == value}
        if not inputs.isdisjoint(body.outputs):
            return None
        read = {self._sliced_at(each, inner) for each in body.ops for inner in inputs.intersection(each.operands)}
        return read.pop() if len(read) == 1 else None

    def _factor_at(self, op: Op, sliced: Status) -> tuple[int, int] | None:
        """The factor by which an op makes slices of its result, and how many of its indices an example has; None where it cannot."""
        rule = self.rules[op.index]
        split = None if rule is None else factor_of(rule, rule.results[0][sliced.dim], sliced.inner, self.n)
        if rule is None or split is None or rule.factors[split[0]].kind != "pass_through" or rule.factors[split[0]].sends:
            return None
        return split
