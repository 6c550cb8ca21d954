"""Readable names of a program's values, and patterns of argument paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache

from autoshard.errors import ShardingError
from autoshard.ir.attribution import MovedValue
from autoshard.ir.graph import Graph, Op
from autoshard.ir.words import value_name, value_words
from autoshard.primitives import moves as is_moved

_INDEX = re.compile(r"(?<=\[)\d+(?=\])")
_NUMBER = re.compile(r"(?<=[\[_.'/\-])(\d+)(?=\W|_|$)")
_PART = re.compile(r"[^\[\]'\"./]+")
NEAR = 3  # names that are suggested
OP_SCOPE = "op="
"""The innermost scope of each operation of a lowered program, before its number in the graph: compiled kernels are attributed by it."""
RARELY = "autoshard_rarely"
"""The scope of a loop that has a trip only where something unusual happens: it is planned, and verified, as if it had none."""
_COMPONENT = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def runs_rarely(scopes: str) -> bool:
    """Whether a loop of these scopes, as JAX and compilers name operations, is planned as if it had no trip.

    >>> runs_rarely("jit(step)/autoshard_rarely/while"), runs_rarely("jit(step)/while")
    (True, False)
    """
    return RARELY in scopes


class Names:
    """The names of a graph's values: an argument's is its path, any other value's comes from the op that makes it."""

    def __init__(self, graph: Graph):
        self._values = graph.values
        self._paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
        self._constants = frozenset((*graph.constants, *graph.literals))
        self._makers: dict[int, Op] = {}
        self._entering: dict[int, tuple[Op, int, int]] = {}  # a body's input: the op, the value read into it, the shift of its dimensions
        for op in graph.walk():
            self._makers.update((value, op) for value in op.results)
            for holder in op.holders:
                outside = next((flow for flow in holder.sources if not flow.inside), None)
                for value in (holder.value, *holder.views):
                    if value not in op.results and outside is not None and value != outside.value:
                        self._entering.setdefault(value, (op, outside.value, outside.shift))

    def maker(self, value: int) -> Op | None:
        """The op that makes the value, or whose body it enters; None for arguments and constants."""
        entered = self._entering.get(value)
        return entered[0] if entered is not None else self._makers.get(value)

    def is_gradient(self, value: int) -> bool:
        """Whether the backward pass computes the value."""
        while value in self._entering:
            value = self._entering[value][1]
        op = self._makers.get(value)
        return op is not None and is_backward(op)

    def moved(self, value: int) -> MovedValue:
        """The value as data: as the argument that it is or is rearranged or sliced from; else as the result of an op."""
        kind, name, moves = self._known_by(value)
        return MovedValue(kind, name, self._values[value].dtype, self._values[value].shape, moves)

    def name(self, value: int) -> str:
        """``state['params']['w']``, ``transpose of state['params']['w']``, ``a slice of xs``, ``the result of dot_general``."""
        return value_name(self.moved(value))

    def tensor(self, value: int) -> str:
        """The name with dtype and shape: ``state['params']['w'] float32[8,16]``."""
        return value_words(self.moved(value))

    def _known_by(self, value: int) -> tuple[str, str, tuple[str, ...]]:
        """Kind, name and moves of a `MovedValue`."""
        if value in self._paths:
            return "argument", self._paths[value], ()
        if value in self._constants:
            return "constant", "", ()
        if value in self._entering:
            op, source, shift = self._entering[value]
            kind, name, moves = self._known_by(source)
            return (kind, name, ("scan", *moves) if shift else moves) if kind == "argument" else ("entering", op.primitive, ())
        op = self._makers.get(value)
        if op is None:
            return "unknown", "", ()
        if is_moved(op.primitive):
            kind, name, moves = self._known_by(op.operands[0])
            if kind == "argument":
                return kind, name, (op.primitive, *moves)
        return "result", op.primitive, ()


def pattern(path: str) -> str:
    """The path with a star for every index, equal for the layers of a stack.

    >>> pattern("state['layers'][3]['w']")
    "state['layers'][*]['w']"
    """
    return _INDEX.sub("*", path)


def starred(path: str) -> str:
    """The path with a star for every number in it, those in names included.

    >>> starred("state.layers_3['w'][0]")
    "state.layers_*['w'][*]"
    """
    return _NUMBER.sub("*", path)


def numbered(path: str) -> list[str]:
    """The path split at its numbers, which are at the odd positions.

    >>> numbered("state.layers_3['w']")
    ['state.layers_', '3', "['w']"]
    """
    return _NUMBER.split(path)


@lru_cache(maxsize=4096)
def components(path: str) -> tuple[str, ...]:
    """The attributes, keys and indices of a path.

    >>> components("state.params['w'][0]")
    ('state', 'params', "['w']", '[0]')
    """
    return tuple(_COMPONENT.findall(path))


def itemsize(dtype: str) -> float:
    """Bytes per element of a dtype, by its name; typed keys have two words, or four.

    >>> itemsize("bfloat16"), itemsize("int4"), itemsize("bool"), itemsize("key<fry>")
    (2.0, 0.5, 1.0, 8.0)
    """
    if dtype.startswith("key<"):
        return 16.0 if "rbg" in dtype else 8.0
    bits = re.match(r"[a-z_]+?(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 1.0


def matching(pattern: str, paths: Sequence[str]) -> list[int]:
    """Positions of the paths that match a pattern, at least one; ``*`` and ``?`` alone are wildcards, since paths have brackets.

    >>> matching("state*", ["state['w']", "batch"])
    [0]

    Raises:
        ShardingError: no path matches; the message has the nearest.
    """
    matches = matches_of(pattern, paths)
    if not matches:
        raise ShardingError(
            f"a sharding is given by argument path or a pattern of paths, and {pattern!r} matches none of {len(paths)}. "
            f"{near_words(pattern, paths)}"
        )
    return matches


def parts(path: str) -> tuple[str, ...]:
    """The components of a path without brackets and quotes.

    >>> parts("state['layers'][0]['up']"), parts("layers/*/up")
    (('state', 'layers', '0', 'up'), ('layers', '*', 'up'))
    """
    return tuple(_PART.findall(path))


def near_words(name: str, paths: Iterable[str], group: Callable[[str], str] = str) -> str:
    """A sentence with the paths that look like a name, or that end like it; where none does, with the first ones as examples.

    Args:
        group: what is told of a path: the path itself, or the pattern of several.

    >>> near_words("layer/upp", ["state['layers'][0]['up']", "state['norm']"]), near_words("kernel", ["w", "b"])
    ("Near ones: state['layers'][0]['up'].", 'There are w, b.')
    >>> near_words("Dense_0", ["params['Dense_0']['kernel']", "x"])
    "The pattern '*Dense_0*' matches params['Dense_0']['kernel']."
    """
    paths = list(paths)
    if within := [path for path in paths if name and name in path]:
        told = list(dict.fromkeys(map(group, within)))
        more = f" and {len(told) - NEAR} more" if len(told) > NEAR else ""
        return f"The pattern '*{name}*' matches {', '.join(told[:NEAR])}{more}."
    ends: dict[str, str] = {}
    for path in paths:
        for at in range(len(parts(path))):
            ends.setdefault("/".join(parts(path)[at:]), path)  # of a parameter and its moments the parameter, which comes first
    near = [ends[end] for end in get_close_matches("/".join(parts(name)), ends, n=3 * NEAR)]
    told = list(dict.fromkeys(map(group, near or paths)))
    more = " and others" if len(told) > NEAR and not near else ""
    return f"{'Near ones:' if near else 'There are'} {', '.join(told[:NEAR])}{more}."


def matches_of(pattern: str, paths: Sequence[str]) -> list[int]:
    """Positions of the paths that match a pattern, as for `matching`; none if no path does."""
    if pattern in paths:
        return [paths.index(pattern)]
    wild = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."))
    return [position for position, path in enumerate(paths) if wild.fullmatch(path)]


def is_backward(op: Op) -> bool:
    """Whether the op is of the backward pass: JAX marks the names of transposed ops; ops that a checkpoint recomputes are not."""
    return "transpose(" in op.origin.name_stack and "rematted_computation" not in op.origin.name_stack
