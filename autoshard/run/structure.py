"""Pytree structures as plain JSON, so that a loaded strategy has specs structured as the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

# JAX's own kinds of typed keys, as dtypes name them.
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def dtype_of(name: str) -> Any:
    """The dtype of this name, typed keys' included.

    >>> dtype_of("bfloat16"), dtype_of("key<fry>")
    (dtype(bfloat16), key<fry>)
    """
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype if name in KEYS else jax.numpy.dtype(name)


def describe(tree: Any) -> Any:
    """A `PyTreeDef` as JSON: a leaf's index, None, or its container with children.

    >>> describe(jax.tree.structure(({"w": 0, "b": [0, None]}, 0)))
    {'tuple': [{'dict': {'b': {'list': [0, None]}, 'w': 1}}, 2]}
    """
    return _describe(tree, iter(range(tree.num_leaves)))


def _describe(tree: Any, leaves) -> Any:
    data = tree.node_data()
    if data is None:
        return next(leaves) if tree.num_leaves else None
    kind, extra = data
    children = [_describe(child, leaves) for child in tree.children()]
    if kind is type(None):
        return None
    if kind is tuple:
        return {"tuple": children}
    if kind is list:
        return {"list": children}
    if kind is dict and all(isinstance(key, str) for key in extra):
        return {"dict": {str(key): child for key, child in zip(extra, children, strict=True)}}
    name = f"{kind.__module__}.{kind.__qualname__}"
    keys = [str(key) for key in (extra if kind is dict else getattr(kind, "_fields", range(len(children))))]
    return {"node": name, "keys": keys, "children": children}


def per_argument(structure: Any) -> list[int]:
    """How many leaves each argument of a described arguments tuple has; they are numbered one argument after the other.

    >>> per_argument({"tuple": [{"dict": {"b": 0, "w": 1}}, 2]})
    [2, 1]
    """
    return [_count(child) for child in structure["tuple"]]


def alike(structure: Any, tree: Any) -> bool:
    """Whether a `PyTreeDef` has a described structure, whatever the leaves' numbers."""
    return _unnumbered(structure) == _unnumbered(describe(tree))


def position_of(structure: Any, shapes: Sequence[Sequence[tuple[int, ...]]], tree: Any) -> tuple[int, int] | None:
    """The position of the argument that a tree is, or the range of the first few that it is a tuple of; None if it is neither.

    One of its structure and shapes comes before one of its shapes alone.

    Args:
        structure: a described arguments tuple.
        shapes: per argument the shapes of its leaves.
        tree: a pytree of arrays, concrete or abstract.

    >>> position_of({"tuple": [0, {"dict": {"w": 1}}]}, [[()], [(4, 2)]], {"w": jax.numpy.ones((4, 2))})
    (1, 2)
    """
    described, kind = structure["tuple"], jax.tree.structure(tree)
    given = [tuple(jax.numpy.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    ranges = [(at, at + 1) for at in range(len(described))] + [(0, n) for n in range(2, len(described) + 1)]
    fitting = [(first, last) for first, last in ranges if [shape for leaves in shapes[first:last] for shape in leaves] == given]

    def is_exact(first: int, last: int) -> bool:
        return alike(described[first] if last - first == 1 else {"tuple": described[:last]}, kind)

    return next((found for found in fitting if is_exact(*found)), fitting[0] if fitting else None)


def _children(structure: Any) -> list[Any]:
    if not isinstance(structure, dict):
        return []
    (inner,) = (part for kind, part in structure.items() if kind in ("tuple", "list", "dict", "children"))
    return list(inner.values()) if isinstance(inner, dict) else inner


def _count(structure: Any) -> int:
    return isinstance(structure, int) + sum(map(_count, _children(structure)))


def _unnumbered(structure: Any) -> Any:
    if not isinstance(structure, dict):
        return "leaf" if isinstance(structure, int) else None
    names = {kind: sorted(part) if kind == "dict" else part for kind, part in structure.items() if kind in ("node", "keys", "dict")}
    return [sorted(structure), names, [_unnumbered(child) for child in _children(structure)]]


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """The pytree of a description with these leaves; a node of a type that JSON does not know comes back as a dict by its keys.

    >>> rebuild({"tuple": [{"dict": {"b": 0, "w": 1}}, 2]}, "xyz")
    ({'b': 'x', 'w': 'y'}, 'z')
    """
    match structure:
        case None:
            return None
        case int():
            return leaves[structure]
        case {"tuple": children}:
            return tuple(rebuild(child, leaves) for child in children)
        case {"list": children}:
            return [rebuild(child, leaves) for child in children]
        case {"dict": children}:
            return {key: rebuild(child, leaves) for key, child in children.items()}
        case {"keys": keys, "children": children}:
            return {key: rebuild(child, leaves) for key, child in zip(keys, children, strict=True)}
    raise AssertionError(structure)
