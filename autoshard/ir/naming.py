"""What a program's values are called where people read of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from autoshard.errors import ShardingError
from autoshard.ir.graph import Graph, Op
from autoshard.primitives import moves

_INDEX = re.compile(r"(?<=\[)\d+(?=\])")


class Names:
    """The names of a graph's values: an argument goes by its path, any other by the op that makes it."""

    def __init__(self, graph: Graph):
        self._values = graph.values
        self._paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
        self._constants = frozenset((*graph.constants, *graph.literals))
        self._makers: dict[int, Op] = {}
        self._entering: dict[int, tuple[Op, int, int]] = {}  # a value inside a body: the op, what is read into it, its leading dimensions
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
        """Whether the value is made on the way back."""
        while value in self._entering:
            value = self._entering[value][1]
        op = self._makers.get(value)
        return op is not None and is_backward(op)

    def name(self, value: int) -> str:
        """``state['params']['w']``, ``transpose of state['params']['w']``, ``a slice of xs``, ``the result of dot_general``."""
        if value in self._paths:
            return self._paths[value]
        if value in self._constants:
            return "a constant"
        if value in self._entering:
            op, source, shift = self._entering[value]
            return f"{'a slice of ' if shift else ''}{self.name(source)}" if self._is_argument(source) else f"what enters {op.primitive}"
        op = self._makers.get(value)
        if op is None:
            return "a value"
        if moves(op.primitive) and self._is_argument(op.operands[0]):
            return f"{op.primitive} of {self.name(op.operands[0])}"
        return f"the result of {op.primitive}"

    def _is_argument(self, value: int) -> bool:
        """Whether the value is an argument, or no more than one moved or sliced."""
        while value not in self._paths:
            op = self._makers.get(value)
            if value in self._entering:
                value = self._entering[value][1]
            elif op is not None and moves(op.primitive):
                value = op.operands[0]
            else:
                return False
        return True

    def tensor(self, value: int) -> str:
        """The name with dtype and shape: ``state['params']['w'] float32[8,16]``."""
        return f"{self.name(value)} {array_type(self._values[value].dtype, self._values[value].shape)}"


def array_type(dtype: str, shape: Sequence[int]) -> str:
    """The type of an array as JAX writes it.

    >>> array_type("float32", (8, 16))
    'float32[8,16]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def pattern(path: str) -> str:
    """The path with a star for every index, equal for the layers of a stack.

    >>> pattern("state['layers'][3]['w']")
    "state['layers'][*]['w']"
    """
    return _INDEX.sub("*", path)


def matching(pattern: str, paths: Sequence[str]) -> list[int]:
    """Positions of the paths a pattern matches, at least one; only ``*`` and ``?`` are wild, since paths have brackets.

    >>> matching("state*", ["state['w']", "batch"])
    [0]

    Raises:
        ShardingError: it matches none; names the nearest.
    """
    if pattern in paths:
        return [paths.index(pattern)]
    wild = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."))
    matches = [position for position, path in enumerate(paths) if wild.fullmatch(path)]
    if not matches:
        near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
        raise ShardingError(
            f"a sharding is given by argument path or a pattern of paths, and {pattern!r} matches none of {len(paths)}. "
            f"Near ones: {', '.join(near)}."
        )
    return matches


def is_backward(op: Op) -> bool:
    """Whether the op computes a gradient: JAX writes so on the names of what it transposes; what it only computes again is none."""
    return "transpose(" in op.origin.name_stack and "rematted_computation" not in op.origin.name_stack
