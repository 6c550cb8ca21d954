"""From a function and a cluster to a strategy: trace, rules, meshes, searcher, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.errors import ShardingError
from autoshard.explanation.explain import GIVEN
from autoshard.explanation.program import Searched
from autoshard.ir import Mesh, check_divides, spec_to_layout
from autoshard.ir.naming import matching
from autoshard.judge.model import CostModel
from autoshard.mesh_search.candidates import placed
from autoshard.plan.confirm import Confirm
from autoshard.plan.forms import PLAIN, Form
from autoshard.plan.meshes import check_meshes, fixed_mesh, given_mesh, in_order, with_idle_axes
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.notes import contended, whole, without_rules
from autoshard.plan.offloading import check_offload
from autoshard.plan.prepared import cluster_of, own_annotations, traced_of, with_recomputation
from autoshard.plan.request import Request, given
from autoshard.plan.searching import answered
from autoshard.plan.user_pins import ARGUMENTS, Asked, Pins, constraints, user_pins, written
from autoshard.problem import Problem
from autoshard.progress import Progress, silent
from autoshard.recompute import Options
from autoshard.rewrite import Padding
from autoshard.run.recorded import abstract_call, record_of
from autoshard.search import Searcher, Solution
from autoshard.search.propagation import follow_layouts
from autoshard.strategy import Record
from autoshard.trace import Batch, Traced, outside_mesh
from autoshard.verify import propagated


def search(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    searcher: str | Searcher = "auto",
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
    pins: Pins | None = None,
    batch_axes: str | Sequence[str] | None = None,
    batch: Batch = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    progress: Progress | bool = silent,
    time_limit_seconds: float | None = None,
    interruptible: bool = False,
    confirm: str | Confirm | bool | None = None,
    microbatches: Microbatches = "fit",
    remat: str | None = "fit",
    offload: str | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    plan: str = "sharding",
    start: Strategy | None = None,
    kernels: str | None = None,
    slow_reduction: str | None = None,
    balance: float | None = 1.0,
    padding: bool | Padding = True,
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
            gets which dimension of a slice, or the links inside hosts. With stages it is that of each stage, or one of all devices, of
            which stages have fewer; with ``plan="full"`` one of a part of the devices says how many stages there are.
        pins: `PartitionSpec` by argument path or shell-style pattern (``"state.params*"``), kept as given, of several that match the last;
            or ``"arguments"`` for the shardings that the arguments have, as arrays on a mesh or by Flax's metadata; or a tuple of both,
            of which the specs come first. Axes that are named are those of the mesh.
        batch_axes: the mesh axes, one or several, that split the batch, and no others do: the dimension of the arguments without state that
            `data_parallel` would split, which ``strategy.notes`` name.
        batch: the arguments that hold examples, by path or pattern (``"x"``, ``"batch*"``) or position, or several. None: those that hold
            no state, by how results depend on them (`autoshard.analysis.examples`).
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
            each), else by the prediction corrected by compiled collectives and FLOPs. Schedules correct the predictions of kernels, with
            which the search is repeated, and ``cost`` has the compiler's step time and peak. ``"devices"`` runs them on the program's
            devices, on zeros; several processes do so together. What was found is in ``strategy.confirmation``; where nothing could be
            confirmed, ``strategy.notes`` say why. Where nothing fits as compiled, the search is repeated within less predicted memory, and
            where nothing is predicted to fit, but nearly, that is compiled (`autoshard.plan.rounds`). None: the prediction decides; but
            of a plan that takes more than 80 % of the memory limit, or less if compiled peaks of its kind of program are further above the
            predicted ones, a compiler that is installed for the cluster's accelerators is asked once whether it fits, and where not the
            search is repeated within less. False: nobody is asked.
        microbatches: in how many parts of its batch a step computes its gradients, one after the other; they are added up and combined
            over devices once (`autoshard.microbatch`). A number; ``"fit"``: one, or where memory binds as many as make the step fastest;
            ``"auto"``: the fastest of 1, 2, 4 and 8, each searched, and where memory binds of all; None: one. Results are those of the
            whole batch.
        remat: what the backward pass computes again rather than to read what the forward pass kept (`autoshard.recompute`). ``"fit"``
            or ``"auto"``: where memory binds, what makes the step fastest, alone or in microbatches (`autoshard.plan.exploring`); in loops
            also where it does not, if that is faster, with ``"fit"`` by a tenth at least;
            ``"full"``: all repeated layers; ``"replace"``: the least that fits, of the step without its own `jax.checkpoint`, if that is
            faster than with it; None: nothing but what these say. Results stay the same.
        offload: what is in the memory of hosts while it is not used (`autoshard.recompute.offload`, `autoshard.recompute.hosting`).
            ``"optimizer"``: optimizer state, leaves of 1 MiB or more that the step replaces and no product or loop reads, such as Adam's
            moments; ``"activations"``: what the forward pass keeps for the backward pass, a further choice of ``remat``; ``"auto"``: either
            or both where nothing fits otherwise, or where memory binds and the step is faster so. Transfers are charged on the link of
            each device to its host, as if nothing ran beside them. None: nothing.
        stages: of a pipeline: into how many equal parts the devices are divided, each of which computes a part of the step, microbatch by
            microbatch (`autoshard.pipeline`). Without a number of ``microbatches`` as many, twice and four times as many are tried.
            None: every device computes the whole step.
        schedule: the order of a pipeline's tasks. ``"auto"`` or None: the fastest that is found, in any number of chunks a stage;
            ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` and ``"zero_bubble"`` restrict it. Or ``"one_program"``: scanned layers in stages
            that are one program, in which all of them compute at the same time (`autoshard.rewrite.one_program`);
            ``"one_program_interleaved"``: in two rounds where that is faster; ``"one_program_zero_bubble"``: in one or two, with
            gradients of weights after those of inputs, on all stages at the same time.
        plan: ``"full"`` searches the step without stages, with ``"auto"`` for microbatches and recomputation that are ``"fit"``, then
            pipelines: numbers of stages and of microbatches, and schedules, of which those are searched stage by stage that are faster by
            the costs of the step's own layers; the fastest of all is the answer. ``stages`` is
            then left out. ``"sharding"``: no pipeline that ``stages`` does not ask for.
        start: an earlier strategy, of other devices or of these, for an automatic searcher: carried over to this mesh (`plan.start`) it is
            one of the candidates, so that the answer is predicted to be no slower, and the answer where the time is over before another.
        kernels: ``"auto"``: plain attention becomes the fused kernel that JAX has for these devices, where that is predicted to be faster
            (`autoshard.rewrite.attention`). None: it stays as it is written, and a note says what that would save.
        slow_reduction: the type in which sums of large arrays of floats, such as gradients, cross the outermost level of the cluster's
            network, between slices or pods: ``"bfloat16"``, or ``"int8"`` with a scale for each 256 numbers. They are rounded at random,
            so that errors have no mean (`autoshard.lower.narrow`); `verify` measures them. None: they stay as they are.
        balance: the rows of the fullest expert over the mean of all experts that experts without a capacity, `jax.lax.ragged_dot`, are
            planned for, at least 1 (`autoshard.rewrite.experts`). Fuller experts take longer in the step, and lose nothing.
            None: the program is not rewritten for them.
        padding: whether dimensions that do not divide may be padded where that is predicted to be faster
            (`autoshard.rewrite.padding`); results stay the same. An `autoshard.Padding` says of how many elements shards are multiples.

    Raises:
        PipelineError: the step cannot be cut into so many stages.
        TraceError: the batch cannot be computed in that many microbatches; or the function cannot be traced with these arguments.
        ClusterError: the cluster is unknown, or the mesh does not cover it.
        ShardingError: a pin is illegal, or two contradict each other; or nothing can be offloaded.
        InfeasibleError: nothing fits the memory limit; names the smallest peak found. Or the compiler that was to confirm refuses all.
        SearchLimitError: the searcher cannot hold the program, or the time was over before any strategy was met.

    >>> import jax.numpy as jnp
    >>> strategy = search(lambda w, x: jnp.tanh(x @ w), jnp.ones((64, 64)), jnp.ones((512, 64)), cluster="cpu:8", mesh={"data": 8})
    >>> strategy.in_specs
    (P(None, None), P('data', None))
    """
    return Strategy.of(answered(fn, args, Request.of(**given(locals()), asks=confirm is None), progress))


@outside_mesh(keep_auto=True)
def evaluate(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | None = None,
    in_specs: Any,
    donate_argnums: int | Sequence[int] = (),
    microbatches: int | None = None,
    remat: str | None = None,
    offload: str | None = None,
) -> Strategy:
    """The strategy, costed, of argument shardings that somebody else chose; intermediates are what Shardy propagates.

    Args:
        fn, args, cluster, donate_argnums: as for `search`.
        mesh: axis sizes by name, outermost first; None: that of the arguments, where ``in_specs`` are theirs.
        in_specs: a tuple with one entry an argument: a pytree of `PartitionSpec` like the argument, or one for all its leaves. Or one
            `PartitionSpec` for all arguments, a mapping of argument paths and patterns to specs, as pins are, or ``"arguments"`` for
            those that the arguments have; what these do not mention is replicated.
        microbatches: in how many parts of its batch the step computes its gradients, as for `search`; None: one.
        remat: ``"full"``: the backward pass computes all repeated layers again, as for `search`; None: what the step says itself.
        offload: ``"optimizer"``: optimizer state is in the memory of hosts, as for `search`; None: on devices.

    Raises:
        TraceError: the batch cannot be computed in that many microbatches.
        ShardingError: a spec does not fit its argument or the mesh.
    """
    _check_chosen(Request.of(mesh=mesh, microbatches=microbatches, remat=remat, offload=offload))
    cluster = cluster_of(cluster)
    of_arguments = isinstance(in_specs, str) and in_specs == ARGUMENTS
    wanted = None if mesh is None and of_arguments else given_mesh(mesh)
    if wanted is not None:
        cluster.check(wanted)
    axes = wanted.all_names if wanted else ()
    traced, facts, seconds = traced_of(fn, args, donate_argnums, axes, cluster)
    check_offload(offload, cluster, traced)
    again = Options(traced, facts, cluster.device).full if remat == "full" else None
    if (form := Form(microbatches or 1, again, offload is not None)) != PLAIN:
        traced, facts, _ = traced_of(fn, args, donate_argnums, axes, cluster, form, traced)
    graph = traced.graph
    pins = user_pins(Asked(arguments=of_arguments), graph, own_annotations(fn, args, traced) if of_arguments else [], False)
    check_meshes(pins, wanted)
    wanted = with_idle_axes(wanted, pins) if wanted else fixed_mesh(cluster, pins)
    specs = pins.specs if of_arguments else flat_specs(traced, args, in_specs)
    record = evaluated(traced, facts, cluster, wanted, specs, seconds, pins.notes)
    return Strategy(record, traced, pins, abstract_call(fn, args), Searched(facts))


def _check_chosen(request: Request) -> None:
    """Raises `ShardingError` where something is left to a search."""
    if isinstance(request.microbatches, str):
        raise ShardingError(f"a sharding is evaluated with a number of microbatches, got {request.microbatches!r}. Use 4, for instance.")
    for name, value, one in (("remat", request.remat, "full"), ("offload", request.offload, "optimizer")):
        if value not in (None, one):
            raise ShardingError(f"a sharding is evaluated with {name}={one!r} or None, got {value!r}: the others are for a search.")


def evaluated(
    traced: Traced,
    facts: ProgramFacts,
    cluster: Cluster,
    given: Mesh,
    specs: Sequence[PartitionSpec],
    stats: Mapping[str, float],
    notes: Sequence[str] = (),
) -> Record:
    """As `evaluate`, of a program that is traced, with a spec for each leaf of its arguments; statistics and notes are added to its own."""
    graph, layouts = traced.graph, {}
    of_constraints = ((place.what, spec) for place, spec, _ in constraints(graph))
    given = in_order(given, [*zip(graph.argument_paths, specs, strict=True), *of_constraints], graph)
    for value, path, spec in zip(graph.arguments, graph.argument_paths, specs, strict=True):
        layout = spec_to_layout(tuple(spec), given, graph.values[value].rank, path)
        check_divides(layout, graph.values[value].shape, given, path)
        layouts[value] = layout
    started = time.perf_counter()
    entering = [layouts[value] for value in graph.arguments]
    replaced = {result: entering[argument] for result, argument in graph.aliases}
    leaving = [replaced.get(result) for result in range(len(graph.results))]
    between, sides = propagated(traced.jaxpr, graph, entering, given, leaving)
    solutions = []
    for placing in placed(cluster, [given], renamed=False):
        problem = Problem(facts, CostModel(cluster, placing))
        spread = follow_layouts(problem, {**between, **layouts}, sides)
        solutions.append((problem.evaluate(spread), placing))
    judgement, placing = min(solutions, key=lambda found: found[0].cost.makespan_seconds)
    solution = Solution(judgement, 0.0, {**stats, "search_seconds": time.perf_counter() - started})
    solution = with_recomputation(facts, CostModel(cluster, placing), solution)
    notes = [*without_rules(facts), *whole(facts, solution.assignment), *contended(facts, solution.assignment), *notes]
    return record_of(traced, cluster, placing, solution, _Given(), notes, written(graph, specs, placing))


@dataclass(frozen=True, slots=True)
class _Given:
    """The 'searcher' of a sharding that was given."""

    name: str = GIVEN


def flat_specs(traced: Traced, args: tuple[Any, ...], in_specs: Any) -> list[PartitionSpec]:
    """One spec an argument leaf, from one for all, a tuple of spec pytrees or prefixes of them, or from specs by path."""
    if isinstance(in_specs, PartitionSpec | NamedSharding):
        in_specs = (in_specs,) * len(args)
    if isinstance(in_specs, Mapping):
        paths = traced.graph.argument_paths
        by_position = {position: spec for pattern, spec in in_specs.items() for position in matching(pattern, paths)}
        in_specs = traced.in_tree.unflatten([by_position.get(position) for position in range(len(paths))])
    if not isinstance(in_specs, tuple) or len(in_specs) != len(args):
        raise ShardingError(
            f"in_specs is one PartitionSpec for all arguments, or a tuple with one entry for each of the {len(args)}, got {in_specs!r}."
        )
    try:
        flat = traced.flatten_prefix(in_specs, is_leaf=lambda entry: entry is None or isinstance(entry, PartitionSpec | NamedSharding))
    except ValueError as error:
        raise ShardingError(f"in_specs must be structured as the arguments, or be a prefix of them: {error}") from None
    specs = [PartitionSpec() if spec is None else spec.spec if isinstance(spec, NamedSharding) else spec for spec in flat]
    for path, spec in zip(traced.graph.argument_paths, specs, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise ShardingError(f"in_specs holds PartitionSpecs, got {spec!r} for {path}.")
    return specs
