"""Corrections of predicted kernels by what a compiler made of them.

A kernel is known by its operation (primitive and rule), the shapes and types of its shards, and the seconds that are predicted for these:
those stand for what else decides a kernel, as which of its tensors are in memory. What was compiled is then exact, and what was not keeps
its prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autoshard.ir import Choice, Layout, Op, Rule, Value, computed_layout, local_shape, operand_layout

Values = Sequence[Value]

_SIZES = re.compile(r" ?\{[^{}]*=[^{}]*\}")
FIGURES = 4
"""Significant figures by which predicted seconds tell kernels apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Seconds that kernels take beyond prediction, of one execution on one device.

    Attributes:
        seconds: by the key of a kernel; below zero where it is faster.
        least: by the operation's part of the key, the least of these, and at most zero: a bound of all kernels of an operation.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        least: dict[str, float] = {}
        for key, seconds in self.seconds.items():
            operation = key.partition(" of ")[0]
            least[operation] = min(least.get(operation, 0.0), seconds)
        object.__setattr__(self, "least", least)

    def __bool__(self) -> bool:
        return bool(self.seconds)

    def corrected(self, op: Op, rule: Rule | None, values: Values, choice: Choice, sizes: tuple[int, ...], seconds: float) -> float:
        """The seconds of a kernel, of those that are predicted; other arguments are those of `kernel_key`."""
        if operation_key(op, rule) not in self.least:
            return seconds
        return max(seconds + self.seconds.get(kernel_key(op, rule, values, choice, sizes, seconds), 0.0), 0.0)

    def bounded(self, op: Op, rule: Rule | None, seconds: float) -> float:
        """A lower bound of a kernel's seconds under any choice, of one of those that are predicted."""
        return max(seconds + self.least.get(operation_key(op, rule), 0.0), 0.0) if self.least else seconds

    def merged(self, others: Iterable[Corrections]) -> Corrections:
        """These and others; of what several know the latest."""
        others = [each for each in others if each]
        if not others:
            return self
        return Corrections(dict(self.seconds) | {key: seconds for other in others for key, seconds in other.seconds.items()})


NO_CORRECTIONS = Corrections()


def operation_key(op: Op, rule: Rule | None) -> str:
    """The operation's part of a kernel's key: its primitive and its rule, which has what parameters mean."""
    return f"{op.primitive} {'' if rule is None else _notation(rule)}"


@lru_cache(maxsize=4096)
def _notation(rule: Rule) -> str:
    """A rule without the sizes of its factors, which are those of whole tensors."""
    return _SIZES.sub("", str(rule))


def kernel_key(op: Op, rule: Rule | None, values: Values, choice: Choice, sizes: tuple[int, ...], seconds: float) -> str:
    """The key of a kernel.

    Args:
        op, rule, values: the operation, its rule, and the values of its program by their numbers.
        choice: how it is sharded.
        sizes: of the mesh's axes.
        seconds: predicted for one execution, before any correction.
    """
    whole = (-1,) * len(sizes)

    def shard(value: int, layout: Layout) -> str:
        tensor = values[value]
        return f"{tensor.dtype}[{','.join(f'{size:g}' for size in local_shape(tensor.shape, layout, sizes))}]"

    read = [shard(v, whole if rule is None else operand_layout(rule, choice, k)) for k, v in enumerate(op.operands)]
    made = [shard(v, whole if rule is None else computed_layout(rule, choice, k)) for k, v in enumerate(op.results)]
    return f"{operation_key(op, rule)} of {' '.join(read)} -> {' '.join(made)} in {seconds:.{FIGURES}g}"
