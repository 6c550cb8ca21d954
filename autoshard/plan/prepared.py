"""A traced program with its cluster, meshes, pins and memory limit, and its search on any of these meshes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, ShardingError, TraceError
from autoshard.explanation.program import Searched
from autoshard.ir import Mesh
from autoshard.ir.rewrites import Microbatches, Offload, OneProgram, Recompute
from autoshard.judge.evaluate import recomputation
from autoshard.judge.model import CostModel
from autoshard.mesh_search.candidates import placed
from autoshard.mesh_search.equality import figures_of, note_of_equal, simplest_first
from autoshard.mesh_search.refinement import refined
from autoshard.mesh_search.search import Refused, search_meshes
from autoshard.pipeline.schedule import WEIGHTS_APART
from autoshard.plan.forms import PLAIN, Form
from autoshard.plan.meshes import MOST_AXES, check_covers, meshes_of, most_axes
from autoshard.plan.notes import contended, fetched_early, lowered_otherwise, whole, without_rules
from autoshard.plan.plan import Plan
from autoshard.plan.request import Request
from autoshard.plan.start import better, carried, unused
from autoshard.plan.user_pins import UserPins, user_pins, with_batch, written
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress
from autoshard.recompute import optimizer_state
from autoshard.render import format_bytes, format_percent
from autoshard.rewrite import rewritten
from autoshard.rules import rules_of
from autoshard.run.recorded import Call, abstract_call, record_of
from autoshard.run.sharded import Sharded, plain, several
from autoshard.run.tracing import TracedOnce
from autoshard.search import Manual, Searcher, Solution, batch_dims, solve
from autoshard.search.overlap import overlapped
from autoshard.trace import Annotation, Traced, annotations_of, held, trace, with_named_batch

# Of the memory that a compiler leaves a program, what is kept for predictions that are too low, where something fits without it. Of 18
# programs on v5e and v5p as large as this allows, or XLA:TPU, one needs more than 2 % above its predicted peak (libtpu 0.0.42).
RESERVE = 0.02

MOST_OVERLAPPED = 4
"""Answers of a portfolio whose communication is overlapped before the fastest is taken: of a GPT-3 175B on GPUs the second one wins."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A traced program with the cluster, meshes, pins and memory limit of its search.

    Attributes:
        traced, facts: the program.
        cluster: the devices.
        meshes: those to try.
        most_axes: how many axes a mesh may have that their search leads to; 0 where they are all there are.
        pins: the user's.
        limit: bytes that a device may hold.
        seconds: what tracing took, and the number of ops.
        call: the function and its arguments' types.
        known: a problem of the same program from an earlier search, whose tables serve; None: there is none.
        is_limited: whether the user gave the limit.
    """

    traced: Traced
    facts: ProgramFacts
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    most_axes: int
    pins: UserPins
    limit: float
    seconds: Mapping[str, float]
    call: Call | None = None
    known: Problem | None = None
    is_limited: bool = False

    def problem(self, mesh: Mesh, limit: float | None, others: Collection[Problem]) -> Problem:
        """The search problem on a mesh; of others of the same program one, of the same sizes if there is such, shares what it can."""
        others = [*others] if self.known is None else [self.known, *others]
        here = [other for other in others if other.model.cluster == self.cluster]
        same = (other for other in here if other.mesh == mesh)
        alike = (other for other in (*here, *others) if other.mesh.sizes == mesh.sizes)
        like = next(chain(same, alike, here, others), None)
        if like is not None and like.mesh == mesh and like.model.cluster == self.cluster:
            model = like.model
        else:
            model = CostModel(self.cluster, mesh)
        return Problem(self.facts, model, self.pins.on(mesh), limit, like)

    def finer(self, problem: Problem, solution: Solution | None, progress: Progress) -> tuple[Problem, Hints] | None:
        """The problem of more axes that promises more than the best solution, memory aside where that binds, and where it begins."""
        price = 0.0 if solution is None else solution.hints.price
        labels = None if solution is None or price else problem.labels(solution.assignment)

        def on(mesh: Mesh) -> list[Problem]:
            problems: list[Problem] = []
            for placing in placed(self.cluster, [mesh], renamed=False):
                problems.append(self.problem(placing, problem.memory_limit_bytes, problems or [problem]))
            return problems

        return refined(problem, labels, self.most_axes, BUDGETS.least_gain, on, progress, price)

    def overlapped(self, solutions: Sequence[Solution], problem: Problem, wanted: int = 1, known: float = math.inf) -> list[Solution]:
        """The fastest of some solutions once more of their communication is overlapped, as `simplest_first` has them.

        Overlap may gain a slower solution more than a faster one, so all are tried that would be among the fastest if nothing were exposed.

        Args:
            solutions: fastest first.
            problem: has the memory limit; a solution that holds more already may keep its peak.
            wanted: how many are returned, if there are as many.
            known: as for `simplest_first`.
        """
        found: list[Solution] = []
        error = self.cluster.device.pair_error
        limit = math.inf if problem.memory_limit_bytes is None else problem.memory_limit_bytes
        for each in solutions:
            cost = each.judgement.cost
            least = min((one.judgement.cost.makespan_seconds for one in found), default=math.inf)
            if len(found) < wanted or cost.makespan_seconds - cost.exposed_communication_seconds < least * (1 + error):
                model = self._model(each.assignment.mesh, problem)
                found.append(replace(each, judgement=overlapped(self.facts, model, each.judgement, limit)))
        first, *rest = simplest_first(found, error, figures_of, known)
        fastest = min((first, *rest), key=lambda each: each.judgement.cost.makespan_seconds)
        if fastest is not first:
            note = note_of_equal(f"a plan on mesh {fastest.assignment.mesh}", fastest.judgement.cost, error)
            first = replace(first, notes=(*first.notes, note))
        return [first, *rest][:wanted]

    def plan(self, mesh: Mesh, solution: Solution, searcher: Searcher, problem: Problem | None = None) -> Plan:
        """The plan of a solution on a mesh; it keeps a problem that is given, if it is of that mesh, for later questions."""
        problem = problem if problem is not None and problem.mesh == mesh else None
        solution = with_recomputation(self.facts, self._model(mesh, problem), solution)
        asked: dict[str, float] = {"pins": len(pinned)} if (pinned := self.pins.on(mesh)) else {}
        if self.is_limited:
            asked["memory_limit_bytes"] = self.limit
        solution = replace(solution, stats={**self.seconds, "meshes": len(self.meshes), **solution.stats, **asked})
        facts, assignment = self.facts, solution.assignment
        notes = [*without_rules(facts), *lowered_otherwise(facts.graph, mesh), *whole(facts, assignment), *contended(facts, assignment)]
        notes += [*fetched_early(self.traced, facts.compiler), *self.pins.remarks(mesh, assignment), *filter(None, [self.cluster.note])]
        record = record_of(self.traced, self.cluster, mesh, solution, searcher, notes, written(self.traced.graph, self.pins.specs, mesh))
        return Plan(record, self.traced, self.pins, self.call, Searched(self.facts, problem, solution.hints))

    def _model(self, mesh: Mesh, problem: Problem | None) -> CostModel:
        return problem.model if problem is not None and problem.mesh == mesh else CostModel(self.cluster, mesh)


def prepare(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    request: Request,
    form: Form = PLAIN,
    whole: Traced | None = None,
    rounds: int = 1,
    corrections: Corrections = NO_CORRECTIONS,
) -> Prepared:
    """A request's program in a form, checked, traced and with the meshes that are worth trying; other arguments are `traced_of`'s."""
    cluster, searcher, stages, earlier = cluster_of(request.cluster), request.searcher, request.stages_of_one_program, request.earlier
    limit = limit_of(cluster, request.memory_limit_bytes)
    most = most_axes(request.mesh, searcher)
    ticking = OneProgram(stages, form.microbatches, rounds, request.schedule == WEIGHTS_APART) if stages > 1 else None
    how = form, whole, ticking, request.asked.batch
    traced, facts, seconds = traced_of(fn, args, request.donate_argnums, request.axes, cluster, *how)
    facts = facts.corrected(corrections)
    if (given := request.given_mesh) is not None:
        check_covers(cluster, given, traced.stages)
    pins = pins_of(fn, args, request, traced)
    more = tuple(searcher.in_specs.items()) if isinstance(searcher, Manual) else ()
    meshes, is_free = meshes_of(cluster, pins, given, most, traced.stages, more)
    is_limited = request.memory_limit_bytes is not None
    finest = request.mesh if isinstance(request.mesh, int) else MOST_AXES
    finest = finest if is_free and searcher.automatic else 0
    call = None if plain(fn) is None else abstract_call(fn, args)
    tables = earlier._searched.problem if earlier is not None and facts is earlier._searched.facts else None
    prepared = Prepared(traced, facts, cluster, meshes, finest, pins, limit, seconds, call, tables, is_limited)
    return batch_found(prepared)


def batch_found(prepared: Prepared) -> Prepared:
    """The same with the batch found where axes for it are given, on the mesh whose axes are the smallest: most batches divide by these."""
    if not prepared.pins.asked.batch_axes:
        return prepared
    mesh = min(prepared.meshes, key=lambda mesh: max(mesh.sizes, default=1))
    found = prepared.problem(mesh, None, ())
    return prepared if mesh.size == 1 else replace(prepared, pins=with_batch(prepared.pins, batch_dims(found)))


def pins_of(fn: Callable[..., Any], args: tuple[Any, ...], request: Request, traced: Traced) -> UserPins:
    """The pins of a request's program; those of arguments that an earlier search kept stay."""
    own = None if request.earlier is None else request.earlier._pins
    if own is not None:
        return own.again(request.asked, traced.graph)
    return user_pins(request.asked, traced.graph, own_annotations(fn, args, traced), request.given_mesh is None)


def own_annotations(fn: Callable[..., Any], args: tuple[Any, ...], traced: Traced) -> list[tuple[Annotation, ...]]:
    """The shardings that each array of the arguments has."""
    return annotations_of(traced.split(held(plain(fn), args)))


def cluster_of(cluster: Cluster | str | Path | None) -> Cluster:
    return Cluster.local() if cluster is None else Cluster.of(cluster)


def limit_of(cluster: Cluster, memory_limit_bytes: float | None) -> float:
    if memory_limit_bytes is None:
        return cluster.memory_limit_bytes
    if isinstance(memory_limit_bytes, bool) or not isinstance(memory_limit_bytes, int | float) or not memory_limit_bytes > 0:
        raise ShardingError(f"memory_limit_bytes is a positive number of bytes a device, got {memory_limit_bytes!r}. Write 12e9 for 12 GB.")
    return memory_limit_bytes


def traced_of(
    fn,
    args,
    donate_argnums,
    axis_names,
    cluster: Cluster,
    form: Form = PLAIN,
    whole: Traced | None = None,
    ticking: OneProgram | None = None,
    batch: tuple[str | int, ...] = (),
) -> tuple[Traced, ProgramFacts, dict[str, float]]:
    """The traced function, its facts for the cluster's compiler, and what tracing took.

    Args:
        form: in which it is to be.
        whole: the function as it was traced in one microbatch without recomputation, if it was.
        ticking: how its scanned layers are divided into stages of one program; None: they are not.
        batch: the arguments that hold examples, where they are named.
    """
    started = time.perf_counter()
    if whole is None:
        whole = whole_of(fn, args, donate_argnums, axis_names, batch)
    again = rewritten(whole, (*whole.rewrites, *Recompute.of(form.again)))
    if ticking is not None:
        traced = rewritten(again, (*again.rewrites, ticking))
    else:
        traced = _in_parts(whole, again, form.microbatches)
    traced = rewritten(traced, (*traced.rewrites, *Offload.of(optimizer_state(traced) if form.hosted else ())))
    compiler = compiler_of(cluster)
    make = partial(program_facts, traced.graph, rules_of(traced.graph), compiler)
    facts = fn.facts(traced, compiler, make) if isinstance(fn, TracedOnce) and traced is whole else make()
    return traced, facts, {"trace_seconds": time.perf_counter() - started, "n_ops": len(traced.graph.walk())}


def _in_parts(whole: Traced, again: Traced, microbatches: int) -> Traced:
    """The program in microbatches.

    Args:
        whole, again: as it was traced, and with recomputation.

    Raises:
        TraceError: it does not run in microbatches, or not with recomputation.
    """
    if microbatches == 1:
        return again
    try:
        return rewritten(again, (*again.rewrites, Microbatches(microbatches)))
    except TraceError:
        if again is whole:
            raise
    rewritten(whole, (*whole.rewrites, Microbatches(microbatches)))  # refuses for a reason of its own, or
    raise TraceError(
        f"recomputation is of one forward and one backward pass, and {whole.graph.name!r} has several, of which later ones read what comes "
        f"of all examples in earlier ones: only without recomputation it runs in {microbatches} microbatches. Use remat=None, or "
        "microbatches=1."
    )


def whole_of(fn, args, donate_argnums, axis_names, batch: tuple[str | int, ...] = ()) -> Traced:
    """The function as it is traced in one microbatch without recomputation; arguments are `traced_of`'s."""
    once = fn if isinstance(fn, TracedOnce) else TracedOnce(fn)
    own = once.__wrapped__
    donated, axes = (*several(donate_argnums), *(own.donate_argnums if isinstance(own, Sharded) else ())), tuple(dict.fromkeys(axis_names))

    def make() -> Traced:
        return with_named_batch(trace(plain(fn), *args, donate_argnums=donated, axis_names=axes, own_donation=True), batch)

    return once.traced((donated, batch), make)  # constraints name their axes, whatever the mesh has


def with_recomputation(facts: ProgramFacts, model: CostModel, solution: Solution) -> Solution:
    """A solution with what the compiler computes again, where it holds about as much as the device has."""
    judgement = solution.judgement
    again = recomputation(facts, model, judgement)
    return solution if again is None else replace(solution, judgement=replace(judgement, cost=replace(judgement.cost, recomputation=again)))


def within(
    prepared: Prepared, searched: Callable[[float], tuple[Solution, Problem]], reserves: bool, mesh: Any
) -> tuple[Solution, Problem]:
    """The best solution within the memory limit; within the reserve of it too, if it has one and nothing fits otherwise."""
    try:
        return searched(prepared.limit * (1 - RESERVE) if reserves else prepared.limit)
    except NothingFasterError:
        raise
    except OutOfTime:
        if not reserves:
            raise
    except InfeasibleError as error:
        if not reserves or (error.smallest_peak_bytes or math.inf) > prepared.limit:
            raise error if error.proven or not prepared.most_axes or mesh == MOST_AXES else _with_axes(error) from None
    solution, problem = searched(prepared.limit)
    others = tuple(noted_if_barely(other, prepared.limit) for other in solution.others)
    return replace(noted_if_barely(solution, prepared.limit), others=others), problem


def within_less(limit: float, predicted: float, needed: float) -> float:
    """The limit of predicted peaks where a plan needs more than was predicted: it leaves as much room in proportion, and the reserve."""
    return limit * min(predicted / max(needed, limit), 1.0) * (1 - RESERVE)


def noted_if_barely(solution: Solution, limit: float) -> Solution:
    """The solution, with a note on the reserve if it takes some of it."""
    if solution.judgement.cost.peak_bytes <= limit * (1 - RESERVE):
        return solution
    return replace(solution, notes=(*solution.notes, barely(limit)))


def barely(limit: float) -> str:
    """The note of a strategy that takes some of the reserve."""
    return (
        f"the predicted peak is within {format_percent(RESERVE)} of the {format_bytes(limit)} that a program may have, and is predicted "
        "no better than that: ask the compiler with autoshard verify"
    )


def searched_on_meshes(
    prepared: Prepared,
    searcher: Searcher,
    progress: Progress,
    ends: tuple[type[BaseException], ...],
    n_finalists: int,
    start: Plan | None,
    limit: float,
    refused: Refused | None = None,
    warm: Hints | None = None,
    least: float = math.inf,
    made: dict[Mesh, Problem] | None = None,
) -> tuple[Solution, Problem]:
    """The best solution on any mesh within a memory limit, and its problem; ``refused`` takes the problems without one.

    Args:
        warm: hints of an earlier search of the program, which another question about it follows; meshes are then cut quickly.
        least: the objective of what is known, in seconds: what is no faster need not be found.
        made: takes the problems by their meshes, whose tables serve a search within another limit.
    """
    problems: list[Problem] = []
    made = {} if made is None else made
    failure: ShardingError | None = None
    for candidate in prepared.meshes:
        try:
            known = made.get(candidate)
            problems.append(prepared.problem(candidate, limit, problems) if known is None else known.within(limit))
            made[candidate] = problems[-1]
        except ShardingError as error:
            failure = error
    if failure is not None and not problems:
        raise failure
    carries = "" if start is None else carried(start, problems)
    spare = None if isinstance(carries, str) else carries
    try:
        finer = prepared.finer if prepared.most_axes > 1 else None
        hints = replace(warm or NO_HINTS, least=least)
        found = search_meshes(searcher, problems, solve, progress, ends, finer, n_finalists, refused, hints, warm is not None)
    except (InfeasibleError, *ends):
        if spare is None:
            raise
        return spare
    if start is None:
        return found
    return (unused(found[0], str(carries)), found[1]) if spare is None else better(start, found, spare, n_finalists)


def _with_axes(error: InfeasibleError) -> InfeasibleError:
    """The refusal on a free mesh, with what was not tried."""
    more = f"Or try mesh={MOST_AXES}: of the meshes of {MOST_AXES} axes one at most was searched, and others may hold less."
    return InfeasibleError(f"{error} {more}", error.smallest_peak_bytes, error.proven)
