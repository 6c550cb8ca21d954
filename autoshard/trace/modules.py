"""Flax NNX objects among the arguments, handled as in `nnx.jit`.

Modules, optimizers and other graph nodes are split into their states jointly, so that shared variables occur once; a pure
function of these states is traced; updates are further results, which are written into the caller's objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from autoshard.errors import TraceError
from autoshard.trace.leaves import Leaf, leaf_at
from autoshard.trace.statics import Statics, held_modules, is_static, released


def has_modules(tree: Any) -> bool:
    """Whether a pytree has NNX graph nodes; never imports Flax itself."""
    return "flax" in sys.modules and any(_Positions.of(tree).is_node)


def _is_node(x: Any) -> bool:
    from flax import nnx

    return nnx.graph.is_graph_node(x) and not nnx.graph.is_array_ref(x)


def _ends_here(x: Any) -> bool:
    """Whether flattening stops here: at a graph node, or an `nnx.State`, which is a plain pytree although it contains variables."""
    from flax import nnx

    return isinstance(x, nnx.State) or _is_node(x)


@dataclass(frozen=True, slots=True)
class _Positions:
    """The positions of a pytree's graph nodes, or of their states.

    Attributes:
        tree: `jax.tree.structure`, with graph nodes as leaves.
        is_node: per leaf whether it is a graph node.
    """

    tree: Any
    is_node: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any) -> _Positions:
        leaves, structure = jax.tree.flatten(tree, is_leaf=_ends_here)
        return cls(structure, tuple(map(_is_node, leaves)))

    def get(self, tree: Any) -> tuple[Any, ...]:
        return tuple(leaf for leaf, node in zip(self.tree.flatten_up_to(tree), self.is_node, strict=True) if node)

    def put(self, tree: Any, new: Sequence[Any]) -> Any:
        coming = iter(new)
        leaves = zip(self.tree.flatten_up_to(tree), self.is_node, strict=True)
        return self.tree.unflatten([next(coming) if node else leaf for leaf, node in leaves])


def _split(nodes: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The joint structure of graph nodes, and the state of each, without variables that an earlier one shares."""
    from flax import nnx

    structure, state = nnx.split(nodes)
    return structure, [state[i] if i in state else nnx.State({}) for i in range(len(nodes))]


def _joined(states: Sequence[Any]) -> Any:
    from flax import nnx

    return nnx.State({i: state for i, state in enumerate(states) if jax.tree.leaves(state)})


class Modules:
    """A function of graph nodes as a pure function of their states, and the conversions of arguments and results.

    Attributes:
        written: positions, among the argument leaves, of the updates that `pure` returns; set by tracing it.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], donated_args: Sequence[int]):
        self._fn = fn
        self._places = _Positions.of(args)
        self._structure, _ = _split(self._places.get(args))
        self._donated_args = donated_args
        self.written: tuple[int, ...] = ()
        self._returned: tuple[Any, ...] = ()  # per returned graph node its path in the arguments' nodes, or None for a new one
        self._made: Any = None  # the joint structure of the new ones
        self._result_places = self._places

    def split(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with each graph node replaced by its state.

        Raises:
            TraceError: the nodes' structure differs from the traced one.
        """
        structure, states = _split(self._places.get(args))
        if structure != self._structure:
            raise TraceError(
                "A traced step fits modules of one structure: the same layers, variables and static attributes. The modules given differ "
                "from the traced ones (train and eval mode count, and so do shared references). Trace or search again with these arguments."
            )
        return self._places.put(args, states)

    def leaves(self, args: tuple[Any, ...], names: Sequence[str]) -> list[Leaf]:
        """The leaves of the split arguments; paths in a module are ``model.layers[0].kernel``."""
        outer = [path for path, _ in jax.tree_util.tree_flatten_with_path(args, is_leaf=_ends_here)[0]]
        found = []
        for path, part, node in zip(outer, self._places.tree.flatten_up_to(self.split(args)), self._places.is_node, strict=True):
            for inner, _ in jax.tree_util.tree_flatten_with_path(part)[0]:
                found.append(leaf_at(path, names, _attributes(inner) if node else keystr(inner)))
        return found

    def pure(self, *states: Any) -> tuple[Any, list[Any]]:
        """The function's result with states for graph nodes, and the updated leaves; to be traced.

        Unchanged leaves are returned only where they are donated, since their old memory is reused.
        """
        from flax import nnx

        # Listed before the call: the merged nodes share their variables with the states, and the function may change them.
        old = [(i, leaf) for i, argument in enumerate(states) for leaf in jax.tree.leaves(argument) if not is_static(leaf)]
        nodes = nnx.merge(self._structure, _joined(self._places.get(states)))
        result = self._fn(*self._places.put(states, nodes))
        structure, after = _split(nodes)
        if structure != self._structure:
            raise TraceError(
                "A step may change the values of a module's variables, not its structure: the function added, removed or replaced a "
                "variable or changed a static attribute (train() and eval() do), and that mutation would be lost. "
                "Build the module and set its mode before the step, or use nnx.view."
            )
        new = [leaf for leaf in jax.tree.leaves(self._places.put(states, after)) if not is_static(leaf)]
        self.written = tuple(k for k, (i, leaf) in enumerate(old) if new[k] is not leaf or i in self._donated_args)
        return self._split_result(result, nodes), [new[k] for k in self.written]

    def _split_result(self, result: Any, nodes: tuple[Any, ...]) -> Any:
        from flax import nnx

        known = {id(node): path for path, node in nnx.iter_graph(nodes)}
        self._result_places = _Positions.of(result)
        returned = self._result_places.get(result)
        self._returned = tuple(known.get(id(node)) for node in returned)
        fresh = tuple(node for node, path in zip(returned, self._returned, strict=True) if path is None)
        if any(id(node) in known and isinstance(node, nnx.Variable) for _, node in nnx.iter_graph(fresh)):
            raise TraceError(
                "A returned module is an argument, a part of one, or all new; the function returns a new module that shares variables "
                "with an argument, and that sharing would be lost. Return the argument itself, or nnx.state of the module."
            )
        self._made, made = _split(fresh)
        coming = iter(made)
        return self._result_places.put(result, [next(coming) if path is None else None for path in self._returned])

    def merge(self, args: tuple[Any, ...], states: tuple[Any, ...], result: Any, updates: Sequence[Any]) -> Any:
        """The function's result on the caller's objects, into which the updates of their ``states``, without static leaves, are written."""
        from flax import nnx

        nodes = self._places.get(args)
        leaves, tree = jax.tree.flatten(states)
        for position, leaf in zip(self.written, updates, strict=True):
            leaves[position] = leaf
        nnx.update(nodes, _joined(self._places.get(tree.unflatten(leaves))))
        if not self._returned:
            return result
        there = dict(nnx.iter_graph(nodes))
        states = self._result_places.get(result)
        fresh = iter(nnx.merge(self._made, _joined([s for s, path in zip(states, self._returned, strict=True) if path is None])))
        return self._result_places.put(result, [next(fresh) if path is None else there[path] for path in self._returned])


def _attributes(path: Sequence[Any]) -> str:
    """A path inside a module as Python writes it, in attributes and indices; a variable's value is the variable."""
    text = ""
    for key in path:
        match key:
            case GetAttrKey(name="value"):
                continue
            case DictKey(key=str(name)) if name.isidentifier():
                text += f".{name}"
            case DictKey(key=index) | SequenceKey(idx=index):
                text += f"[{index!r}]"
            case _:
                text += keystr((key,))
    return text


class SplitModules:
    """Pytrees with each NNX graph node replaced by its state and each static leaf by None, and two inverses.

    Attributes:
        states: the pytrees of arrays.
    """

    def __init__(self, trees: tuple[Any, ...]):
        self.states = trees
        self._places = None
        if has_modules(trees):
            self._places = _Positions.of(trees)
            self._nodes = self._places.get(trees)
            self._structure, states = _split(self._nodes)
            self.states = self._places.put(trees, states)
        self._statics = Statics.of(held_modules(self.states))
        if self._statics is not None:
            self.states: Any = self._statics.split(held_modules(self.states))

    def update(self, new: tuple[Any, ...]) -> tuple[Any, ...]:
        """The trees with new arrays; the graph nodes that were split are updated in place."""
        new = self._whole(new)
        if self._places is None:
            return new
        from flax import nnx

        nnx.update(self._nodes, _joined(self._places.get(new)))
        return self._places.put(new, self._nodes)

    def _whole(self, new: tuple) -> tuple:
        return new if self._statics is None else released(self._statics.merge(new))

    def rebuild(self, new: tuple[Any, ...]) -> tuple[Any, ...]:
        """The trees with new arrays and new graph nodes."""
        new = self._whole(new)
        if self._places is None:
            return new
        from flax import nnx

        return self._places.put(new, nnx.merge(self._structure, _joined(self._places.get(new))))
