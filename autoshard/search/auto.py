"""The portfolio: every searcher that fits the problem's size, and every baseline; the judge picks.

Model. Each member minimises its own objective; what is returned has the least judged makespan of all that fit the memory limit, on ties
the member that comes first. So it is never worse than any that was asked. Its lower bound is the best that any member proves: bounds hold
for all assignments of the mesh.

Baselines are always asked. Automatic searchers, which all minimise the judge's objective, are asked until one's answer is *settled*: on a
cluster that waits for all collectives but permutes it is within `Budgets.settled_gap` of the lower bound, and its makespan of its
objective. No other's objective can be less by more than that, and its makespan only by permutes that it hides and by what compilers
combine or narrow.

*What hides.* The objective charges all communication, the makespan what no compute hides of it. So where no answer is settled and some
of the answers' communication hides, recursive programming is asked once more, with each kind of collective charged the share of its
seconds that all answers together expose: one more answer for the judge, whose bound is not one of the objective.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.budgets import BUDGETS
from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.judge.model import CostModel
from autoshard.memory_limit.lagrangian import nothing_fits
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.render import format_percent
from autoshard.search.baselines import DataParallel, FullySharded
from autoshard.search.dynamic_programming import DynamicProgramming
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
    TensorParallel(),
)




@dataclass(frozen=True, slots=True)
class Auto(Searcher):
    """The best of several searchers.

    Attributes:
        members: who is asked.
    """

    name: ClassVar[str] = "auto"
    automatic: ClassVar[bool] = True
    includes_baselines: ClassVar[bool] = True

    members: tuple[Searcher, ...] = MEMBERS

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The member's answer of least makespan; its notes say whose it is, and which members met their limits.

        Raises:
            InfeasibleError: no member's answer fits the memory limit; names the smallest peak found.
        """
        started = time.perf_counter()
        found: list[tuple[Solution, Searcher]] = []
        refused: list[InfeasibleError] = []
        too_large: list[SearchLimitError] = []
        share = 1 / (1 + len(self.members))  # of the progress: each member's, and that of what hides
        for number, member in enumerate(self.members):
            if member.automatic and any(_settled(problem, solution) for solution, _ in found):
                continue
            own = part(progress, number * share, share)
            own(member.name, 0.0)
            try:
                found.append((member.solve(problem, own, hints), member))
                hints = found[-1][0].hints
            except SearchLimitError as error:
                too_large.append(error)
            except InfeasibleError as error:
                if error.proven:
                    raise
                refused.append(error)
        if not any(_settled(problem, solution) for solution, _ in found):
            last = part(progress, len(self.members) * share, share)
            found += self._hiding(problem, [solution.judgement.cost for solution, _ in found], last, hints)
        if not found:
            if not refused:
                raise too_large[0]
            smallest = min(error.smallest_peak_bytes or float("inf") for error in refused)
            raise nothing_fits(problem, f"the smallest peak that {len(refused)} searchers found", smallest)
        (best, finder), *slower = sorted(found, key=lambda answer: answer[0].judgement.cost.makespan_seconds)
        near = BUDGETS.near_makespan * best.judgement.cost.makespan_seconds
        is_near = any(one.differs_by_mesh and solution.judgement.cost.makespan_seconds <= near for solution, one in found)
        bound = max(solution.lower_bound_seconds for solution, _ in found)
        others = tuple(
            replace(
                other,
                lower_bound_seconds=min(bound, other.judgement.cost.objective_seconds),
                notes=(f"found by {member.name}, one of {len(found)} answers that auto asked for", *other.notes),
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
                *_hides(best.judgement.cost, least.judgement.cost, owner),
                *best.notes,
                *map(str, too_large),
            ),
            stats={**best.stats, "members": len(found), "search_seconds": time.perf_counter() - started},
            finder=finder.name,
            others=others,
            hints=replace(hints, near_tensor_parallel=is_near),
        )

    def solve_cut_mesh(self, problem: Problem, hints: Hints) -> Solution | None:
        """Tensor parallelism's answer on a mesh where bounds say that no objective is worth a search, if elsewhere it came near the best.

        Of the baselines it is the one that differs from mesh to mesh, and more of its communication may hide than of the best answer's.
        """
        member = next((member for member in self.members if member.differs_by_mesh), None)
        if member is None or not hints.near_tensor_parallel:
            return None
        with suppress(InfeasibleError, SearchLimitError):
            solution = member.solve(problem, hints=hints)
            note = f"found by {member.name}, asked by auto on a mesh that bounds had cut"
            return replace(solution, notes=(note, *solution.notes), finder=member.name)
        return None

    def _hiding(
        self, problem: Problem, costs: Iterable[Cost], progress: Progress, hints: Hints
    ) -> Iterator[tuple[Solution, Searcher]]:
        """The answer of a member that takes shares, where collectives cost what is exposed of them, if something hides."""
        member = next((member for member in self.members if member.uses_exposed_shares), None)
        shares = exposed_shares(costs, problem.profile.compiler.asynchronous)
        if member is None or all(share > 1 - BUDGETS.settled_gap for share in shares.values()):
            return
        model = CostModel(problem.model.cluster, problem.mesh, shares)
        other = Problem(problem.profile, model, problem.pins, problem.memory_limit_bytes, like=problem)
        progress(f"{member.name}, what hides left out", 0.0)
        with suppress(InfeasibleError, SearchLimitError):
            solution = member.solve(other, progress, hints)
            judgement = problem.evaluate(solution.assignment)
            bound = min(problem.compute_bound(), judgement.cost.objective_seconds)
            charged = ", ".join(f"{kind} at {format_percent(share)}" for kind, share in sorted(shares.items()))
            note = f"searched with what hides behind compute left out: {charged} of its seconds"
            yield replace(solution, judgement=judgement, lower_bound_seconds=bound, notes=(*solution.notes, note)), member


def _of(found: int, refused: int) -> str:
    """Among how many answers one is the fastest."""
    if not refused:
        return f"the fastest of {found} answers that auto asked for" if found > 1 else "the only one that auto asked"
    fitting = f"the fastest of {found} answers" if found > 1 else "the only answer"
    return f"{fitting} within the memory limit, of {found + refused} searchers that auto asked"


def exposed_shares(costs: Iterable[Cost], kinds: Iterable[str]) -> dict[str, float]:
    """Per kind of collective, if some costs have any of it, the share of its seconds that nothing hides in all of them."""
    whole, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    for cost in costs:
        for sent in cost.collectives:
            whole[sent.kind] += sent.seconds * sent.count
            exposed[sent.kind] += sent.exposed_seconds * sent.count
    return {kind: min(exposed[kind] / whole[kind], 1.0) for kind in kinds if whole[kind] > 0}


def _hides(best: Cost, least: Cost, owner: Searcher) -> Iterator[str]:
    """Why the fastest has a gap where another's objective is less: bounds are of objectives, which hide nothing."""
    more = best.objective_seconds / least.objective_seconds - 1 if least.objective_seconds else 0.0
    if more > BUDGETS.settled_gap:
        yield (
            f"its objective is {format_percent(more)} above that of {owner.name}, which has the smaller gap; its makespan is "
            f"{format_percent(1 - best.makespan_seconds / least.makespan_seconds)} less: more of its communication hides behind compute"
        )


def _settled(problem: Problem, solution: Solution) -> bool:
    """Whether no other objective is much less, and makespans are objectives."""
    cost = solution.judgement.cost
    waits = set(problem.profile.compiler.asynchronous) <= {"collective_permute"}
    return waits and min(solution.lower_bound_seconds, cost.makespan_seconds) >= (1 - BUDGETS.settled_gap) * cost.objective_seconds
