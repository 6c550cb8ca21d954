"""A function with a strategy applied: called, lowered and differentiated like a jitted function."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from autoshard.cluster import CATALOGUE, Cluster
from autoshard.cluster.catalogue import Entry
from autoshard.compilers import TARGETS, compiler_of
from autoshard.cost.narrow_sums import crossings
from autoshard.errors import StrategyError
from autoshard.ir import Rule
from autoshard.lower import HOST, ReshardPath, abstract_mesh, constrained, derived_from, lowering_mesh, manual_program, obstacle
from autoshard.lower.opaque import ANY_PLATFORM, traced_without_kernels
from autoshard.run.calls import UNLIKE, Guarded, Repeat, is_traced
from autoshard.run.collecting import rarely_collecting
from autoshard.run.padded import PaddedArguments, in_own_sizes, own_sharding
from autoshard.run.placing import apart, put
from autoshard.run.program import check_effects, program_of
from autoshard.run.saved_graphs import check_root, save_plan, save_text
from autoshard.run.sharded import Positional, Sharded, call_type, check_alive, plain
from autoshard.strategy import Record, TensorRecord
from autoshard.trace import Traced, held, outside_mesh
from autoshard.verify import Options

LOWERINGS = {
    "manual": "one program over the whole mesh in which every collective is the planned one",
    "constraints": "sharding constraints, from which XLA's partitioner makes the collectives",
}

@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One traced and jitted form of the function, for arguments of one structure and one set of types.

    Attributes:
        call: from arguments where they should be to its results.
        jitted: what is called; None of a pipeline, which has many.
        is_state: per argument leaf, whether a result replaces it.
        repeat: its calls with arguments like those before; None inside transformations.
    """

    traced: Traced
    call: Callable[..., Any]
    in_shardings: tuple[NamedSharding, ...]
    is_state: tuple[bool, ...]
    jitted: Guarded | None = None
    repeat: Repeat | None = None


def platform_options(platform: str, bucket_bytes: int | None = None) -> Options:
    """The options of a platform's compiler with which a step is compiled.

    Args:
        bucket_bytes: how many bytes one collective combines at most; None leaves that to the compiler.

    Raises:
        StrategyError: the bytes are no whole number, or negative.

    >>> platform_options("tpu", 2**20)
    {'xla_jf_crs_combiner_threshold_in_bytes': 1048576}
    """
    compiler = TARGETS.get(platform)
    options = dict(compiler.options) if compiler else {}
    if bucket_bytes is None:
        return options
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 0:
        raise StrategyError(f"bucket_bytes is a whole number of bytes, 0 or more, got {bucket_bytes!r}. Use 32 * 2**20, for instance.")
    if compiler is None or not compiler.bucket_limits:
        warnings.warn(f"bucket_bytes limits what compilers for TPUs and GPUs combine, and has no effect on {platform!r}.", stacklevel=3)
        return options
    return {**options, **dict.fromkeys(compiler.bucket_limits, bucket_bytes)}


class Step(Sharded):
    """``fn`` as its strategy says: `jax.jit` of the program that each device runs.

    Arguments that lie elsewhere are moved to where the strategy wants them; Flax NNX objects among them are updated in place.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        record: Record,
        mesh: Mesh | None,
        lowering: str = "manual",
        traced: Traced | None = None,
        compiler_options: Options | None = None,
        save_graphs: str | os.PathLike[str] | None = None,
    ):
        """``mesh`` is the record's, of devices; None where the program is lowered and never run. ``lowering`` is one of `LOWERINGS`.

        Args:
            traced: what the search traced.
            compiler_options: as for `jax.jit`; inside another jitted function that one's count.
            save_graphs: the folder of `autoshard.run.saved_graphs`.

        Raises:
            StrategyError: the lowering is unknown, ``fn`` is no function, or ``save_graphs`` no path.
        """
        if lowering not in LOWERINGS:
            raise StrategyError(f"a lowering is one of {sorted(LOWERINGS)}, got {lowering!r}. Use one of those.")
        if not callable(fn):
            raise StrategyError(f"a step is a function, the one that was searched; got {fn!r:.60}. Pass it first, and its arguments to it.")
        if save_graphs is not None:
            check_root(save_graphs)
        functools.update_wrapper(self, fn, updated=())
        self._lowering = lowering
        self._compiler_options = dict(compiler_options or {})
        self._graphs = save_graphs
        self._fn, self._plain = fn, plain(fn)
        self._ordered = Positional(fn)
        self._record = record
        self.donate_argnums: tuple[int, ...] = record.donate_argnums
        self._mesh = mesh
        self._traced = traced
        self._programs: dict[Any, Program] = {}
        self._latest: Program | None = None  # of the latest call that was looked through
        self._repeat: Repeat | None = None
        self._around: AbstractMesh | None = None  # the mesh that was in force in that call, if any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.again(args, kwargs)
        return self.anew(args, kwargs) if result is UNLIKE else result

    def again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result for arguments like those of the call before; `UNLIKE` where they are not, or where there was none."""
        if (repeat := self._repeat) is None:
            return UNLIKE
        try:
            if kwargs:
                args = self._ordered(args, kwargs)
            if self._around is None:  # another mesh in force now is noticed where the function would be traced for it
                return repeat(args)
            if get_abstract_mesh() is not self._around:
                return UNLIKE
            with outside_mesh():
                return repeat(args)
        except Repeat.FAILURES:
            return UNLIKE

    def anew(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result for any arguments, each of which is looked at."""
        args = held(self._plain, self._ordered(args, kwargs))
        program, pure = self._program(args)
        leaves, tree = jax.tree.flatten(pure)
        if self._record.donate_argnums:
            check_alive(leaves, program.traced.graph.argument_paths)
        there = put(leaves, program.in_shardings, program.traced.graph.argument_paths, program.is_state)
        if self._record.donate_argnums:
            there = apart(leaves, there, set())
        is_new = program.jitted is not None and program.jitted.is_new
        if self._graphs is not None and is_new and not is_traced():  # compiled once: the call takes it from JAX's cache
            save_text(self._graphs, self._record.program, "compiled.txt", self.lower(*args).compile().as_text() or "")
        with outside_mesh():
            result = program.traced.merge(args, program.call(*tree.unflatten(there)), pure)
        self._remember(program, leaves, there)
        return result

    def forget(self) -> None:
        """The next call is looked through, whatever it is."""
        self._latest = self._repeat = self._around = None

    def _remember(self, program: Program, leaves: Sequence[Any], there: Sequence[Any]) -> None:
        """Takes the next call to be like this one: the first of a program, or the second of one in a row; not where two alternate."""
        if program.repeat is None:
            return
        is_first = program.repeat.learn(leaves, there)
        self._repeat = program.repeat if is_first or program is self._latest else None
        around = get_abstract_mesh()
        self._latest, self._around = program, around if around.axis_names else None

    def lower(self, *args: Any, platform: str = ANY_PLATFORM) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it; NNX objects stand there as their states.

        Without devices it is lowered for the platform that is named: any will do for what does not compile it.
        """
        program, pure = self._program(held(self._plain, args))
        leaves, tree = jax.tree.flatten(pure)
        shardings = [None] * len(leaves) if self._mesh is None else program.in_shardings
        described = tree.unflatten([_described(x, sharding) for x, sharding in zip(leaves, shardings, strict=True)])
        with outside_mesh():
            assert program.jitted is not None
            traced = program.jitted.trace(*described)
            if self._mesh is None and platform == ANY_PLATFORM:
                traced = traced_without_kernels(traced, described)
            lowered = traced.lower(lowering_platforms=(platform,)) if self._mesh is None else traced.lower()
        if self._graphs is not None:
            save_text(self._graphs, self._record.program, "lowered.mlir", lowered.as_text())
        return lowered

    def runs(self, args: tuple[Any, ...]) -> bool:
        """Whether the function is its strategy's program for these arguments too, such as modules that were made again."""
        try:
            self._program(held(self._plain, args))
        except StrategyError:
            return False
        return True

    def program(self, *args: Any) -> tuple[Program, tuple[Any, ...]]:
        """What runs for arguments like these, and the arguments as pytrees of arrays."""
        return self._program(held(self._plain, args))

    def _program(self, args: tuple) -> tuple[Program, tuple]:
        """The program for arguments like these, in which what is static is held, and the arguments as pytrees of arrays."""
        traced_further = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        key = call_type(args), traced_further, is_traced(), _explicit_mesh()
        if (found := self._programs.get(key)) is None:
            found = self._programs[key] = self._lowered(args, *key[1:])
        return found, found.traced.split(args)

    @rarely_collecting()
    @outside_mesh(keep_auto=True)
    def _lowered(self, args: tuple, differentiable: bool, inside: bool, around: Mesh | None) -> Program:
        """``inside``: a transformation such as `jax.jit`, be the arguments tracers or constants; its compiler options count there."""
        record = self._record
        traced, rules, path = program_of(self._fn, args, record, self._weak_before(args), self._traced)
        graph = traced.graph
        if self._graphs is not None:
            save_plan(self._graphs, record, graph, rules)
        check_effects(graph, record.mesh.size)
        manual = self._lowering != "constraints" and not differentiable and obstacle(graph, abstract_mesh(record.mesh)) is None
        entry = CATALOGUE.get(Cluster.from_dict(record.cluster).device.name)
        device = entry and _abstract_device(entry)
        mesh = lowering_mesh(record.mesh, graph, device, manual) if self._mesh is None else self._mesh
        flat = self._flat(traced, rules, path, mesh, differentiable)

        def sharding(tensor: TensorRecord, value: int) -> NamedSharding:
            found = graph.values[value]  # an empty array lies whole: of one that is split, jaxlib 0.10.2 reads back no more than a shard
            spec = PartitionSpec(*(tensor.spec if found.size else (None,) * found.rank))
            return NamedSharding(mesh, spec, memory_kind=HOST if found.on_host else None)

        in_shardings = tuple(map(sharding, record.arguments, graph.arguments))
        out_shardings = [*map(sharding, record.results, graph.results)]
        own = PaddedArguments(record).given_own(jax.tree.leaves(traced.split(args)))
        if own:
            flat, replaced = in_own_sizes(flat, own, graph.aliases), dict(graph.aliases)
            in_shardings = tuple(own_sharding(each, own[k]) if k in own else each for k, each in enumerate(in_shardings))
            out_shardings = [own_sharding(x, own[replaced[k]]) if replaced.get(k) in own else x for k, x in enumerate(out_shardings)]
        if around is not None and isinstance(mesh, Mesh) and [*around.devices.flat] == [*mesh.devices.flat]:
            out_shardings = _for_users(out_shardings, traced, around)

        def step(*pure: Any) -> Any:
            return traced.pack(flat(*jax.tree.leaves(pure)))

        step.__name__ = graph.name
        jitted = Guarded(
            step,
            mesh,
            in_shardings=traced.in_tree.unflatten(in_shardings),
            out_shardings=traced.pack(out_shardings),
            donate_argnums=record.donate_argnums,
            compiler_options=(None if inside else self._compiler_options) or None,
        )
        state = {argument for _, argument in graph.aliases}
        is_state = tuple(argument in state for argument in range(len(in_shardings)))
        repeat = None
        if not inside:  # tracers are never called on again
            donates, ways = bool(record.donate_argnums), traced.ways(self._plain)
            repeat = Repeat(jitted.call, traced.in_tree, in_shardings, is_state, graph.argument_paths, donates, ways)
        return Program(traced, jitted, in_shardings, is_state, jitted, repeat)

    def _flat(
        self, traced: Traced, rules: tuple[Rule | None, ...], path: ReshardPath, mesh: Mesh | AbstractMesh, differentiable: bool
    ) -> Callable[..., list[Any]]:
        """The program on flat arguments, sharded as the record says; derivatives, where asked for, are lowered by constraints."""
        graph = traced.graph
        program = traced.jaxpr, graph, rules, self._record.assignment, mesh, path
        before = traced.undivided
        as_written = differentiable and before is not None and before.jaxpr.in_avals == traced.jaxpr.in_avals
        constraints = functools.partial(constrained, *program, differentiable=differentiable and not as_written)
        acts = any(op.equation is not None and op.equation.effects for op in graph.walk())
        by_constraints = self._lowering == "constraints" or obstacle(graph, mesh) is not None or (differentiable and acts)
        cluster = Cluster.from_dict(self._record.cluster)
        narrow = crossings(cluster.links(self._record.mesh), self._record.mesh.names)
        if narrow and by_constraints:
            raise StrategyError(
                "sums in a narrow type are part of the manual lowering, and this step is lowered by sharding constraints, for which XLA "
                "makes the sums. Search without slow_reduction, or leave out lowering='constraints'."
            )
        found = constraints() if by_constraints else manual_program(*program, narrow=narrow, compiler=compiler_of(cluster))
        if as_written and before is not None:  # its loops of further rounds have no derivatives
            return derived_from(found, lambda: jaxpr_as_fun(before.jaxpr))
        return derived_from(found, constraints) if differentiable and not by_constraints else found

    def _weak_before(self, args: tuple) -> tuple[bool, ...] | None:
        """Which leaves were weakly typed in the first call with arguments that are like these but for that; None: there was none."""
        structure, leaves = call_type(args)
        strong = [leaf[:2] for leaf in leaves]
        before = (types for (other, types), *_ in self._programs if other == structure and [leaf[:2] for leaf in types] == strong)
        return next((tuple(leaf[2] for leaf in types) for types in before), None)


def _abstract_device(entry: Entry) -> AbstractDevice:
    """The device without a device; JAX 0.10.0 does not name its platform."""
    facts = {"device_kind": entry.jax_kinds[0], "num_cores": entry.cores or None, "platform": entry.device.kind}
    known = inspect.signature(AbstractDevice).parameters
    return AbstractDevice(**{name: value for name, value in facts.items() if name in known})


def _explicit_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` with Explicit axes, under which operations on arrays of other meshes are errors; None inside `jax.jit`."""
    mesh = None if is_traced() else jax.sharding.get_mesh()
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def _for_users(shardings: Sequence[NamedSharding], traced: Traced, around: Mesh) -> list[NamedSharding]:
    """The results' shardings, of whole ones on the mesh around the call, such as a loss that is added up there; state stays as it is."""
    state = {result for result, _ in traced.graph.aliases}
    metrics = (number < traced.out_tree.num_leaves and number not in state for number in range(len(shardings)))
    whole = NamedSharding(around, PartitionSpec())
    return [whole if found.is_fully_replicated and free else found for found, free in zip(shardings, metrics, strict=True)]


def _described(x: Any, sharding: NamedSharding | None) -> Any:
    """An array as its shape and type, wherever it lies, as one that was put where it should be; anything else as it is."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False), sharding=sharding)
