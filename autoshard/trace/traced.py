"""Tracing of a function with example arguments to a `Traced` program."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from autoshard.analysis.examples import examples
from autoshard.errors import RuleError, TraceError
from autoshard.ir import Graph
from autoshard.ir.rewritten import Rewritten
from autoshard.ir.words import array_type
from autoshard.rules import rules_of
from autoshard.trace.annotations import Rules, flax_axes, rules_in_force, under_rules
from autoshard.trace.build import Program, build
from autoshard.trace.constraints import with_axes
from autoshard.trace.fingerprint import fingerprint
from autoshard.trace.leaves import Leaf, argument_names, find_aliases, plain_leaves, result_path
from autoshard.trace.libraries import assumed
from autoshard.trace.module_scopes import scoped
from autoshard.trace.modules import Modules, has_modules
from autoshard.trace.origin import error_place
from autoshard.trace.simplify import simplified
from autoshard.trace.statics import Held, Statics, held, held_modules, released, without


@dataclass(frozen=True, slots=True, eq=False)
class Traced(Rewritten):
    """A function traced with example arguments.

    A call is ``merge(args, pack(lowered(*jax.tree.leaves(split(args)))))``, of which all but ``merge`` can be jitted.

    Attributes:
        graph: the program; calls inlined, dead ops dropped.
        jaxpr: as JAX traced it, simplified, for the lowering; its inputs and outputs are the graph's arguments and results.
        in_tree: `jax.tree.structure` of the arguments tuple; an NNX object counts as its `nnx.State`, a static leaf as None; keyword
            arguments are a last dict.
        out_tree: structure of the function's result, without updates of NNX objects.
        modules: the NNX objects among the arguments; None where there are none.
        donate_argnums: positions of the arguments whose memory may be reused.
        statics, made: the static leaves of the arguments and of the result; None where all are arrays.
        source: the jaxpr as JAX traced it, which JAX caches as long as the function exists.
        axis_rules: Flax's logical axis rules under which it was traced.
        batch: the paths of the arguments that hold examples, where the user names them.
        rewrites: those that were applied, in their order (`autoshard.rewrite`); (): it is as JAX traced it.
        undivided: the program before those of the rewrites that are applied again to its microbatches or stages; None: there are none.
        gathers: of one pass of a step, whose batch are the examples that the graph names: as in `autoshard.microbatch.plan.plan_loop`; what
            waits for all examples there is computed at once. None: a whole step.
        padding: where dimensions were padded, per argument leaf and dimension its parts, each with its size and its padded size; no parts
            where a dimension has no padding.
    """

    graph: Graph
    jaxpr: ClosedJaxpr
    in_tree: Any
    out_tree: Any
    donate_argnums: tuple[int, ...] = ()
    modules: Modules | None = None
    statics: Statics | None = None
    made: Statics | None = None
    source: weakref.ref[ClosedJaxpr] | None = None
    axis_rules: Rules = ()
    batch: tuple[str, ...] = ()
    rewrites: tuple[Any, ...] = ()
    undivided: Traced | None = None
    gathers: bool | None = None
    padding: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = ()

    def split(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as pytrees of arrays, structured as ``in_tree``.

        Raises:
            TraceError: their structure differs.
        """
        pure = self._split(args)
        if jax.tree.structure(pure) != self.in_tree:
            raise TraceError(
                f"A traced function takes arguments of one structure, {self.in_tree}; got {jax.tree.structure(pure)}. "
                "Trace or search again with these arguments."
            )
        return pure

    def _split(self, args: tuple) -> tuple:
        pure = tuple(args) if self.modules is None else self.modules.split(tuple(args))
        return pure if self.statics is None else self.statics.split(pure)

    def ways(self, fn: Callable) -> tuple[Callable[..., tuple[Any, ...]], Callable[..., Any]] | None:
        """`split`, with static values held, and `merge`; None where a call needs neither, since all leaves are arrays.

        The first leaves it to `jax.jit` to compare structures; where arguments are static as a whole, it looks at these alone.
        """
        if self.statics is None and self.modules is None:
            return None
        whole = None if self.modules is not None or self.statics is None else self.statics.whole()
        return (lambda args: self._split(held(fn, args))) if whole is None else functools.partial(without, whole), self.merge

    def pack(self, results: Sequence[Any]) -> Any:
        """The output pytree of flat results: the function's result, or with NNX arguments ``(result, updates)``."""
        n = self.out_tree.num_leaves
        result = self.out_tree.unflatten(results[:n])
        return result if self.modules is None else (result, list(results[n:]))

    def merge(self, args: tuple[Any, ...], output: Any, pure: tuple[Any, ...] | None = None) -> Any:
        """The function's result from a packed output; updates are written into the NNX objects in ``args``.

        ``pure`` is what `split` made of the arguments, which takes as long as all else; None: it is made again.
        """
        whole = output if self.made is None else released(self.made.merge(output))
        return whole if self.modules is None else self.modules.merge(tuple(args), self.split(args) if pure is None else pure, *whole)

    def flatten_prefix(self, prefix: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
        """One entry per argument leaf, from a pytree with the structure of the arguments tuple or a prefix of it.

        Raises:
            ValueError: it is neither.
        """
        flat: list[Any] = []
        whole = self.in_tree.unflatten(range(self.in_tree.num_leaves))
        jax.tree.map(lambda entry, part: flat.extend([entry] * len(jax.tree.leaves(part))), prefix, whole, is_leaf=is_leaf)
        return flat


def trace(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    axis_names: Sequence[str] = (),
    before: Traced | None = None,
    own_donation: bool = False,
) -> Traced:
    """The program of ``fn`` on arguments like these.

    >>> traced = trace(lambda w, x: x @ w, jax.ShapeDtypeStruct((4, 2), "float32"), jax.ShapeDtypeStruct((8, 4), "float32"))
    >>> [op.primitive for op in traced.graph.ops], traced.graph.argument_paths
    (['dot_general'], ('w', 'x'))

    Args:
        fn: any function JAX can trace.
        args: pytrees of arrays, `jax.ShapeDtypeStruct`s and Python numbers; Flax NNX objects are handled as `nnx.jit` does. What is
            static (`held`) is bound by its value.
        donate_argnums: as for `jax.jit`.
        kwargs: keyword arguments; they count as one more argument, a dict.
        axis_names: mesh axes that `with_sharding_constraint` inside ``fn`` may name; others are found by tracing.
        before: a program that was traced before; it is returned where JAX has the same jaxpr for this function and these arguments. Its
            logical axis rules hold where none are in force.
        own_donation: whether the arguments count as donated, too, that a jitted ``fn`` donates.

    Raises:
        TraceError: JAX cannot trace it, a static value has no hash, or a mutation of a module would be lost.
    """
    if not callable(fn):
        raise TraceError(f"The first argument is the function to trace, got {type(fn).__name__} {fn!r:.80}. Pass a function of arrays.")
    _check_call(fn, args, kwargs or {})
    names = argument_names(fn, len(args))
    donated_args = _positions(donate_argnums, len(args))
    if kwargs:
        fn, args, names = _with_keywords(fn, len(args)), (*args, dict(kwargs)), (*names, "kwargs")
    args = held(fn, args)
    if any(isinstance(x, Held) for x in jax.tree.leaves(args)):
        fn = _with_released(fn)
    try:
        modules = Modules(fn, args, donated_args) if has_modules(args) else None
        leaves = plain_leaves(args, names) if modules is None else modules.leaves(args, names)
    except ValueError as error:
        raise TraceError(f"Arguments are pytrees, and these cannot be flattened: {_reason(error)} Make their keys comparable.") from error
    pure_args = args if modules is None else modules.split(args)
    function = fn if modules is None else modules.pure
    statics, made = Statics.of(pure_args), []
    if statics is not None:
        statics.check(leaf.path for leaf in leaves)
        leaves, pure_args = statics.arrays(leaves), statics.split(pure_args)
        function = _of_arrays(function, statics, made)
    avals = _abstract(pure_args, leaves)
    rules = rules_in_force() or (() if before is None else before.axis_rules)
    try:
        with under_rules(rules), assumed():
            made_of = partial(jax.make_jaxpr(function, return_shape=True), *avals)
            (everything, shapes), assumptions = _with_flax(made_of, axis_names, flax_axes(tuple(pure_args), rules))
    except TraceError:
        raise
    except RuleError as error:  # of a kernel's rule that the call contradicts
        place = error_place(error)
        raise RuleError(f"at {place}, {error}" if place else str(error)) from error
    except Exception as error:  # whatever the function raises while it is traced
        raise _failure(fn, error, dict(zip(names, args, strict=True))) from error
    in_tree = jax.tree.structure(tuple(pure_args))
    if own_donation and not (own := _donated_inside(everything.jaxpr, leaves)).issubset(donated_args):
        donated_args = tuple(sorted(own.union(donated_args)))
        if modules is not None:  # what is donated is written back
            return trace(fn, *args, donate_argnums=donated_args, axis_names=axis_names)
    donated = tuple(i for i, leaf in enumerate(leaves) if leaf.argument in donated_args)
    if before is not None and before.source is not None and before.source() is everything:
        if (before.in_tree, before.graph.donated) == (in_tree, donated):
            return before
    jaxpr = scoped(simplified(everything), args)
    output = shapes if modules is None else shapes[0]
    out_tree = jax.tree.structure(output)
    program = build(jaxpr)
    program = replace(program, assumptions=(*program.assumptions, *assumptions))
    graph = _graph(fn, program, leaves, output, modules.written if modules else (), donated)
    again = modules is None and statics is None
    results = made[0] if made else None
    source = weakref.ref(everything) if again else None
    return Traced(graph, jaxpr, in_tree, out_tree, donated_args, modules, statics, results, source, axis_rules=rules)


def _with_flax(traced: Callable[[], Any], axis_names: Sequence[str], of_flax: Sequence[str] | None) -> tuple[Any, tuple[str, ...]]:
    """The result of ``traced()`` with constraints applied, those of Flax to the axes ``of_flax`` too; and why these are not, in words.

    Some programs can be traced only without a mesh, where Flax leaves its constraints out: a `shard_map` inside has its own, and
    `nn.DenseGeneral` (Flax 0.12) applies the names of its kernel to one of another rank.
    """
    if of_flax is None:
        return with_axes(traced, dict.fromkeys(axis_names, 1)), ()
    try:
        return with_axes(traced, dict.fromkeys((*axis_names, *of_flax), 1), always=True), ()
    except Exception as error:
        found = with_axes(traced, dict.fromkeys(axis_names, 1))
        return found, (f"Flax's sharding constraints inside the function are left out, as by jax.jit without a mesh: {_reason(error)}",)


def rebuilt(traced: Traced, jaxpr: ClosedJaxpr, *by: Any, notes: Sequence[str] = (), simplify: bool = True) -> Traced:
    """A traced function with another program for it, of the same arguments and results.

    Args:
        by: the rewrite that makes it, which is recorded.
        notes: what is assumed in it, or was done, in words.
    """
    jaxpr = simplified(jaxpr) if simplify else jaxpr
    program, graph = build(jaxpr), traced.graph
    graph = replace(
        graph,
        values=program.values,
        ops=program.ops,
        arguments=program.arguments,
        results=program.results,
        constants=program.constants,
        literals=program.literals,
        written=program.written,
        fingerprint=fingerprint(program, graph.aliases),
        assumptions=tuple(dict.fromkeys((*graph.assumptions, *program.assumptions, *notes))),
    )
    return replace(traced, graph=graph, jaxpr=jaxpr, rewrites=(*traced.rewrites, *by))


def of_jaxpr(
    name: str,
    jaxpr: ClosedJaxpr,
    argument_paths: Sequence[str],
    result_paths: Sequence[str],
    aliases: Sequence[tuple[int, int]] = (),
    donated: Sequence[int] = (),
    rewrites: tuple[Any, ...] = (),
    examples: tuple[frozenset[int], frozenset[int]] | None = None,
) -> Traced:
    """A program of flat arguments and results as a traced function; the arguments are its leaves."""
    jaxpr = simplified(jaxpr)
    program = build(jaxpr)
    graph = Graph(
        name=name,
        values=program.values,
        ops=program.ops,
        arguments=program.arguments,
        argument_paths=tuple(argument_paths),
        results=program.results,
        result_paths=tuple(result_paths),
        constants=program.constants,
        literals=program.literals,
        written=program.written,
        aliases=tuple(aliases),
        donated=tuple(donated),
        examples=examples,
        fingerprint=fingerprint(program, tuple(aliases)),
        assumptions=program.assumptions,
    )
    trees = (jax.tree.structure(tuple([0] * len(paths))) for paths in (argument_paths, result_paths))
    return Traced(graph, jaxpr, *trees, donate_argnums=tuple(donated), rewrites=rewrites)


def _with_released(fn: Callable) -> Callable:
    def call(*args: Any) -> Any:
        return fn(*map(released, args))

    call.__name__ = function_name(fn)
    return call


def _of_arrays(function: Callable, statics: Statics, made: list[Statics | None]) -> Callable:
    """The function of arguments without their static leaves, to a result without its own, which are put into ``made``."""

    def called(*arrays: Any) -> Any:
        result = held_modules(function(*statics.merge(arrays)))
        made[:] = [Statics.of(result)]
        return result if made[0] is None else made[0].split(result)

    return called


def _donated_inside(jaxpr: Jaxpr, leaves: Sequence[Leaf]) -> set[int]:
    """The positions of the arguments that the program donates itself: a function does that was jitted so, whatever is wrapped around it."""
    flags = jaxpr.eqns[0].params.get("donated_invars", ()) if len(jaxpr.eqns) == 1 else ()
    given = {x for x, donated in zip(jaxpr.eqns[0].invars, flags, strict=True) if donated} if any(flags) else set()
    kept = {leaf.argument for leaf, variable in zip(leaves, jaxpr.invars, strict=True) if variable not in given}
    return {leaf.argument for leaf in leaves} - kept


def _graph(fn: Callable, program: Program, leaves: list[Leaf], output: Any, written: tuple[int, ...], donated: tuple[int, ...]) -> Graph:
    """The graph of a program, with the names, aliases and donations of its leaves; ``written`` are leaves updated in place."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(output)[0]]
    values = program.values
    aliases = find_aliases(
        [(leaf.key, values[number]) for leaf, number in zip(leaves, program.arguments, strict=True)],
        [(path, values[number]) for path, number in zip((*paths, *((),) * len(written)), program.results, strict=True)],
        donated,
        {len(paths) + k: argument for k, argument in enumerate(written)},
    )
    graph = Graph(
        name=function_name(fn),
        values=values,
        ops=program.ops,
        arguments=program.arguments,
        argument_paths=tuple(leaf.path for leaf in leaves),
        results=program.results,
        result_paths=(*map(result_path, paths), *(leaves[i].path for i in written)),
        constants=program.constants,
        literals=program.literals,
        written=program.written,
        aliases=aliases,
        donated=donated,
        fingerprint=fingerprint(program, aliases),
        assumptions=program.assumptions,
    )
    roots = [(leaf.argument, leaf.key.partition("]")[0] if leaf.name == "kwargs" else "") for leaf in leaves]
    return replace(graph, examples=examples(graph, lambda: rules_of(graph), roots))


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, without `functools.partial`s around it."""
    while not hasattr(fn, "__name__") and hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _check_call(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        packed = len(args) == 1 and isinstance(args[0], tuple)
        advice = "Pass the tuple's elements one by one, as *args." if packed else "Pass all of them, in order."
        raise TraceError(
            f"A function is traced with the arguments of a call: {function_name(fn)} got {len(args)}, and {error}. {advice}"
        ) from None


def _with_keywords(fn: Callable, n_args: int) -> Callable:
    def call(*args: Any) -> Any:
        return fn(*args[:n_args], **args[n_args])

    call.__name__ = function_name(fn)
    return call


def _positions(donate_argnums: int | Sequence[int], n_args: int) -> tuple[int, ...]:
    several = donate_argnums if isinstance(donate_argnums, Sequence) and not isinstance(donate_argnums, str) else (donate_argnums,)
    given: tuple[Any, ...] = tuple(several)
    for position in given:
        if isinstance(position, bool) or not isinstance(position, int) or not -n_args <= position < n_args:
            raise TraceError(f"donate_argnums are positions among the {n_args} arguments, got {position!r}. Use 0 to {n_args - 1}.")
    return tuple(dict.fromkeys(position % n_args for position in given))


def _abstract(args: tuple, leaves: list[Leaf]) -> tuple:
    """The arguments as `jax.ShapeDtypeStruct`s, without their shardings."""
    flat, tree = jax.tree.flatten(args)
    return tree.unflatten([_abstract_leaf(x, leaf) for x, leaf in zip(flat, leaves, strict=True)])


def _abstract_leaf(x: Any, leaf: Leaf) -> jax.ShapeDtypeStruct:
    try:
        aval: Any = jax.api_util.shaped_abstractify(x)
    except (TypeError, ValueError, OverflowError):
        raise TraceError(
            f"Arguments are pytrees of arrays, jax.ShapeDtypeStructs and Python numbers; '{leaf.path}' is {type(x).__name__} {x!r:.60}. "
            "Pass an array, or bind a static value beforehand with functools.partial."
        ) from None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _failure(fn: Callable, error: Exception, args: Mapping[str, Any]) -> TraceError:
    place = error_place(error)
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        rule, advice = (
            "A function is traced with abstract arrays, so its Python control flow cannot depend on their values",
            "Use jax.lax.cond, jax.numpy.where or jax.lax.while_loop, or bind the value beforehand with functools.partial.",
        )
    elif "does not match the specs of the input" in str(error):  # a shard_map's argument, traced without its Explicit sharding
        rule, advice = (
            "A function is traced without its arguments' present shardings, so a mesh inside it has Auto axes",
            "Make its mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis.",
        )
    elif "names that are of type Auto" in str(error) or "PartitionSpec when you are not under a mesh" in str(error):
        rule, advice = (
            "A function is traced without Explicit axes, since the sharding of its values is searched",
            "Use jax.lax.with_sharding_constraint in place of jax.reshard and out_sharding=.",
        )
    elif "static arguments are not supported" in str(error):  # a jitted function got a tracer for a static argument
        rule, advice = (
            "Only a static argument can be handed on as one; here a jitted function takes it static, and is handed a traced one",
            "Bind static arguments beforehand with functools.partial, or pass `jax.jit` of the whole with static_argnums.",
        )
    elif type(error).__name__ == "TraceContextError" or "trace level" in str(error):  # Flax's two errors for it
        rule, advice = (
            "A step may mutate only the modules that it is passed; it mutates one that it captures, and that mutation would be lost",
            "Pass the module as an argument.",
        )
    else:
        got = "; ".join(f"{name}: {_kind(x)}" for name, x in args.items())
        rule, advice = (
            "A function must be traceable by JAX with the arguments that it gets, in the order of its parameters",
            f"It got {got or 'no arguments'}. Make `jax.make_jaxpr` work on the function with these first.",
        )
    where = f" at {place}" if place else ""
    return TraceError(f"{rule}: tracing '{function_name(fn)}' failed{where} with {type(error).__name__}: {_reason(error)} {advice}")


def _kind(x: Any) -> str:
    """What an argument is, in words.

    >>> _kind({"up": 1, "down": 2}), _kind((1, 2)), _kind(jax.ShapeDtypeStruct((8, 4), "float32"))
    ("dict of 'up', 'down'", 'tuple of 2', 'float32[8,4]')
    """
    if isinstance(x, Mapping):
        keys = [repr(key) for key in x]
        return f"{type(x).__name__} of {', '.join(keys[:4])}{f' and {len(keys) - 4} more' if len(keys) > 4 else ''}"
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} of {len(x)}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return array_type(str(x.dtype), x.shape)
    return type(x).__name__


REASON = 500  # characters of an error's message that are told; the rest is in the error it comes from


def _reason(error: Exception) -> str:
    """The first paragraph of an error's message, on one line; where that ends with a colon, what follows it too, as far as it is short."""
    text = str(error).split("\nSee http")[0]
    first = text.split("\n\n")[0]
    text = " ".join((text if first.rstrip().endswith(":") else first).split()) or "no message"
    text = text if len(text) <= REASON else f"{text[: REASON - 3]}..."
    return f"{text.rstrip('.!?')}."
