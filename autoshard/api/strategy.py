"""The strategy that users hold: the record of what was decided, and what it takes to run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.api.data import DataIterator, data_iterator
from autoshard.api.explain import StrategyReport, TensorReport, explain, explain_tensor
from autoshard.api.explain_pipeline import timeline_of
from autoshard.api.feeding import Matching
from autoshard.api.leaf_shardings import leaf_shardings, pipeline_meshes, strategy_mesh
from autoshard.api.pins import Pins
from autoshard.api.pipeline_step import PipelineStep
from autoshard.api.placing import apart, check_equal, put, sharded_leaves
from autoshard.api.recorded import WRITTEN_BACK, Call, lasting
from autoshard.api.step import Step, bucket_options, program_of
from autoshard.api.structure import alike, dtype_of, per_argument, position_of, rebuild
from autoshard.api.user_pins import Asked, UserPins, user_pins
from autoshard.api.user_pins import Pins as WantedPins
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.record import Cost
from autoshard.data import DataShard
from autoshard.errors import StrategyError
from autoshard.explanation import Judged, explanation_of
from autoshard.ir.naming import is_backward
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh
from autoshard.progress import Progress, silent
from autoshard.report import HtmlReport, report
from autoshard.rules import rules_of
from autoshard.strategy import (
    Confirmation,
    Record,
    TensorRecord,
    load_record,
    save_record,
)
from autoshard.trace import SplitModules, Traced, outside_mesh, with_axes
from autoshard.trace.leaves import argument_names
from autoshard.verify import Options
from autoshard.verify.pins import fewest_pins

if TYPE_CHECKING:
    from autoshard.api.comparing import WhatIf


class Strategy:
    """How one program is sharded over one cluster, what that costs, and how to run it.

    Attributes:
        record: everything that is saved.
    """

    def __init__(self, record: Record, traced: Traced | None = None, pins: UserPins | None = None, call: Call | None = None):
        self.record = record
        self._traced = traced
        self._pins = pins  # those of the search
        self._call = call  # what was searched, for another trace; None where arguments are modules, which it would keep alive

    def __repr__(self) -> str:
        record = self.record
        return f"Strategy({record.name!r}, mesh {record.mesh}, {record.cost.makespan_seconds:.3g} s a step, gap {self.gap:.1%})"

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()

    def __eq__(self, other: object) -> bool:
        """Whether the other would be saved as the same file."""
        return lasting(self.record) == lasting(other.record) if isinstance(other, Strategy) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.record.name, self.record.mesh, self.record.cost.objective_seconds, self.record.cost.peak_bytes))

    # -- the answer ------------------------------------------------------------------------------------------------

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis sizes by name, outermost first."""
        return dict(self.record.mesh.axes)

    @property
    def in_specs(self) -> tuple:
        """A `PartitionSpec` for each argument leaf, structured as the tuple of arguments.

        An NNX object's specs come as its `nnx.State`. In a strategy that was loaded, containers other than tuples, lists and dicts
        come as dicts by field name.
        """
        specs = [PartitionSpec(*tensor.spec) for tensor in self.record.arguments]
        return rebuild(self.record.argument_structure, specs) if self._traced is None else self._traced.in_tree.unflatten(specs)

    @property
    def out_specs(self) -> Any:
        """A `PartitionSpec` for each result leaf, structured as the result."""
        specs = [PartitionSpec(*tensor.spec) for tensor in self.record.results]
        if self._traced is None:
            structure = self.record.result_structure
            written = isinstance(structure, dict) and structure.get("node") == WRITTEN_BACK
            return rebuild(structure["children"][0] if written else structure, specs)
        return self._traced.out_tree.unflatten(specs[: self._traced.out_tree.num_leaves])

    @property
    def stages(self) -> tuple[Strategy, ...]:
        """The strategies of a pipeline's stages, each of the stage's own program on its part of the devices; () where there are none."""
        pipeline = self.record.pipeline
        return () if pipeline is None else tuple(Strategy(stage.record) for stage in pipeline.stages)

    @property
    def microbatches(self) -> int:
        """In how many parts of its batch a step computes its gradients, one after the other."""
        return self.record.program.microbatches

    @property
    def remat(self) -> str | None:
        """How it was decided what the backward pass computes again, ``"fit"``, ``"auto"`` or ``"full"``; None: nothing is."""
        return None if self.record.program.remat is None else self.record.program.remat.mode

    @property
    def offload(self) -> tuple[str, ...]:
        """The paths of the argument leaves that are in the memory of hosts between steps."""
        return tuple(self.record.arguments[leaf].path for leaf in self.record.program.offload)

    @property
    def cost(self) -> Cost:
        """What the judge predicts."""
        return self.record.cost

    @property
    def lower_bound_seconds(self) -> float:
        """Proven lower bound of the objective over all strategies on this mesh in this placement; 0.0 where nothing is proven."""
        return self.record.lower_bound_seconds

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``; 0.0 where optimality is proven."""
        return self.record.gap

    @property
    def stats(self) -> Mapping[str, Any]:
        """What the search took: ``search_seconds``, of which the searcher ``solve_seconds``; ``trace_seconds``, ``n_ops``, ..."""
        return self.record.stats

    @property
    def confirmation(self) -> Confirmation | None:
        """Which compiler or devices confirmed the strategy, what they say of it, and what became of the other finalists."""
        return self.record.confirmation

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, what stays replicated and why, and which pins disagree, in words; `explain` shows them too."""
        return self.record.assumptions

    def explain(self, tensor: str | None = None, details: bool = False) -> StrategyReport | TensorReport:
        """A report that prints in a terminal and shows in a notebook; ``explain().data`` is the same as numbers and names.

        Args:
            tensor: an argument's path, a pattern, or the end of a path that no other has, such as ``"layers/*/up"``: then the report is
                why it is sharded so, what each other layout would cost, alone and with everything else chosen anew, and what makes others
                unavailable. It takes up to 15 seconds of searching.
            details: whether to add pictures of the shards, the results, the proof of optimality, and what the searcher did.
        """
        if tensor is None:
            return explain(self.record, self._judged, details)
        if self._traced is None or self._judged is None:
            raise StrategyError(
                "other layouts of a tensor are searched in its program, which a strategy from a file lacks, and which a pipeline has in "
                "parts. Of a file, pass the function: strategy.with_program(fn, *args).explain(tensor)."
            )
        graph = self._traced.graph
        pins = self._pins or user_pins(Asked(), graph, [()] * len(graph.arguments), False)
        return explain_tensor(self._judged, tensor, pins.on(self.record.mesh))

    def what_if(
        self,
        *,
        pins: WantedPins | None = None,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
        batch: int | None = None,
    ) -> WhatIf:
        """The difference that other pins, devices, meshes or batches would make; ``.strategy`` is the other strategy.

        The program is searched again by dynamic programming, in about a second for a thousand operations, and traced again for another
        batch only.

        Args:
            pins: as for `search`, beside the strategy's own, which they override.
            cluster: other devices; its mesh is then searched, with up to two axes.
            mesh: axis sizes by name; None keeps the mesh where the devices are the same.
            batch: the size of the whole batch: of the dimension that `data_parallel` would split.

        Raises:
            StrategyError: the strategy has no program; says to pass it by `with_program`. Or it is a pipeline.
        """
        from autoshard.api.comparing import what_if

        return what_if(self, pins=pins, cluster=cluster, mesh=mesh, batch=batch)

    def report(self) -> HtmlReport:
        """The strategy as a page with timeline, memory, mesh, tables and graph, which a notebook shows.

        ``report().save_html(path)`` writes it as one file that opens offline, ``report().save_trace(path)`` the timeline for
        ui.perfetto.dev. Of a strategy from a file the page has what the record has; `with_program` gives it the rest.

        >>> import jax.numpy as jnp
        >>> import autoshard
        >>> strategy = autoshard.search(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="cpu:8")
        >>> strategy.report().html[:15]
        '<!DOCTYPE html>'
        """
        pipeline = self.record.pipeline
        schedule = None if pipeline is None else timeline_of(self.record, pipeline)
        return report(self.record, explanation_of(self.record, self._judged), self._judged, schedule)

    @cached_property
    def _judged(self) -> Judged | None:
        """The program with the assignment judged; None where the strategy came from a file, or runs as a pipeline."""
        if self._traced is None or self.record.pipeline is not None:
            return None
        cluster, graph = Cluster.from_dict(self.record.cluster), self._traced.graph
        facts = program_facts(graph, rules_of(graph), compiler_of(cluster))
        return Judged(self.record, facts, CostModel(cluster, self.record.mesh))

    def with_program(self, fn: Callable, *args: Any) -> Strategy:
        """The same strategy with its program, which one from a file lacks: `explain` then has compute by layer and memory by group.

        Args:
            fn, args: the program that the strategy is for; arrays may be `jax.ShapeDtypeStruct`.

        Raises:
            StrategyError: ``fn`` is not the program the strategy is for.
        """
        with outside_mesh(keep_auto=True):
            traced, _, _ = program_of(fn, args, self.record, before=self._traced)
        return Strategy(self.record, traced, call=(fn, args))

    @outside_mesh(keep_auto=True)
    def pins(self, fn: Callable, *args: Any, budget_seconds: float = 30.0, progress: Progress = silent) -> Pins:
        """The fewest argument specs and ``with_sharding_constraint`` lines that make JAX's own propagation arrive at this strategy.

        The answer prints as Python to paste, each line with the source line where it belongs, and says whether a program with only
        these lines was seen to have the strategy's collectives.

        Args:
            fn, args: the program that the strategy is for.
            budget_seconds: how long to look for lines that can go; what is left by then is verified all the same.
            progress: called with what is being done and the fraction that is done.

        Raises:
            StrategyError: ``fn`` is not the program the strategy is for.
        """
        if self.remat is not None:
            raise StrategyError("pins shard a program as it is, and this strategy computes values again. Search with remat=None.")
        if self.offload:
            raise StrategyError("pins shard a program as it is, and this strategy keeps state on hosts. Search with offload=None.")
        if self.microbatches > 1:
            is_pipeline = self.record.pipeline is not None or self.record.program.stages > 1
            how, option = ("a pipeline", "stages") if is_pipeline else (f"{self.microbatches} microbatches", "microbatches")
            raise StrategyError(f"pins shard a program as it is, and this strategy runs it as {how}. Search with {option}=None.")
        traced, rules, path = program_of(fn, args, self.record, before=self._traced)
        graph = traced.graph
        found = fewest_pins(traced.jaxpr, graph, rules, self.record.assignment, path, budget_seconds, progress)
        return Pins(
            record=self.record,
            found=found,
            differentiated=any(map(is_backward, graph.walk())),
            argument_names=argument_names(fn, len(args)),
            has_modules=traced.modules is not None,
        )

    def with_record(self, record: Record) -> Strategy:
        """The strategy of another record of the same program."""
        return Strategy(record, self._traced, self._pins, self._call)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy as canonical JSON, whole or not at all; equal strategies are equal files, so what took how long stays out."""
        save_record(lasting(self.record), path)

    # -- running it ------------------------------------------------------------------------------------------------

    @property
    def compiler_options(self) -> Options:
        """Options of the cluster's compiler with which it runs gradients' collectives beside compute; none where none are known.

        To be passed to `apply` and `verify`. They are off by default: a compiler may refuse a program with them that it takes without.
        """
        return compiler_of(Cluster.from_dict(self.record.cluster)).overlap_options

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh over ``jax.devices()``, each axis on the links that it was predicted to have; stages of a pipeline are its first axis.

        Raises:
            ClusterError: there are too few devices.
        """
        return strategy_mesh(self.record)

    def shardings(self, tree: Any, devices: Sequence[Any] | None = None) -> Any:
        """A `NamedSharding` for each array of an argument, structured as it is; NNX objects come as their `nnx.State`.

        Args:
            tree: an argument, concrete or abstract, or a tuple of the first few, as `init` makes them; or the argument's position.
            devices: as for `apply`.

        Raises:
            ClusterError: there are too few devices.
            StrategyError: no argument is structured so.
        """
        tree = self._argument(tree)
        return jax.tree.unflatten(jax.tree.structure(tree), self._matching(tree, devices))

    def abstract(self, tree: Any, devices: Sequence[Any] | None = None) -> Any:
        """A `jax.ShapeDtypeStruct` with its sharding for each array of an argument, as checkpoint libraries such as Orbax take them.

        Args:
            tree, devices: as for `shardings`.
        """
        tree = self._argument(tree)
        leaves, structure = jax.tree.flatten(tree)
        found = zip(leaves, self._matching(tree, devices), strict=True)
        return structure.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in found])

    def _argument(self, tree: Any) -> Any:
        """An argument, or the first few, as a pytree of shapes and types: those of the record where it is named by its position."""
        if not isinstance(tree, int) or isinstance(tree, bool):
            (tree,) = SplitModules((tree,)).states
            return jax.tree.map(jax.typeof, tree)
        n = len(self.record.argument_structure["tuple"])
        if not 0 <= tree < n:
            raise StrategyError(f"{self.record.program.name!r} has {n} arguments, got {tree}. Use 0 to {n - 1}, or pass the argument.")
        types = [jax.ShapeDtypeStruct(tensor.shape, dtype_of(tensor.dtype)) for tensor in self.record.arguments]
        whole = rebuild(self.record.argument_structure, types) if self._traced is None else self._traced.in_tree.unflatten(types)
        return whole[tree]

    def apply(
        self,
        fn: Callable,
        devices: Sequence[Any] | None = None,
        lowering: str = "manual",
        compiler_options: Options | None = None,
        bucket_bytes: int | None = None,
        save_graphs: str | os.PathLike[str] | None = None,
    ) -> Step:
        """``fn``, jitted as the strategy says, on ``jax.devices()`` or the given ones (those of an ahead-of-time topology too).

        Args:
            lowering: ``"manual"``: one `jax.shard_map` over the whole mesh, in which every collective is the planned one and nothing is
                left to the partitioner; derivatives of the step, if any are asked for, are lowered by constraints. ``"constraints"``:
                sharding constraints, from which XLA's partitioner makes the collectives.
            compiler_options: as for `jax.jit`, such as the strategy's own `compiler_options`.
            bucket_bytes: how many bytes of gradients are combined by one collective at most; 0: each by its own. None leaves it to the
                compiler: XLA:TPU combines up to 120 MiB, XLA:GPU up to 30. XLA:CPU has no such limit: a warning says so.
            save_graphs: a folder that gets a folder for each program: ``graph.graphml``, which tools for graphs open, ``plan.txt``,
                ``lowered.mlir``, and ``compiled.txt`` once the step is called.

        Raises:
            ClusterError: there are too few devices.
            StrategyError: the lowering is unknown, ``fn`` is no function, ``save_graphs`` no path, or the bytes are negative; at the first
                call, where ``fn`` is not the program the strategy is for.
        """
        if self.record.pipeline is not None:
            meshes = pipeline_meshes(self.record, devices)
            options = {**bucket_options(meshes[0].devices.flat[0].platform, bucket_bytes), **(compiler_options or {})}
            return PipelineStep(fn, self.record, meshes, lowering, self._traced, options, save_graphs)
        mesh = jax_mesh(self.record.mesh, devices)
        options = {**bucket_options(mesh.devices.flat[0].platform, bucket_bytes), **(compiler_options or {})}
        return Step(fn, self.record, mesh, lowering, self._traced, options, save_graphs)

    def lowerable(self, fn: Callable) -> Step:
        """``fn``, to be lowered for no devices in particular: it is never run."""
        return Step(fn, self.record, None) if self.record.pipeline is None else PipelineStep(fn, self.record, ())

    def shard(self, *args: Any, devices: Sequence[Any] | None = None) -> tuple:
        """The arguments, all or the first few, put where the strategy wants them; a tuple. NNX objects are moved in place.

        Raises:
            StrategyError: an argument is structured otherwise than the one that was searched.
        """
        split = SplitModules(args)
        per_argument = self._shardings(devices)
        if len(args) > len(per_argument):
            raise StrategyError(
                f"shard takes the {len(per_argument)} arguments of {self.record.program.name!r} or the first few, got {len(args)}."
            )
        placed, seen = [], set()
        for position, (argument, shardings) in enumerate(zip(split.states, per_argument, strict=False)):
            leaves, tree = jax.tree.flatten(argument)
            if self.record.argument_structure["tuple"][position] is None:  # static
                placed.append(argument)
                continue
            self._check_leaves(position, tree, leaves, shardings)
            paths, wanted = [tensor.path for tensor, _ in shardings], [sharding for _, sharding in shardings]
            there = put(leaves, wanted, paths, (True,) * len(leaves))
            placed.append(tree.unflatten(apart(leaves, there, seen) if self.record.donate_argnums else there))
        return split.update(tuple(placed))

    @outside_mesh(keep_auto=True)
    def init(self, init_fn: Callable, *args: Any, devices: Sequence[Any] | None = None) -> Any:
        """What ``init_fn(*args)`` makes, made already sharded: no device ever holds it whole.

        The result is one of the step's arguments (the state, say), or a tuple of its first ones; NNX objects are fine.

        Raises:
            StrategyError: the result is structured as no argument, or ``init_fn`` is no function.
        """
        if not callable(init_fn):
            raise StrategyError(
                f"init takes a function that makes the state, and its arguments; got {init_fn!r:.60}. Pass the function, or place a state "
                "that is there by shard."
            )
        made: list[SplitModules] = []

        def pure_init(*args: Any) -> Any:
            made[:] = [SplitModules((init_fn(*args),))]
            return made[0].states[0]

        check_equal(jax.tree.leaves(args), [f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(args)])
        shape = with_axes(lambda: jax.eval_shape(pure_init, *args), self.mesh_shape)
        leaves = with_axes(lambda: sharded_leaves(pure_init, args, self._matching(shape, devices)), self.mesh_shape)
        return made[0].rebuild((jax.tree.structure(shape).unflatten(leaves),))[0]

    def data_shard(self, argnums: int | Sequence[int], devices: Sequence[Any] | None = None) -> DataShard:
        """Which rows of every global batch this process reads, as ``num_shards`` and ``shard_id`` of data and as positions in the batch.

        Args:
            argnums: the position of the argument that is the batch, or of several.
            devices: as for `apply`.

        Raises:
            StrategyError: there is no such argument, or it has no rows.
        """
        return Matching(self.record, self._shardings(devices)).fed(argnums).shard

    def data(
        self,
        loader: Any,
        autotune: bool = False,
        *,
        argnums: int | Sequence[int] | None = None,
        at_end: str = "wrap",
        prefetch: int = 2,
        devices: Sequence[Any] | None = None,
    ) -> DataIterator:
        """An iterator over global batches, placed as the step takes them, of what a loader reads in each process.

        A loader yields the batches of this process, which are the rows of its `data_shard`, or the whole batch in every process. Or it has
        ``len(loader)`` examples without the batch's dimension: batch i then has those from ``i * batch_size`` on, of which each process
        reads its own. Which arguments a batch is shows by its structure and shapes: one, or a tuple of several that follow each other.
        In several processes all take each batch, and what they read is compared by checksums before it is handed out.

        Args:
            loader: an iterable of batches, such as a ``grain.DataLoader``, ``grain.IterDataset`` or generator; or examples, such as a
                ``grain.MapDataset`` or list.
            autotune: whether Grain picks worker processes and buffers, for its datasets and for examples.
            argnums: the position of the argument that a batch is, or of several, where structure and shapes do not tell.
            at_end: where rows are left that fill no batch, ``"wrap"`` fills it with the first ones, and ``"drop"`` leaves them out.
            prefetch: how many batches a thread reads and places ahead; 0 reads each when it is taken, without a thread.
            devices: as for `apply`.

        Raises:
            AutoshardError: Grain cannot tune this loader, or is not installed.
            StrategyError: an option is none of these; with the first batch, where no argument is like it.

        >>> import jax.numpy as jnp
        >>> import autoshard
        >>> step = lambda w, batch: batch["x"] @ w
        >>> args = jnp.ones((4, 4)), {"x": jnp.ones((8, 4))}
        >>> strategy = autoshard.search(step, *args, cluster="cpu:8", mesh={"data": 8})
        >>> [batch["x"].shape for batch in strategy.data([{"x": jnp.ones(4)}] * 12)]
        [(8, 4), (8, 4)]
        """
        return data_iterator(Matching(self.record, self._shardings(devices), argnums), loader, autotune, at_end, prefetch)

    def _shardings(self, devices: Sequence[Any] | None) -> list[list[tuple[TensorRecord, NamedSharding]]]:
        """Per argument, its leaves and where they lie."""
        flat = iter(zip(self.record.arguments, leaf_shardings(self.record, devices), strict=True))
        return [list(islice(flat, n)) for n in per_argument(self.record.argument_structure)]

    def _check_leaves(
        self, position: int, tree: Any, leaves: Sequence[Any], shardings: Sequence[tuple[TensorRecord, NamedSharding]]
    ) -> None:
        if not alike(self.record.argument_structure["tuple"][position], tree):
            paths = ", ".join(tensor.path for tensor, _ in shardings[:3]) + ", ..." * (len(shardings) > 3)
            raise StrategyError(
                f"argument {position} of {self.record.program.name!r} is structured otherwise in this strategy: it has {len(shardings)} "
                f"leaves, {paths}; got {len(leaves)}, {tree!s:.200}. "
                "Pass arguments structured as those that were searched."
            )
        for leaf, (tensor, _) in zip(leaves, shardings, strict=True):
            if tuple(jax.numpy.shape(leaf)) != tensor.shape:
                raise StrategyError(
                    f"{tensor.path} has shape {tensor.shape} in this strategy, got {tuple(jax.numpy.shape(leaf))}. "
                    "Search again for these shapes."
                )

    def _matching(self, tree: Any, devices: Sequence[Any] | None) -> list[NamedSharding]:
        """The shardings of the leaves of the argument that the tree is: by its structure and shapes, else by its shapes alone."""
        first, last = self.positions(tree)
        return [sharding for leaves in self._shardings(devices)[first:last] for _, sharding in leaves]

    def positions(self, tree: Any) -> tuple[int, int]:
        """The positions of the arguments that a pytree of arrays is, from the first up to, and without, the last.

        It is one argument or a tuple of the first few, with each NNX object as its `nnx.State` and None for what is static.

        Raises:
            StrategyError: no argument is structured so.
        """
        flat = iter(self.record.arguments)
        shapes = [[tensor.shape for tensor in islice(flat, n)] for n in per_argument(self.record.argument_structure)]
        found = position_of(self.record.argument_structure, shapes, tree)
        if found is None:
            raise StrategyError(
                f"the arguments of {self.record.program.name!r} have {', '.join(str(len(leaves)) for leaves in shapes)} arrays, and the "
                f"{len(jax.tree.leaves(tree))} arrays that were made or given have the shapes of none of them, nor of the first few. "
                "Pass or return the state as the step takes it."
            )
        return found


def load(path: str | os.PathLike[str]) -> Strategy:
    """The strategy of a file.

    Raises:
        StrategyError: the file is no strategy, or a damaged one.
    """
    if not isinstance(path, str | os.PathLike):
        raise StrategyError(f"load takes the path of a strategy file, got {path!r}. Pass a string or a pathlib.Path.")
    return Strategy(load_record(path))


def named(strategy: Strategy, name: str, command: str = "") -> Strategy:
    """The strategy under another name, with the command that reproduces it."""
    record = lasting(strategy.record)
    return strategy.with_record(replace(record, name=name, provenance=replace(record.provenance, command=command)))
