"""The strategy that users hold: a plan, what it takes to run it, and the questions that can be put to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import NamedSharding

from autoshard.ask.answer import Answer
from autoshard.ask.comparing import Comparison
from autoshard.ask.what_if import what_if
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.data import DataShard
from autoshard.errors import StrategyError
from autoshard.explanation.difference import difference_of
from autoshard.explanation.difference_text import difference_parts
from autoshard.plan.plan import Plan
from autoshard.plan.user_pins import Pins as WantedPins
from autoshard.run.data import DataIterator, data_iterator
from autoshard.run.feeding import Matching
from autoshard.run.leaf_shardings import leaf_shardings, step_meshes, strategy_mesh
from autoshard.run.padded import PaddedArguments
from autoshard.run.pipeline_step import step_of
from autoshard.run.placing import apart, check_equal, put, sharded_leaves
from autoshard.run.recorded import lasting
from autoshard.run.sharded import check_alive
from autoshard.run.step import Step, platform_options
from autoshard.run.structure import alike, dtype_of, per_argument, position_of, rebuild
from autoshard.strategy import TensorRecord, load_record
from autoshard.trace import SplitModules, outside_mesh, with_axes
from autoshard.verify import Options


class Strategy(Answer):
    """How one program is sharded over one cluster, what that costs, and how to run it.

    Attributes:
        record: everything that is saved.
    """

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The strategy of what a search found."""
        return cls(plan.record, plan._traced, plan._pins, plan._call, plan._known, tuple(tuple(map(cls.of, own)) for own in plan._passes))

    def what_if(
        self,
        *,
        pins: WantedPins | None = None,
        cluster: Cluster | str | Path | None = None,
        mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
        batch: int | None = None,
        microbatches: int | None = None,
        memory_limit_bytes: float | None = None,
        stages: int | None = None,
        chunks: int | None = None,
        schedule: str | None = None,
    ) -> WhatIf:
        """The difference that other pins, devices, meshes, batches, microbatches or stages would make; ``.strategy`` is the other strategy.

        The program is searched again by dynamic programming, and the function traced again for another batch only. What the strategy's own
        search computed serves again, and so do its options: pins, microbatches, recomputation, offload, donation and memory limit. Where
        nothing fits so, other numbers of microbatches and recomputation are tried, as `search` does by default.

        Args:
            pins: as for `search`, beside the strategy's own, which they override.
            cluster: other devices; its mesh is then searched, as `search` does.
            mesh: axis sizes by name; None keeps the mesh and its placement where the devices are the same.
            batch: the size of the whole batch: of the dimension that `data_parallel` would split.
            microbatches: their number; None keeps it. Of a pipeline, that of each of its schedule's tasks.
            memory_limit_bytes: as for `search`; None: that of the strategy, where devices have as much memory.
            stages: as for `search`; None keeps them.
            chunks: stages on each part of the devices; None keeps their number where the schedule is kept, if the step can be cut so.
            schedule: as for `search`; alone it leaves the stages as they are, and is answered in a second.

        Raises:
            StrategyError: the strategy has no program; says to pass it by `with_program`. Or no argument has a batch.
            TraceError: the step cannot be computed with a batch of that size, or in so many microbatches.
            InfeasibleError: nothing fits the memory; says what was not tried.
        """
        change = {name: value for name, value in locals().items() if name != "self"}
        words, after = what_if(self, **change)
        found = difference_of(self.record, after.record, ("now", "what if"), (self._judged, after._judged))
        return WhatIf(f"What if: {words}", tuple(difference_parts(found)), found, self.of(after))

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

        Arrays with padding have their padded shapes.

        Args:
            tree, devices: as for `shardings`.
        """
        tree = self._argument(tree)
        leaves, structure = jax.tree.flatten(tree)
        stored = self.record.arguments[self._first_leaf(tree) :]
        found = zip(leaves, stored[: len(leaves)], self._matching(tree, devices), strict=True)
        return structure.unflatten([jax.ShapeDtypeStruct(each.shape, x.dtype, sharding=sharding) for x, each, sharding in found])

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
        fn: Callable[..., Any],
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
        meshes = step_meshes(self.record, devices)
        options = {**platform_options(meshes[0].devices.flat[0].platform, bucket_bytes), **(compiler_options or {})}
        return step_of(fn, self.record, meshes, lowering, self._traced, options, save_graphs)

    def lowerable(self, fn: Callable[..., Any]) -> Step:
        """``fn``, to be lowered for no devices in particular: it is never run."""
        return step_of(fn, self.record, ())

    def shard(self, *args: Any, devices: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The arguments, all or the first few, put where the strategy wants them; a tuple. NNX objects are moved in place.

        Where the strategy pads dimensions, arrays in their own sizes get padding of zeros, and the step returns their state with padding;
        `unpad` gives their own sizes back.

        Raises:
            StrategyError: an argument is structured otherwise than the one that was searched.
        """
        split = SplitModules(args)
        per_argument, first = self._shardings(devices), 0
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
            given = self._padded.with_padding(leaves, first)
            self._check_leaves(position, tree, given, shardings)
            first += len(given)
            paths, wanted = [tensor.path for tensor, _ in shardings], [sharding for _, sharding in shardings]
            there = put(given, wanted, paths, (True,) * len(leaves))
            placed.append(tree.unflatten(apart(leaves, there, seen) if self.record.donate_argnums else there))
        return split.update(tuple(placed))

    def unpad(self, tree: Any) -> Any:
        """An argument, or a tuple of the first few, in its own sizes: without the padding that `shard`, `init` and the step give it.

        NNX objects are made anew. Arrays without padding are the same objects.

        Raises:
            StrategyError: no argument is structured so.
        """
        split = SplitModules((tree,))
        leaves, structure = jax.tree.flatten(split.states[0])
        first = self._first_leaf(split.states[0])
        check_alive(leaves, [tensor.path for tensor in self.record.arguments[first : first + len(leaves)]])
        own = self._padded.without_padding(leaves, first)
        return split.rebuild((structure.unflatten(own),))[0]

    @outside_mesh(keep_auto=True)
    def init(self, init_fn: Callable[..., Any], *args: Any, devices: Sequence[Any] | None = None) -> Any:
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
        shardings, first = self._matching(shape, devices), self._first_leaf(shape)

        def padded_init(*args: Any) -> list[Any]:
            return self._padded.with_padding(jax.tree.leaves(pure_init(*args)), first)

        leaves = with_axes(lambda: sharded_leaves(padded_init, args, shardings), self.mesh_shape)
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

    @cached_property
    def _padded(self) -> PaddedArguments:
        return PaddedArguments(self.record)

    def _first_leaf(self, tree: Any) -> int:
        """The position, among all argument leaves, of the first one of an argument."""
        return sum(per_argument(self.record.argument_structure)[: self.positions(tree)[0]])

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
        sizes = per_argument(self.record.argument_structure)

        def among(leaves: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
            flat = iter(leaves)
            return position_of(self.record.argument_structure, [[*islice(flat, n)] for n in sizes], tree)

        found = among([tuple(tensor.shape) for tensor in self.record.arguments])
        if found is None and self._padded:
            found = among(self._padded.own_shapes)
        if found is None:
            shapes = [range(n) for n in sizes]
            raise StrategyError(
                f"the arguments of {self.record.program.name!r} have {', '.join(str(len(leaves)) for leaves in shapes)} arrays, and the "
                f"{len(jax.tree.leaves(tree))} arrays that were made or given have the shapes of none of them, nor of the first few. "
                "Pass or return the state as the step takes it."
            )
        return found


@dataclass(frozen=True, slots=True)
class WhatIf(Comparison):
    """The comparison of a strategy with another one that was searched for it: ``strategy``, which runs, saves and explains as any."""

    strategy: Strategy


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
