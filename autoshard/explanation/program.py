"""A strategy's program with its judged assignment: what an explanation knows beyond the record, and what a search leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.explanation.layers import layer_of
from autoshard.ir import Op
from autoshard.judge.evaluate import Judgement, evaluate
from autoshard.judge.model import CostModel
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.strategy import Record

if TYPE_CHECKING:
    from autoshard.pipeline.cuts import Cuts  # loads JAX, without which a strategy's file is explained


@dataclass(eq=False)
class Judged:
    """A record with its program, judged once.

    Attributes:
        record: the strategy.
        facts: the program.
        model: the costs on the strategy's mesh.
    """

    record: Record
    facts: ProgramFacts
    model: CostModel

    @cached_property
    def judgement(self) -> Judgement:
        """The assignment's judgement; its cost is the record's."""
        return evaluate(self.facts, self.model, self.record.assignment)

    @cached_property
    def seconds(self) -> dict[Op, float]:
        """By op the seconds that a device computes it in a step; what takes none is left out."""
        facts, assignment = self.facts, self.record.assignment
        found = {}
        for op in facts.graph.walk():
            if op.bodies or facts.idle[op.index]:
                continue
            seconds = op.trips * self.model.op_cost(facts, op, assignment.choice(op.index)).seconds
            if seconds > 0:
                found[op] = seconds
        return found

    def layer(self, op: Op) -> str:
        """The layer of an op."""
        return layer_of(op.origin)


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What was computed for a strategy and serves other searches of its program; none of it is saved.

    Attributes:
        facts: of the program.
        problem: that of the strategy's mesh, with the tables that are made by now; None where nothing was searched.
        hints: of its search.
        cuts: of a pipeline, those of its number of microbatches.
    """

    facts: ProgramFacts
    problem: Problem | None = None
    hints: Hints = NO_HINTS
    cuts: Cuts | None = None
