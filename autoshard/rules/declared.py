"""Rules that users declare for kernels whose bodies cannot be read: calls of foreign functions (FFI), and primitives of their own.

A rule is written as `([b, k g, q, d], [b, k, s, d])->([b, k g, q, d]) {g=4} need_replication={q}`: names of factors, several of one
dimension from major to minor, the sizes of those that are no dimension anywhere, and those that cannot be split. What is not in every
result, or in no operand, cannot be split either: a shard would have a part of a sum, or would not know its place.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import RuleError
from autoshard.ir import Factor, Rule, Value
from autoshard.ir.kernel import Kernel
from autoshard.rules.registry import assemble, rule

EXAMPLE = "'([b, h, q, d], [b, h, k, d])->([b, h, q, d]) need_replication={q}'"

Tensor = tuple[tuple[str, ...], ...]
Shape = Sequence[int]
Amount = float | Callable[..., float] | None
"""A number for the whole call, or a function that computes it from the shapes of the operands."""

_SIDES = r"^\((?P<operands>.*?)\)\s*->\s*\((?P<results>.*?)\)"
_TEXT = re.compile(_SIDES + r"\s*(\{(?P<sizes>[^}]*)\})?\s*(need_replication=\{(?P<whole>[^}]*)\})?$")


@dataclass(frozen=True, slots=True)
class Declared:
    """A rule for operands of any size.

    Attributes:
        operands, results: per tensor and dimension the names of its factors, from major to minor.
        sizes: of factors that are no whole dimension anywhere.
        whole: the names of factors that cannot be split.
        flops, nbytes: the work of a call.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    whole: frozenset[str] = frozenset()
    flops: Amount = None
    nbytes: Amount = None

    @classmethod
    def parse(cls, text: str, flops: Amount = None, nbytes: Amount = None) -> Declared:
        """The rule that is written so.

        Raises:
            RuleError: it is written otherwise, or a factor occurs twice in a tensor.
        """
        if not isinstance(text, str) or (match := _TEXT.match(text.strip())) is None:
            raise RuleError(f"a kernel's rule reads {EXAMPLE}, got {text!r}. Name the factors of each dimension of all arrays.")
        sides = [[_tensor(body) for body in re.findall(r"\[([^\]]*)\]", match[side])] for side in ("operands", "results")]
        for tensor in itertools.chain(*sides):
            names = [*itertools.chain(*tensor)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise RuleError(f"a factor occurs once in a tensor, and {twice!r} twice in {tensor} of {text!r}. Name them apart.")
        sizes = [entry.split("=") for entry in _words(match["sizes"])]
        if any(len(entry) != 2 or not entry[1].strip().isdigit() for entry in sizes):
            raise RuleError(f"sizes of factors read '{{g=4}}', got {match['sizes']!r} in {text!r}.")
        operands, results = map(tuple, sides)
        named = {name for tensor in (*operands, *results) for dim in tensor for name in dim}
        told = [*_words(match["whole"]), *(name.strip() for name, _ in sizes)]
        if unknown := next((name for name in told if name not in named), None):
            raise RuleError(f"sizes and need_replication of a kernel's rule name its factors, {sorted(named)}; got {unknown!r}. Use them.")
        everywhere = named.intersection(*({name for dim in tensor for name in dim} for tensor in results))
        free = everywhere & {name for tensor in operands for dim in tensor for name in dim}
        made = tuple((name.strip(), int(size)) for name, size in sizes)
        return cls(operands, results, made, frozenset(_words(match["whole"])) | (named - free), flops, nbytes)

    def rule(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        """The rule of a call on arrays of these shapes.

        Raises:
            RuleError: numbers, ranks or sizes of the arrays are others than the rule's.
        """
        shapes, tensors = (*operands, *results), (*self.operands, *self.results)
        if [len(operands), *map(len, shapes)] != [len(self.operands), *map(len, tensors)]:
            raise RuleError(
                f"a kernel's rule names the dimensions of all its arrays: it has {_ranks(tensors)}, and the call {_ranks(shapes)}. "
                "Name those of every operand and result, as [] for a scalar."
            )
        sizes = dict(self.sizes)
        for tensor, shape in zip(tensors, shapes, strict=True):
            sizes |= {dim[0]: n for dim, n in zip(tensor, shape, strict=True) if len(dim) == 1}
        for tensor, shape in zip(tensors, shapes, strict=True):
            found = tuple(math.prod(sizes.get(name, 0) for name in dim) for dim in tensor)
            if found != tuple(shape):
                raise RuleError(
                    f"the factors of a kernel's rule multiply to the sizes of its dimensions: {_text(tensor)} of {sizes} is {found}, and "
                    f"the array {tuple(shape)}. Give different factors to dimensions of different sizes, and sizes as in '{{g=4}}'."
                )
        kinds = {True: "need_replication", False: "pass_through"}
        factors = {name: Factor(size, kinds[name in self.whole]) for name, size in sizes.items()}
        made = [[tuple(factors[name] for name in dim) for dim in tensor] for tensor in tensors]
        return assemble(made[: len(operands)], made[len(operands) :])

    def kernel(self, operands: Sequence[Any], results: Sequence[Any]) -> Kernel:
        """The work of a call on arrays of these types; without a number an operation for each element, and each array moved once."""
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results))
        shapes = [x.shape for x in operands]
        flops, nbytes = (given(*shapes) if callable(given) else given for given in (self.flops, self.nbytes))
        elements = float(sum(math.prod(x.shape) for x in results))
        work = (0.0, elements) if flops is None else (float(flops), 0.0)
        return Kernel(*work, (operands or results)[0].dtype.name, float(moved if nbytes is None else nbytes))


DECLARED: dict[str, Declared] = {}
"""By the name of a foreign function, or of a primitive."""


def declared_of(name: str, params: Any) -> Declared | None:
    """The user's rule of an operation; None without one."""
    return DECLARED.get(params["target_name"] if name == "ffi_call" else name)


@rule("ffi_call")
def ffi_call(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule | None:
    """The rule that a user declared for the foreign function; None without one: it then reads whole arrays."""
    found = declared_of("ffi_call", params)
    return found and found.rule([v.shape for v in operands], [v.shape for v in results])


def _tensor(body: str) -> Tensor:
    return tuple(tuple(dim.split()) for dim in body.split(",")) if body.strip() else ()


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _ranks(tensors: Sequence[Sequence[Any]]) -> str:
    return ", ".join(str(len(tensor)) for tensor in tensors)


def _text(tensor: Tensor) -> str:
    return "[" + ", ".join(" ".join(dim) for dim in tensor) + "]"
