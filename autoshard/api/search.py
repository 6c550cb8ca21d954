"""From a function and a cluster to a strategy: trace, rules, meshes, searcher, judge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.api.agreement import agreed, finalists_of_process_0
from autoshard.api.collecting import rarely_collecting
from autoshard.api.confirm import Confirm, confirm_of, confirmed, noted
from autoshard.api.finalists import Board
from autoshard.api.full_plan import Searches, checked_plan, fullest
from autoshard.api.meshes import MOST_AXES, check_meshes, fixed_mesh, given_mesh, meshes_of, most_axes
from autoshard.api.microbatching import Microbatches, best, checked_number
from autoshard.api.notes import lowered_otherwise, whole, without_rules
from autoshard.api.pipelining import Pipeline, check_pipeline, pipelined
from autoshard.api.recomputing import best_remat, checked_remat, least_remat, or_refused
from autoshard.api.start import better, carried, checked
from autoshard.api.step import Sharded, plain, several
from autoshard.api.strategy import Strategy, record_of
from autoshard.api.user_pins import ARGUMENTS, Asked, Pins, UserPins, user_pins, with_batch
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.ir import Layout, Mesh, check_divides, spec_to_layout
from autoshard.ir.naming import matching
from autoshard.ir.remat import Remat
from autoshard.judge.evaluate import recomputation
from autoshard.judge.model import CostModel
from autoshard.lower import lowering_mesh
from autoshard.mesh_search.anytime import checked_seconds, endings, timed
from autoshard.mesh_search.candidates import placed
from autoshard.mesh_search.refinement import refined
from autoshard.mesh_search.search import search_meshes
from autoshard.microbatch import divisors, microbatched
from autoshard.pipeline import Stage
from autoshard.pipeline.plan_search import Plans, search_plans
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.recompute import Options, rematerialised
from autoshard.render import format_bytes, format_percent, progress_line
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming, Searcher, Solution, batch_dims, searcher_of, solve
from autoshard.search.overlap import overlapped
from autoshard.search.propagation import follow_layouts
from autoshard.trace import Annotation, Traced, annotations_of, held, outside_mesh, trace
from autoshard.verify import propagated

# Of the memory that a compiler leaves a program, what is kept for predictions that are too low, where something fits without it. Of 18
# programs on v5e and v5p as large as this allows, or XLA:TPU, one needs more than 2 % above its predicted peak (libtpu 0.0.42).
RESERVE = 0.02
SEARCHING = 0.5  # of the progress of a search that is confirmed


@agreed
def search(
    fn: Callable,
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    searcher: str | Searcher = "auto",
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
    pins: Pins | None = None,
    batch_axes: str | Sequence[str] | None = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    progress: Progress | bool = silent,
    time_limit_seconds: float | None = None,
    interruptible: bool = False,
    confirm: str | Confirm | None = None,
    microbatches: Microbatches = "fit",
    remat: str | None = "fit",
    stages: int | None = None,
    schedule: str = "1f1b",
    plan: str = "sharding",
    start: Strategy | None = None,
) -> Strategy:
    """The best strategy that the searcher finds for a function on a cluster; in several processes the one that process 0 finds.

    Args:
        fn: any JAX function, a train step or other; Flax NNX modules and optimizers may be among its arguments.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`, in any pytrees.
        cluster: the devices, as a `Cluster`, in its string form, such as ``"v5e:4x4"``, or the path of a ``.toml`` file, such as
            `calibrate` writes; None: those of this process.
        searcher: a name or a searcher value.
        mesh: axis sizes by name, outermost first; None searches the mesh shape too, with one or two axes and a third where that promises
            a gain, and a number with so many at most, 1 to 3. How the mesh is placed on the cluster's wires is always searched: which axis
            gets which dimension of a slice, or the links inside hosts.
        pins: `PartitionSpec` by argument path or shell-style pattern (``"state.params*"``), kept as given, of several that match the last;
            or ``"arguments"`` for the shardings that the arguments have, as arrays on a mesh or by Flax's metadata; or a tuple of both,
            of which the specs come first. Axes that are named are those of the mesh.
        batch_axes: the mesh axes, one or several, that split the batch, and no others do: the dimension of the arguments without state that
            `data_parallel` would split, which ``strategy.notes`` name.
        memory_limit_bytes: what a device may hold at its peak; by default what the compiler leaves a program, and 2 % less
            if anything fits that.
        donate_argnums: as in `jax.jit`; what ``fn`` donates itself, jitted or decorated, is donated too.
        progress: called with what is being done and the fraction that is done; True draws a line that says how long it still takes, where
            stderr is a terminal or a notebook's.
        time_limit_seconds: how long to search, tracing not included; then the best strategy met so far is returned, with its gap. Of a
            search that is confirmed half of it at most is for searching.
        interruptible: whether Ctrl-C returns the best strategy met so far, with its gap, rather than to raise KeyboardInterrupt. While
            finalists are confirmed it always does.
        confirm: ``"compiler"`` compiles the best distinct strategies, three unless a `Confirm` says otherwise, for the cluster, ahead of
            time and without devices, and takes the fastest of those that fit: by the TPU compiler's schedule where they are close (a minute
            each), else by the prediction corrected by compiled collectives and FLOPs. ``"devices"`` runs them on the program's devices,
            on zeros; several processes do so together. What was found is in ``strategy.confirmation``; where nothing could be confirmed,
            ``strategy.notes`` say why.
            None: the prediction decides.
        microbatches: in how many parts of its batch a step computes its gradients, one after the other; they are added up and combined
            over devices once (`autoshard.microbatch`). A number; ``"fit"``: the fewest with which it fits, where nothing does in one;
            ``"auto"``: the fastest of 1, 2, 4 and 8, each searched; None: one. Results are those of the whole batch.
        remat: what the backward pass computes again rather than to read what the forward pass kept (`autoshard.recompute`). ``"fit"``:
            what makes the step fit in the least predicted time, where nothing fits otherwise; ``"auto"``: the same wherever memory binds;
            ``"full"``: all repeated layers; None: nothing but what the step's own `jax.checkpoint` says. Results stay the same.
        stages: of a pipeline: into how many equal parts the devices are divided, each of which computes a part of the step, microbatch by
            microbatch (`autoshard.pipeline`). Without a number of ``microbatches`` as many, twice and four times as many are tried.
            None: every device computes the whole step.
        schedule: the order of a pipeline's tasks: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero_bubble"``.
        plan: ``"full"`` searches pipelines too: numbers of stages and of microbatches by the step time that the costs of the step's own
            layers promise, the best of them stage by stage; the fastest of these and of the step without stages is the answer. ``mesh`` and
            ``stages`` are then left out. ``"sharding"``: no pipeline that ``stages`` does not ask for.
        start: an earlier strategy, of other devices or of these, for an automatic searcher: carried over to this mesh (`api.start`) it is
            one of the candidates, so that the answer is predicted to be no slower, and the answer where the time is over before another.

    Raises:
        PipelineError: the step cannot be cut into so many stages.
        TraceError: the batch cannot be computed in that many microbatches; or the function cannot be traced with these arguments.
        ClusterError: the cluster is unknown, or the mesh does not cover it.
        ShardingError: a pin is illegal, or two contradict each other.
        InfeasibleError: nothing fits the memory limit; names the smallest peak found. Or the compiler that was to confirm refuses all.
        SearchLimitError: the searcher cannot hold the program, or the time was over before any strategy was met.

    >>> import jax.numpy as jnp
    >>> strategy = search(lambda w, x: jnp.tanh(x @ w), jnp.ones((64, 64)), jnp.ones((512, 64)), cluster="cpu:8", mesh={"data": 8})
    >>> strategy.in_specs
    (P(None, None), P('data', None))
    """
    chosen, how = searcher_of(searcher), confirm_of(confirm)
    microbatches, remat, start = checked_number(microbatches), checked_remat(remat), checked(start, chosen)
    limit_seconds = checked_seconds(time_limit_seconds)
    given = limit_seconds if how is None or limit_seconds is None else limit_seconds / 2
    if given is not None:
        chosen = chosen.limited(given)
    if checked_plan(plan, stages, mesh):
        asked_of = Asked.of(pins, batch_axes)
        check_pipeline(2, schedule, how, start, None, asked_of, "plan")
        whole = partial(search.__wrapped__, fn, *args, cluster=cluster, searcher=searcher, mesh=mesh, pins=pins, remat=remat,
                        microbatches=microbatches, memory_limit_bytes=memory_limit_bytes, donate_argnums=donate_argnums,
                        interruptible=interruptible)  # fmt: skip
        with shown(progress) as callback, rarely_collecting(), outside_mesh(keep_auto=True):
            return _full(whole, fn, args, cluster, chosen, mesh, asked_of, memory_limit_bytes, donate_argnums, microbatches, schedule,
                         endings(given, interruptible), given, callback)  # fmt: skip
    if stages is not None:
        asked_of = Asked.of(pins, batch_axes)
        check_pipeline(stages, schedule, how, start, remat, asked_of)
        with shown(progress) as callback, rarely_collecting(), outside_mesh(keep_auto=True):
            return _in_stages(fn, args, cluster, chosen, mesh, asked_of, memory_limit_bytes, donate_argnums, microbatches, stages, schedule,
                              endings(given, interruptible), given, callback)  # fmt: skip
    with shown(progress) as callback, rarely_collecting(), outside_mesh(keep_auto=True):
        ask = partial(prepare, fn, args, cluster, chosen, mesh, Asked.of(pins, batch_axes), memory_limit_bytes, donate_argnums)
        first = microbatches if isinstance(microbatches, int) else 1
        asked = ask(first)
        started = time.perf_counter()
        ends, own = endings(given, interruptible), part(callback, 0.0, 1.0 if how is None else SEARCHING)

        @cache
        def options() -> Sequence[Remat]:
            whole = asked if first == 1 else ask(1)
            return Options(whole.traced, whole.facts, whole.cluster.device).all

        def with_remat(n: int, again: Remat | None) -> tuple[Prepared, Solution, Problem]:
            is_first = n == first and again is None
            prepared = asked if is_first else ask(n, again if again is None else replace(again, mode=remat or ""))
            left = given if given is None or is_first else max(0.0, given - (time.perf_counter() - started))
            searched = partial(_searched, prepared, chosen, timed(own, left), ends, 1 if how is None else how.finalists, start)
            return prepared, *_within(prepared, searched, memory_limit_bytes is None, mesh)

        def attempt(n: int) -> tuple[Prepared, Solution, Problem]:
            return best_remat(partial(with_remat, n), remat, options)

        def fitting(n: int) -> tuple[Prepared, Solution, Problem]:
            return least_remat(partial(with_remat, n), options)

        found = partial(best, microbatches=microbatches, limit=asked.limit, numbers=lambda: divisors(asked.traced))
        try:
            prepared, solution, problem = found(attempt)
        except InfeasibleError as error:
            if remat != "fit":
                raise
            prepared, solution, problem = or_refused(error, lambda: found(fitting))
        solving, searching = solution.stats.get("search_seconds", 0.0), time.perf_counter() - started
        stats = {**solution.stats, "solve_seconds": solving, "search_seconds": searching}
        strategies = [prepared.strategy(problem.mesh, replace(solution, stats=stats), chosen)]
        if how is None:
            return strategies[0]
        for other in solution.others:
            strategies.append(prepared.strategy(other.assignment.mesh, replace(other, stats=stats), chosen))
        finders = [each.finder or chosen.name for each in (solution, *solution.others)]
        is_over = bool(solution.stats.get("ended_early")) and (given is None or searching < given)
        if how.by == "devices":
            strategies, finders, is_over = finalists_of_process_0(strategies, finders, is_over)
        if is_over:
            return noted(strategies[0], "not confirmed: the search was interrupted")
        board = Board(
            strategies,
            finders=finders,
            fn=fn,
            args=args,
            memory_limit_bytes=memory_limit_bytes,
            until=None if limit_seconds is None else started + limit_seconds,
            progress=part(callback, SEARCHING, 1 - SEARCHING),
            together=how.by == "devices",
        )
        return confirmed(board, how)


def _in_stages(
    fn: Callable,
    args: tuple,
    cluster: Cluster | str | Path | None,
    searcher: Searcher,
    mesh: Any,
    asked: Asked,
    memory_limit_bytes: float | None,
    donate_argnums: int | Sequence[int],
    microbatches: Microbatches,
    n_stages: int,
    schedule: str,
    ends: tuple[type[BaseException], ...],
    seconds: float | None,
    progress: Progress,
) -> Strategy:
    """The best strategy as a pipeline; arguments are `search`'s."""
    cluster = _cluster(cluster)
    limit = _limit(cluster, memory_limit_bytes) * (1 - RESERVE if memory_limit_bytes is None else 1)
    given = None if mesh is None or isinstance(mesh, int) else given_mesh(mesh)
    part_of, most = cluster.part(n_stages), most_axes(mesh, searcher)
    if given is not None:
        part_of.check(given)
    axes = (*asked.axes, *(given.names if given else ()))
    traced, _, spent = _traced(fn, args, donate_argnums, axes, cluster)
    asked.check(traced.graph.argument_paths)
    until = None if seconds is None else time.perf_counter() + seconds
    known: dict[tuple, Solution] = {}  # equal stages are searched once

    def searched(
        stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress
    ) -> tuple[Strategy, Problem]:
        program = stage.traced
        facts = program_facts(program.graph, rules_of(program.graph), compiler_of(cluster))
        pins = user_pins(asked.among(program.graph.argument_paths), program.graph, [], mesh is None)
        first = len(stage.arguments)
        stacked = tuple(first + k for k, message in enumerate(stage.receives) if message.kind == "loop")
        pins = replace(pins, stacked=stacked, fixed=fixed)
        meshes, _ = meshes_of(part_of, pins, mesh, most)
        counts = {"trace_seconds": 0.0, "n_ops": len(program.graph.walk())}
        prepared = Prepared(program, facts, part_of, meshes, 0, pins, limit, counts)
        key = program.graph.fingerprint, program.graph.donated, tuple(pins.given.items()), stacked, mesh, tuple(fixed.items()), limit
        if key in known:
            problem = prepared.problem(known[key].assignment.mesh, limit, ())
            solution = replace(known[key], judgement=problem.evaluate(known[key].assignment), stats={})
            return prepared.strategy(problem.mesh, solution, searcher), problem
        left = None if until is None else max(0.0, until - time.perf_counter())
        solution, problem = _searched(prepared, searcher, timed(progress, left), ends, 1, None, limit)
        known[key] = solution
        return prepared.strategy(problem.mesh, solution, searcher), problem

    number = microbatches if isinstance(microbatches, int) else None
    return pipelined(traced, cluster, Pipeline(n_stages, schedule, number, given, limit), searched, searcher, spent, progress)


def _full(
    whole: Callable[..., Strategy],
    fn: Callable,
    args: tuple,
    cluster: Cluster | str | Path | None,
    searcher: Searcher,
    mesh: Any,
    asked: Asked,
    memory_limit_bytes: float | None,
    donate_argnums: int | Sequence[int],
    microbatches: Microbatches,
    schedule: str,
    ends: tuple[type[BaseException], ...],
    seconds: float | None,
    progress: Progress,
) -> Strategy:
    """The best strategy with stages or without; arguments are `search`'s, ``whole`` searches without stages."""
    devices = _cluster(cluster)
    limit = _limit(devices, memory_limit_bytes) * (1 - RESERVE if memory_limit_bytes is None else 1)
    number = microbatches if isinstance(microbatches, int) else None

    def alone(left: float | None) -> Strategy:
        return whole(progress=part(progress, 0.0, 0.4), time_limit_seconds=left)

    def few_layers(
        program: Traced, devices: Cluster, limit: float, mesh: Mesh | None, like: Problem | None, hints: Hints
    ) -> tuple[Solution, Problem]:
        if like is not None:
            problem = Problem(like.facts, like.model, like.pins, limit, like)
            return solve(_QUICK, problem, silent, hints), problem
        pins = user_pins(asked.among(program.graph.argument_paths), program.graph, [], mesh is None)
        meshes = meshes_of(devices, pins, None, 2)[0] if mesh is None else (mesh,)
        facts = program_facts(program.graph, rules_of(program.graph), compiler_of(devices))
        prepared = Prepared(program, facts, devices, meshes, 0, pins, limit, {})
        return _searched(prepared, _QUICK, silent, (), 1, None, limit)

    def plans(until: float, best_seconds: float, progress: Progress) -> Plans | None:
        traced, _, _ = _traced(fn, args, donate_argnums, asked.axes, devices)
        return search_plans(
            traced,
            devices,
            limit,
            few_layers,
            schedule,
            until=until,
            best_seconds=best_seconds,
            n_microbatches=number,
            least_gain=BUDGETS.least_gain,
            progress=progress,
        )

    def staged(n_stages: int, n_microbatches: int | None, left: float | None) -> Strategy:
        return _in_stages(fn, args, devices, searcher, mesh, asked, memory_limit_bytes, donate_argnums, n_microbatches or microbatches,
                          n_stages, schedule, endings(left, False), left, part(progress, 0.7, 0.3))  # fmt: skip

    return fullest(Searches(alone, plans, staged), devices, seconds, progress, ends)


_QUICK = DynamicProgramming(price_steps=5, second_opinion=False)
"""For programs of few layers, whose answers are estimates."""


def _within(
    prepared: Prepared, searched: Callable[[float], tuple[Solution, Problem]], reserves: bool, mesh: Any
) -> tuple[Solution, Problem]:
    """The best solution within the memory limit; within the reserve of it too, if it has one and nothing fits otherwise."""
    try:
        return searched(prepared.limit * (1 - RESERVE) if reserves else prepared.limit)
    except InfeasibleError as error:
        if not reserves or (error.smallest_peak_bytes or math.inf) > prepared.limit:
            raise error if error.proven or not prepared.most_axes or mesh == MOST_AXES else _with_axes(error) from None
    solution, problem = searched(prepared.limit)
    others = tuple(replace(other, notes=(*other.notes, _barely(prepared.limit))) for other in solution.others)
    return replace(solution, notes=(*solution.notes, _barely(prepared.limit)), others=others), problem


def _searched(
    prepared: Prepared,
    searcher: Searcher,
    progress: Progress,
    ends: tuple[type[BaseException], ...],
    n_finalists: int,
    start: Strategy | None,
    limit: float,
) -> tuple[Solution, Problem]:
    """The best solution on any mesh within a memory limit, and its problem."""
    problems: list[Problem] = []
    failure: ShardingError | None = None
    for candidate in prepared.meshes:
        try:
            problems.append(prepared.problem(candidate, limit, problems))
        except ShardingError as error:
            failure = error
    if failure is not None and not problems:
        raise failure
    spare = None if start is None else carried(start, problems)
    try:
        found = search_meshes(searcher, problems, solve, progress, ends, prepared.finer if prepared.most_axes > 1 else None, n_finalists)
    except (InfeasibleError, *ends):
        if spare is None:
            raise
        return spare
    return found if spare is None else better(found, spare, n_finalists)


def _with_axes(error: InfeasibleError) -> InfeasibleError:
    """The refusal on a free mesh, with what was not tried."""
    more = f"Or try mesh={MOST_AXES}: of the meshes of {MOST_AXES} axes one at most was searched, and others may hold less."
    return InfeasibleError(f"{error} {more}", error.smallest_peak_bytes, error.proven)


def _barely(limit: float) -> str:
    return (
        f"the predicted peak is within {format_percent(RESERVE)} of the {format_bytes(limit)} that a program may have, and is predicted "
        "no better than that: ask the compiler with autoshard verify"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A traced program and all that a search of it asks for.

    Attributes:
        traced, facts: the program.
        cluster: the devices.
        meshes: those to try.
        most_axes: how many axes a mesh may have that their search leads to; 0 where they are all there are.
        pins: the user's.
        limit: bytes that a device may hold.
        seconds: what tracing took, and the number of ops.
    """

    traced: Traced
    facts: ProgramFacts
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    most_axes: int
    pins: UserPins
    limit: float
    seconds: Mapping[str, float]

    def problem(self, mesh: Mesh, limit: float | None, others: Collection[Problem]) -> Problem:
        """The search problem on a mesh; of others of the same program one, of the same sizes if there is such, shares what it can."""
        alike = (other for other in others if other.mesh.sizes == mesh.sizes)
        like = next(chain(alike, others), None)
        return Problem(self.facts, CostModel(self.cluster, mesh), self.pins.on(mesh), limit, like)

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

    def strategy(self, mesh: Mesh, solution: Solution, searcher: Searcher) -> Strategy:
        """The strategy of a solution on a mesh."""
        model = CostModel(self.cluster, mesh)
        solution = replace(solution, judgement=overlapped(self.facts, model, solution.judgement, self.limit))
        solution = _recomputing(self.facts, model, solution)
        pins = {"pins": len(pinned)} if (pinned := self.pins.on(mesh)) else {}
        solution = replace(solution, stats={**self.seconds, "meshes": len(self.meshes), **solution.stats, **pins})
        notes = [*without_rules(self.facts), *lowered_otherwise(self.facts.graph, mesh), *whole(self.facts, solution.assignment)]
        notes += self.pins.remarks(mesh, solution.assignment)
        return Strategy(record_of(self.traced, self.cluster, mesh, solution, searcher, notes), self.traced)


def prepare(fn, args, cluster, searcher, mesh, asked: Asked, memory_limit_bytes, donate_argnums, microbatches=1, remat=None) -> Prepared:
    """What `search` is given, checked, traced and with the meshes that are worth trying; arguments are `search`'s."""
    cluster = _cluster(cluster)
    limit = _limit(cluster, memory_limit_bytes)
    most = most_axes(mesh, searcher)
    given = None if mesh is None or isinstance(mesh, int) else given_mesh(mesh)
    if given is not None:
        cluster.check(given)
    axes = (*asked.axes, *(given.names if given else ()))
    traced, facts, seconds = _traced(fn, args, donate_argnums, axes, cluster, microbatches, remat)
    pins = user_pins(asked, traced.graph, _annotations(fn, args, traced), given is None)
    meshes, is_free = meshes_of(cluster, pins, given, most)
    finest = (mesh or MOST_AXES) if is_free and searcher.automatic else 0
    prepared = Prepared(traced, facts, cluster, meshes, finest, pins, limit, seconds)
    return prepared if not asked.batch_axes else _with_batch(prepared)


def _with_batch(prepared: Prepared) -> Prepared:
    """The same with the batch found, on the mesh whose axes are the smallest, since most batches divide by these."""
    mesh = min(prepared.meshes, key=lambda mesh: max(mesh.sizes))
    return replace(prepared, pins=with_batch(prepared.pins, batch_dims(prepared.problem(mesh, None, ()))))


def _annotations(fn: Callable, args: tuple, traced: Traced) -> list[tuple[Annotation, ...]]:
    """The shardings that each array of the arguments has."""
    return annotations_of(traced.split(held(plain(fn), args)))


@outside_mesh(keep_auto=True)
def evaluate(
    fn: Callable,
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | None = None,
    in_specs: Any,
    donate_argnums: int | Sequence[int] = (),
    microbatches: int | None = None,
) -> Strategy:
    """The strategy, costed, of argument shardings that somebody else chose; intermediates are what Shardy propagates.

    Args:
        fn, args, cluster, donate_argnums: as for `search`.
        mesh: axis sizes by name, outermost first; None: that of the arguments, where ``in_specs`` are theirs.
        in_specs: a tuple with one entry an argument: a pytree of `PartitionSpec` like the argument, or one for all its leaves. Or a mapping
            of argument paths and patterns to specs, as pins are, or ``"arguments"`` for those that the arguments have; what these do not
            mention is replicated.
        microbatches: in how many parts of its batch the step computes its gradients, as for `search`; None: one.

    Raises:
        TraceError: the batch cannot be computed in that many microbatches.
        ShardingError: a spec does not fit its argument or the mesh.
    """
    cluster = _cluster(cluster)
    of_arguments = isinstance(in_specs, str) and in_specs == ARGUMENTS
    given = None if mesh is None and of_arguments else given_mesh(mesh)
    if given is not None:
        cluster.check(given)
    if microbatches is not None and isinstance(checked_number(microbatches), str):
        raise ShardingError(f"a sharding is evaluated with a number of microbatches, got {microbatches!r}. Use 4, for instance.")
    traced, facts, seconds = _traced(fn, args, donate_argnums, given.names if given else (), cluster, microbatches or 1)
    graph = traced.graph
    pins = user_pins(Asked(arguments=of_arguments), graph, _annotations(fn, args, traced) if of_arguments else [], False)
    check_meshes(pins, given)
    given = given or fixed_mesh(cluster, pins)
    layouts = {}
    specs = pins.specs if of_arguments else _flat_specs(traced, args, in_specs)
    for value, path, spec in zip(graph.arguments, graph.argument_paths, specs, strict=True):
        layout = spec_to_layout(tuple(spec), given, graph.values[value].rank, path)
        check_divides(layout, graph.values[value].shape, given, path)
        layouts[value] = layout
    started = time.perf_counter()
    entering = [layouts[value] for value in graph.arguments]
    replaced = {result: entering[argument] for result, argument in graph.aliases}
    leaving = [replaced.get(result) for result in range(len(graph.results))]
    between, sides = propagated(traced.jaxpr, graph, entering, lowering_mesh(given, graph), leaving)
    solutions = []
    for placing in placed(cluster, [given], renamed=False):
        problem = Problem(facts, CostModel(cluster, placing))
        spread = follow_layouts(problem, {**between, **layouts}, sides)
        solutions.append((problem.evaluate(spread), placing))
    judgement, placing = min(solutions, key=lambda found: found[0].cost.makespan_seconds)
    solution = Solution(judgement, 0.0, {**seconds, "search_seconds": time.perf_counter() - started})
    solution = _recomputing(facts, CostModel(cluster, placing), solution)
    notes = [*without_rules(facts), *whole(facts, solution.assignment), *pins.notes]
    return Strategy(record_of(traced, cluster, placing, solution, _Given(), notes), traced)


def _recomputing(facts: ProgramFacts, model: CostModel, solution: Solution) -> Solution:
    """A solution with what the compiler computes again, where it holds about as much as the device has."""
    judgement = solution.judgement
    again = recomputation(facts, model, judgement)
    return solution if again is None else replace(solution, judgement=replace(judgement, cost=replace(judgement.cost, recomputation=again)))


@dataclass(frozen=True, slots=True)
class _Given:
    """The 'searcher' of a sharding that was given."""

    name: str = "given"


@contextmanager
def shown(progress: Progress | bool) -> Iterator[Progress]:
    """The callback that is given; the one that draws a line where it is True."""
    if callable(progress):
        yield progress
    elif progress:
        with progress_line() as callback:
            yield callback
    else:
        yield silent


def _cluster(cluster: Cluster | str | Path | None) -> Cluster:
    return Cluster.local() if cluster is None else Cluster.of(cluster)


def _limit(cluster: Cluster, memory_limit_bytes: float | None) -> float:
    if memory_limit_bytes is None:
        return cluster.memory_limit_bytes
    if isinstance(memory_limit_bytes, bool) or not isinstance(memory_limit_bytes, int | float) or not memory_limit_bytes > 0:
        raise ShardingError(f"memory_limit_bytes is a positive number of bytes a device, got {memory_limit_bytes!r}. Write 12e9 for 12 GB.")
    return memory_limit_bytes


def _traced(
    fn, args, donate_argnums, axis_names, cluster: Cluster, microbatches: int = 1, remat: Remat | None = None
) -> tuple[Traced, ProgramFacts, dict[str, float]]:
    """The traced function, its facts for the cluster's compiler, and what tracing took."""
    started = time.perf_counter()
    donated = (*several(donate_argnums), *(fn.donate_argnums if isinstance(fn, Sharded) else ()))
    traced = trace(plain(fn), *args, donate_argnums=donated, axis_names=tuple(dict.fromkeys(axis_names)), own_donation=True)
    traced = microbatched(rematerialised(traced, remat), microbatches)
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    return traced, facts, {"trace_seconds": time.perf_counter() - started, "n_ops": len(traced.graph.walk())}


def _flat_specs(traced: Traced, args: tuple, in_specs: Any) -> list[PartitionSpec]:
    """One spec an argument leaf, from a tuple of spec pytrees or prefixes of them, or from specs by path."""
    if isinstance(in_specs, Mapping):
        paths = traced.graph.argument_paths
        by_position = {position: spec for pattern, spec in in_specs.items() for position in matching(pattern, paths)}
        in_specs = traced.in_tree.unflatten([by_position.get(position) for position in range(len(paths))])
    if not isinstance(in_specs, tuple) or isinstance(in_specs, PartitionSpec) or len(in_specs) != len(args):
        raise ShardingError(f"in_specs is a tuple with one entry for each of the {len(args)} arguments, got {in_specs!r}.")
    try:
        flat = traced.flatten_prefix(in_specs, is_leaf=lambda entry: entry is None or isinstance(entry, PartitionSpec | NamedSharding))
    except ValueError as error:
        raise ShardingError(f"in_specs must be structured as the arguments, or be a prefix of them: {error}") from None
    specs = [PartitionSpec() if spec is None else spec.spec if isinstance(spec, NamedSharding) else spec for spec in flat]
    for path, spec in zip(traced.graph.argument_paths, specs, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise ShardingError(f"in_specs holds PartitionSpecs, got {spec!r} for {path}.")
    return specs
