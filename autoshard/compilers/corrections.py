"""Corrections of predicted kernels by what a compiler made of them.

A kernel is known by its operation (primitive and rule), the shapes and types of its shards, and the seconds that are predicted for these:
those stand for what else decides a kernel, as which of its tensors are in memory. What was compiled is then exact, and what was not keeps
its prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoshard.ir import Choice, Layout, Op, Rule, Value, computed_layout, local_shape, operand_layout
from autoshard.primitives import is_matrix

Values = Sequence[Value]

_SIZES = re.compile(r" ?\{[^{}]*=[^{}]*\}")
FIGURES = 4
"""Significant figures by which predicted seconds tell kernels apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Seconds that kernels take beyond prediction, of one execution on one device.

    What was not compiled keeps its prediction: a search that is compiled again and again then looks where nobody knows better. One that is
    not would be led to whatever is unknown, and so `generalises`.

    Attributes:
        seconds: by the key of a kernel; below zero where it is faster.
        generalises: whether a product's other kernels are slower or faster than predicted as those are, together, that are known and are
            predicted to take between half and twice as long. Kernels of other operations differ by what else they compute.
        least: by the operation's part of the key, the least of the seconds, and at most zero.
        products: by the same, of products the seconds of each kernel, predicted and compiled.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    generalises: bool = False
    least: Mapping[str, float] = field(init=False)
    products: Mapping[str, list[tuple[float, float]]] = field(init=False)

    def __post_init__(self) -> None:
        least: dict[str, float] = {}
        products: dict[str, list[tuple[float, float]]] = {}
        for key, seconds in self.seconds.items():
            operation, predicted = key.partition(" of ")[0], _predicted(key)
            least[operation] = min(least.get(operation, 0.0), seconds)
            if predicted and is_matrix(operation.partition(" ")[0]):
                products.setdefault(operation, []).append((predicted, max(predicted + seconds, 0.0)))
        object.__setattr__(self, "least", least)
        object.__setattr__(self, "products", products)

    def __bool__(self) -> bool:
        return bool(self.seconds)

    def corrected(self, op: Op, rule: Rule | None, values: Values, choice: Choice, sizes: tuple[int, ...], seconds: float) -> float:
        """The seconds of a kernel, of those that are predicted; other arguments are those of `kernel_key`."""
        if (operation := operation_key(op, rule)) not in self.least:
            return seconds
        more = self.seconds.get(kernel_key(op, rule, values, choice, sizes, seconds))
        if more is not None:
            return max(seconds + more, 0.0)
        near = [each for each in self._general(operation) if seconds <= 2 * each[0] and each[0] <= 2 * seconds]
        return seconds * sum(taken for _, taken in near) / sum(predicted for predicted, _ in near) if near else seconds

    def bounded(self, op: Op, rule: Rule | None, seconds: float) -> float:
        """A lower bound of a kernel's seconds under any choice, of one of those that are predicted."""
        if (operation := operation_key(op, rule)) not in self.least:
            return seconds
        ratio = min((taken / predicted for predicted, taken in self._general(operation)), default=1.0)
        return max(min(seconds + self.least[operation], seconds * min(ratio, 1.0)), 0.0)

    def _general(self, operation: str) -> list[tuple[float, float]]:
        """The kernels by which others of an operation are predicted."""
        return self.products.get(operation, []) if self.generalises else []

    def merged(self, others: Iterable[Corrections]) -> Corrections:
        """These and others; of what several know the latest."""
        others = [each for each in others if each]
        if not others:
            return self
        latest = dict(self.seconds) | {key: seconds for other in others for key, seconds in other.seconds.items()}
        return replace(self, seconds=latest)


NO_CORRECTIONS = Corrections()


def operation_key(op: Op, rule: Rule | None) -> str:
    """The operation's part of a kernel's key: its primitive and its rule, which has what parameters mean."""
    return f"{op.primitive} {'' if rule is None else _notation(rule)}"


@lru_cache(maxsize=4096)
def _notation(rule: Rule) -> str:
    """A rule without the sizes of its factors, which are those of whole tensors."""
    return _SIZES.sub("", str(rule))


def _predicted(key: str) -> float:
    """The predicted seconds of a kernel, of its key; 0.0 where it has none."""
    try:
        return float(key.rpartition(" in ")[2])
    except ValueError:
        return 0.0


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
