"""The portfolio: every searcher that fits the problem's size, and every baseline; the judge decides.

*Objective.* Each member minimises its own; the portfolio returns the answer of least judged makespan within the memory limit. *Ties.* The
member that comes first. So no member's answer is better. The lower bound is the greatest that any member proves, since bounds are over all
assignments of the mesh.

*Members.* The first one is run, then all others at the same time (`autoshard.concurrency`), with what it knows. All baselines are run, but
on other meshes of the same search for those that were far from the best answer on one that splits the batch as well.
Automatic searchers, which all minimise the judge's objective, are run unless the first one's answer is *settled*: the cluster waits for all
collectives but permutes, the objective is within `Budgets.settled_gap` of the lower bound, and so is the makespan of the objective. No
other objective can be less by more than that, and no other makespan by more than its hidden permutes and the collectives that compilers
combine or narrow. Where layers are equal and it found nothing within the memory limit, the others would try the same prices of bytes on the
same layers, and are not run unless nothing is found on any mesh.

*Last resort.* Where no member finds anything within the memory limit, integer programming searches, if the problem is small. A search of
several meshes runs it once for all of them (`integer_programming.LastResort`).

*Hidden communication.* The objective charges all communication, the makespan only its exposed part. So where no answer is settled and some
communication is hidden, recursive programming runs once more, with each kind of collective charged the share of its seconds that is exposed
in all answers together; where that gains nothing, that of the answer that hides most of the kind, since others may tell nothing of what can
be hidden. Its answers are more for the judge; their bounds are not of the objective.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from autoshard.budgets import BUDGETS
from autoshard.concurrency import thread_seconds, together
from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, OutOfTime, SearchLimitError
from autoshard.ir import Assignment
from autoshard.judge.evaluate import Judgement
from autoshard.judge.model import CostModel
from autoshard.memory_limit.lagrangian import nothing_fits
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.reductions import symmetry
from autoshard.render import format_percent
from autoshard.search.baselines import DataParallel, FullySharded, n_shards, split_batch
from autoshard.search.dynamic_programming import DynamicProgramming
from autoshard.search.integer_programming import IntegerProgramming, LastResort
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.searcher import Searcher, Solution
from autoshard.search.tensor_parallel import TensorParallel

MEMBERS: tuple[Searcher, ...] = (
    DynamicProgramming(second_opinion=False),
    RecursiveProgramming(),
    DataParallel(),
    FullySharded(stage=1),
    FullySharded(stage=2),
    FullySharded(stage=3),
    TensorParallel(state=False),
)

# Limits of work and not of time, so that equal problems get equal answers on any machine.
LAST_RESORT = IntegerProgramming(
    time_limit_seconds=None,
    gap=BUDGETS.least_gain,
    max_problem_entries=BUDGETS.last_resort_entries,
    max_nodes=BUDGETS.last_resort_nodes,
    max_rounds=BUDGETS.last_resort_rounds,
)


@dataclass(frozen=True, slots=True)
class Auto(Searcher):
    """The best of several searchers.

    Attributes:
        members: the searchers to run, in order.
        last_resort: integer programming, for where no member finds anything within the memory limit; None: there is none.
    """

    name: ClassVar[str] = "auto"
    automatic: ClassVar[bool] = True
    includes_baselines: ClassVar[bool] = True

    members: tuple[Searcher, ...] = MEMBERS
    last_resort: IntegerProgramming | None = LAST_RESORT  # pyright: ignore[reportIncompatibleVariableOverride] (a field for a class attribute)

    def limited(self, seconds: float) -> Auto:
        """The portfolio with the time limit given to the last resort too, which calls no progress callback while it solves a model."""
        return self if self.last_resort is None else replace(self, last_resort=self.last_resort.limited(seconds))

    def for_other_forms(self, hints: Hints) -> Auto:
        """The portfolio without the member that takes longest, tensor parallelism, where that was far from the best."""
        few = tuple(member for member in self.members if not member.differs_by_mesh)
        return self if hints.near_tensor_parallel else replace(self, members=few)

    def without_last_resort(self) -> Auto:
        """The members alone."""
        return replace(self, last_resort=None)

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The answer of least makespan; its notes name the member that found it, and the members that were beyond their limits.

        Raises:
            InfeasibleError: no member's answer fits the memory limit; names the smallest peak found.
        """
        started = time.perf_counter()
        found: list[tuple[Solution, Searcher]] = []
        refused: list[InfeasibleError] = []
        in_vain = False  # whether automatic members have found nothing within the limit
        too_large: list[SearchLimitError] = []
        share = 1 / (1 + len(self.members))  # of the progress, a member's; the last is for hidden communication
        n_parts = n_shards(problem)
        far = {number: cost for number, (n, cost) in hints.far.items() if n_parts <= n}  # no nearer on this mesh

        def tried(number: int, known: Hints) -> Callable[[bool], _Tried]:
            return partial(_tried, self.members[number], problem, known, part(progress, number * share, share))

        computed = thread_seconds()
        for numbers in (range(1), range(1, len(self.members))):  # the others at the same time, all with what the first one knows
            folded = in_vain and symmetry.apply(problem) is not None
            settled = any(_settled(problem, solution) for solution, _ in found)
            left = [k for k in numbers if k not in far and not (self.members[k].automatic and (folded or settled))]
            least = min((solution.judgement.cost.objective_seconds for solution, _ in found), default=hints.least)
            knowing = replace(hints, least=min(least, hints.least))
            tasks = [tried(number, hints if self.members[number].automatic else knowing) for number in left]
            if any(isinstance(self.members[number], DataParallel | FullySharded | TensorParallel) for number in left):
                split_batch(problem)  # once for all, and for other meshes
            for number, outcome in zip(left, together(tasks, seconds=thread_seconds() - computed), strict=True):
                member = self.members[number]
                if isinstance(outcome, Solution):
                    problem.tell(outcome.judgement)
                    found.append((outcome, member))
                    if member.automatic:
                        hints = replace(outcome.hints, least=hints.least)
                    in_vain = in_vain and not member.automatic
                elif isinstance(outcome, SearchLimitError):
                    too_large.append(outcome)
                elif isinstance(outcome, _Ended):
                    if outcome.best is not None:
                        problem.tell(outcome.best)
                    raise outcome.error
                else:
                    if outcome.proven:
                        raise outcome
                    refused.append(outcome)
                    in_vain = in_vain or (member.automatic and not any(one.automatic for _, one in found))
        if not found and refused and self.last_resort is not None:
            with suppress(InfeasibleError, SearchLimitError):
                if (again := self.solve_again(problem, progress, hints)) is not None:
                    return again
            last = LastResort(self.last_resort)
            last.refuse(problem, refused[0])
            found += [(solution, self.last_resort) for solution, _ in filter(None, [last.found(progress)])]
        if not in_vain and not any(_settled(problem, solution) for solution, _ in found):
            last = part(progress, len(self.members) * share, share)
            costs = [*(solution.judgement.cost for solution, _ in found), *far.values()]
            found += self._with_exposed_shares(problem, costs, last, hints)
        if not found:
            if not refused:
                raise too_large[0]
            smallest = min(error.smallest_peak_bytes or float("inf") for error in refused)
            raise nothing_fits(problem, f"the smallest peak that {len(refused)} searchers found", smallest)
        (best, finder), *slower = sorted(found, key=lambda answer: answer[0].judgement.cost.makespan_seconds)
        near = BUDGETS.near * best.judgement.cost.makespan_seconds
        is_near = any(one.differs_by_mesh and solution.judgement.cost.makespan_seconds <= near for solution, one in found)
        alike = {id(one): number for number, one in enumerate(self.members) if not (one.automatic or one.differs_by_mesh)}
        costs = [(alike[id(one)], solution.judgement.cost) for solution, one in found if id(one) in alike]
        slow = {number: (n_parts, cost) for number, cost in costs if cost.makespan_seconds > near}
        bound = max(solution.lower_bound_seconds for solution, _ in found)
        others = tuple(
            replace(
                other,
                lower_bound_seconds=min(bound, other.judgement.cost.objective_seconds),
                notes=(f"found by {member.name}, one of {len(found)} searchers' answers", *other.notes),
                finder=member.name,
            )
            for other, member in slower
        )
        least, owner = min(found, key=lambda answer: answer[0].judgement.cost.objective_seconds)
        return replace(
            best,
            lower_bound_seconds=min(bound, best.judgement.cost.objective_seconds),
            least_seconds=least.judgement.cost.objective_seconds,
            notes=(
                f"found by {finder.name}, {_of(len(found), len(refused))}",
                *_gap_reason(best.judgement.cost, least.judgement.cost, owner),
                *best.notes,
                *map(str, too_large),
            ),
            stats={**best.stats, "members": len(found), "search_seconds": time.perf_counter() - started},
            finder=finder.name,
            others=others,
            hints=replace(hints, near_tensor_parallel=is_near, far={**hints.far, **slow}),
        )

    def solve_again(self, problem: Problem, progress: Progress, hints: Hints) -> Solution | None:
        """The answer of the automatic members that did not run, since layers are equal and the first one found nothing.

        Raises:
            InfeasibleError: nothing fits the memory limit; names the smallest peak found.
        """
        rest = tuple(member for member in self.members if member.automatic)[1:]
        if not rest or symmetry.apply(problem) is None:
            return None
        return replace(self, members=rest, last_resort=None).solve(problem, progress, replace(hints, far={}))

    def solve_cut_mesh(self, problem: Problem, hints: Hints) -> Solution | None:
        """Tensor parallelism's answer, if its makespan was near the best on other meshes.

        Of the baselines only its answers differ from mesh to mesh, and more of its communication may be hidden than of the best answer's.
        """
        member = next((member for member in self.members if member.differs_by_mesh), None)
        if member is None or not hints.near_tensor_parallel:
            return None
        with suppress(InfeasibleError, SearchLimitError):
            solution = member.solve(problem, hints=hints)
            note = f"found by {member.name}, which auto ran on a mesh that bounds had cut"
            return replace(solution, notes=(note, *solution.notes), finder=member.name)
        return None

    def _with_exposed_shares(
        self, problem: Problem, costs: Sequence[Cost], progress: Progress, hints: Hints
    ) -> Iterator[tuple[Solution, Searcher]]:
        """The answers of a member with collectives charged their exposed shares, if some communication is hidden, and the member."""
        member = next((member for member in self.members if member.uses_exposed_shares), None)
        if member is None:
            return
        least, kinds = min((cost.makespan_seconds for cost in costs), default=float("inf")), problem.facts.compiler.asynchronous
        charged: dict[str, float] = {}
        for shares in (exposed_shares(costs, kinds), least_exposed_shares(costs, kinds)):
            if all(share >= charged.get(kind, 1.0) - BUDGETS.settled_gap for kind, share in shares.items()):
                continue
            model, charged = CostModel(problem.model.cluster, problem.mesh, shares), shares
            other = Problem(problem.facts, model, problem.pins, problem.memory_limit_bytes, like=problem)
            progress(f"{member.name}, hidden communication left out", 0.0)
            with suppress(InfeasibleError, SearchLimitError):
                solution = member.solve(other, progress, hints)
                judgement = problem.evaluate(solution.assignment)
                bound = min(problem.compute_bound(), judgement.cost.objective_seconds)
                words = ", ".join(f"{kind} {format_percent(share)}" for kind, share in sorted(shares.items()))
                note = f"searched once more with collectives charged the part of their time that does not hide behind compute: {words}"
                yield replace(solution, judgement=judgement, lower_bound_seconds=bound, notes=(*solution.notes, note)), member
                if judgement.cost.makespan_seconds < least * (1 - BUDGETS.rounding):
                    return


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a search whose time is over, with the fastest answer within the memory limit by then, if there was one."""

    error: OutOfTime
    best: Judgement | None


@dataclass(slots=True)
class _Watch:
    """An observer of a problem in another process: the clock is its own observer's, and the fastest answer within the limit is kept."""

    problem: Problem
    best: Judgement | None = None

    def check(self, *_: object) -> None:
        self.problem.check()

    def judged(self, judgement: Judgement) -> None:
        cost, limit = judgement.cost, self.problem.memory_limit_bytes
        fits = limit is None or cost.peak_bytes <= limit
        if fits and (self.best is None or cost.makespan_seconds < self.best.cost.makespan_seconds):
            self.best = judgement

    def noted(self, found: Callable[[], Assignment]) -> None: ...

    def hinted(self, hints: Hints) -> None: ...


_Tried = Solution | SearchLimitError | InfeasibleError | _Ended
"""What comes of a member."""


def _tried(member: Searcher, problem: Problem, hints: Hints, progress: Progress, is_here: bool) -> _Tried:
    """A member's answer, or why there is none."""
    watch = _Watch(problem)
    own, report = (problem, progress) if is_here else (problem.observed_by(watch), watch.check)
    report(member.name, 0.0)
    try:
        return member.solve(own, report, hints)
    except OutOfTime as error:
        return _Ended(error, watch.best)
    except (SearchLimitError, InfeasibleError) as error:
        return error


def _of(found: int, refused: int) -> str:
    """The number of answers among which one is the fastest, in words."""
    if not refused:
        return f"the fastest of {found} searchers' answers" if found > 1 else "the only searcher that auto ran"
    fitting = f"the fastest of {found} answers" if found > 1 else "the only answer"
    return f"{fitting} within the memory limit, of {found + refused} searchers that auto ran"


def exposed_shares(costs: Iterable[Cost], kinds: Iterable[str]) -> dict[str, float]:
    """Per kind of collective that occurs in some costs, the exposed share of its seconds in all of them together."""
    whole, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    for cost in costs:
        for sent in cost.collectives:
            whole[sent.kind] += sent.seconds * sent.count
            exposed[sent.kind] += sent.exposed_seconds * sent.count
    return {kind: min(exposed[kind] / whole[kind], 1.0) for kind in kinds if whole[kind] > 0}


def least_exposed_shares(costs: Iterable[Cost], kinds: Iterable[str]) -> dict[str, float]:
    """Per kind of collective the exposed share of its seconds in the cost in which most of these are hidden."""
    found: dict[str, tuple[float, float]] = {}
    for cost in costs:
        for kind, share in exposed_shares([cost], kinds).items():
            seconds = sum(sent.seconds * sent.count for sent in cost.collectives if sent.kind == kind)
            found[kind] = max(found.get(kind, (0.0, 1.0)), ((1 - share) * seconds, share), key=lambda each: each[0])
    return {kind: share for kind, (_, share) in found.items()}


def _gap_reason(best: Cost, least: Cost, owner: Searcher) -> Iterator[str]:
    """The reason why the fastest answer has a gap, where another one has a smaller objective: bounds are of objectives."""
    more = best.objective_seconds / least.objective_seconds - 1 if least.objective_seconds else 0.0
    if more > BUDGETS.settled_gap:
        longer = format_percent(least.makespan_seconds / best.makespan_seconds - 1)
        yield (
            f"the gap is in compute and all communication together, of which this answer has {format_percent(more)} more than one of "
            f"{owner.name}; the step of that one is {longer} longer, since less of its communication hides behind compute"
        )


def _settled(problem: Problem, solution: Solution) -> bool:
    """Whether no other objective is much less than the solution's, and makespans are nearly objectives."""
    cost = solution.judgement.cost
    waits = set(problem.facts.compiler.asynchronous) <= {"collective_permute"}
    return waits and min(solution.lower_bound_seconds, cost.makespan_seconds) >= (1 - BUDGETS.settled_gap) * cost.objective_seconds
