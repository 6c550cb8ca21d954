"""Rules that users declare for kernels whose bodies cannot be read: calls of foreign functions (FFI), and primitives of their own.

A rule is written as `([b, k g, q, d], [b, k, s, d])->([b, k g, q, d]) {g=4} need_replication={q}`: names of factors, several of one
dimension from major to minor, the sizes of those that are no dimension anywhere, those over which parts of the results are added up
(`reduction={s}`), and those that cannot be split. What is in some results or in no operand cannot be split, nor what is in no result and no
reduction: a shard would not know its place, or would have a part of something.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import RuleError
from autoshard.ir import Factor, Rule, Value
from autoshard.ir.kernel import Kernel
from autoshard.rules.registry import assemble, reduced, rule

EXAMPLE = "'([b, h, q, d], [b, h, k, d])->([b, h, q, d]) need_replication={q}'"

Tensor = tuple[tuple[str, ...], ...]
Shape = Sequence[int]
Amount = float | Callable[..., float] | None
"""A number for the whole call, or a function that computes it from the shapes of the operands."""

_TENSORS = r"\(\s*((?:\[[^\[\]()]*\]\s*,?\s*)*)\)"
_SETS = r"\s*(?:\{(?P<sizes>[^{}]*)\})?\s*(?:reduction=\{(?P<summed>[^{}]*)\})?\s*(?:need_replication=\{(?P<whole>[^{}]*)\})?"
_TEXT = re.compile(rf"{_TENSORS}\s*->\s*{_TENSORS}{_SETS}")


@dataclass(frozen=True, slots=True)
class Declared:
    """A rule for operands of any size.

    Attributes:
        operands, results: per tensor and dimension the names of its factors, from major to minor.
        sizes: of factors that are no whole dimension anywhere.
        whole: the names of factors that cannot be split.
        summed: those along which the parts of the results are added up.
        flops, nbytes: the work of a call.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    whole: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    flops: Amount = None
    nbytes: Amount = None

    @classmethod
    def parse(cls, text: str, flops: Amount = None, nbytes: Amount = None) -> Declared:
        """The rule that is written so.

        Raises:
            RuleError: it is written otherwise, a factor occurs twice in a tensor, or the work is no number and no function.
        """
        if not isinstance(text, str) or (match := _TEXT.fullmatch(text.strip())) is None:
            raise RuleError(f"a kernel's rule reads {EXAMPLE}, got {text!r}. Name the factors of each dimension of all arrays.")
        operands, results = (tuple(_tensor(body) for body in re.findall(r"\[([^\]]*)\]", side)) for side in match.group(1, 2))
        for tensor in (*operands, *results):
            names = [*itertools.chain(*tensor)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise RuleError(f"a factor occurs once in a tensor, and {twice!r} twice in {_text(tensor)} of {text!r}. Name them apart.")
        entries = [entry.split("=") for entry in _words(match["sizes"])]
        if any(len(entry) != 2 or not entry[1].strip().isdigit() or not int(entry[1]) for entry in entries):
            raise RuleError(f"sizes of factors read '{{g=4}}', got {match['sizes']!r} in {text!r}. Write a name and a number for each.")
        sizes = tuple((name.strip(), int(size)) for name, size in entries)
        named = {name for tensor in (*operands, *results) for dim in tensor for name in dim}
        told = [*_words(match["whole"]), *_words(match["summed"]), *(name for name, _ in sizes)]
        if unknown := next((name for name in told if name not in named), None):
            raise RuleError(
                f"sizes, reduction and need_replication of a kernel's rule name its factors, {sorted(named)}; got {unknown!r}. Use them."
            )
        made = {name for tensor in results for dim in tensor for name in dim}
        if kept := next((name for name in _words(match["summed"]) if name in made), None):
            raise RuleError(f"a reduction is over factors that no result has, and {kept!r} is in one of {text!r}. Leave it out there.")
        for name, amount in (("flops", flops), ("bytes", nbytes)):
            if amount is not None and not callable(amount) and (not isinstance(amount, int | float) or amount < 0):
                raise RuleError(f"{name} of a kernel is a number of at least 0, or a function of the operands' shapes; got {amount!r}.")
        everywhere = named.intersection(*({name for dim in tensor for name in dim} for tensor in results))
        free = everywhere & {name for tensor in operands for dim in tensor for name in dim}
        whole, summed = frozenset(_words(match["whole"])), frozenset(_words(match["summed"]))
        return cls(operands, results, sizes, whole | (named - free - summed), summed - whole, flops, nbytes)

    def rule(
        self,
        operands: Sequence[Shape],
        results: Sequence[Shape],
        dtype: str = "float32",
        names: Sequence[str] = (),
        many: bool = False,
    ) -> Rule:
        """The rule of a call on arrays of these shapes.

        Args:
            dtype: of the first result.
            many: whether arrays may have dimensions in front of those that are named, of independent calls.
            names: of the operands, for errors.

        Raises:
            RuleError: numbers, ranks or sizes of the arrays are others than the rule's.
        """
        for what, mine, given in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(mine) != len(given):
                raise RuleError(
                    f"a kernel's rule names the dimensions of all its arrays: it has {len(mine)} {what}s, and the call {len(given)}. "
                    f"Write [...] for each array, [] for a scalar: {self}."
                )
        each = [*zip(_arrays("operand", operands, names), self.operands, operands, strict=True)]
        each += zip(_arrays("result", results), self.results, results, strict=True)
        front = {len(shape) - len(tensor) for _, tensor, shape in each}
        if len(front) > 1 or min(front, default=0) < 0 or (any(front) and not many):
            name, tensor, shape = next(x for x in each if len(x[1]) != len(x[2]))
            raise RuleError(
                f"a kernel's rule names the dimensions of all its arrays: {name} is {_text(tensor)} in {self}, and has the shape "
                f"{tuple(shape)}. Name its {len(shape)} dimensions."
            )
        n, sizes = front.pop() if front else 0, dict(self.sizes)
        for _, tensor, shape in each:
            sizes |= {dim[0]: size for dim, size in zip(tensor, shape[n:], strict=True) if len(dim) == 1}
        for name, tensor, shape in each:
            found = tuple(math.prod(sizes.get(name, 0) for name in dim) for dim in tensor)
            if found != tuple(shape[n:]):
                raise RuleError(
                    f"the factors of a kernel's rule multiply to the sizes of its dimensions: {_text(tensor)} of {sizes} is {found}, and "
                    f"{name} {tuple(shape)}. Give different factors to dimensions of different sizes, and sizes as in '{{g=4}}'."
                )
        added = {name: reduced(size, "sum", dtype) for name, size in sizes.items() if name in self.summed}
        kinds = {True: "need_replication", False: "pass_through"}
        factors = {name: Factor(size, kinds[name in self.whole]) for name, size in sizes.items()} | added
        before = [Factor(max(size)) for size in zip(*(shape[:n] for *_, shape in each), strict=True)]
        made = []
        for _, tensor, shape in each:
            calls = [factor if size == factor.size else () for factor, size in zip(before, shape, strict=False)]
            made.append([*calls, *(tuple(factors[name] for name in dim) for dim in tensor)])
        return assemble(made[: len(operands)], made[len(operands) :])

    def names(self, rule: Rule) -> dict[int, str]:
        """The names of the factors of a rule of these operands, by number."""
        found: dict[int, str] = {}
        for numbers, tensor in zip((*rule.results, *rule.operands), (*self.results, *self.operands), strict=True):
            for dim, written in zip(reversed(numbers), reversed(tensor), strict=False):
                found |= zip(dim, written, strict=True) if len(dim) == len(written) else ()
        return found

    def mapped(self, size: int, operands: Sequence[bool]) -> Declared:
        """The rule of so many independent calls, which these operands have along a first dimension, and all results."""
        name = next(name for k in itertools.count() if (name := f"call{k}") not in {x for t in self.results for dim in t for x in dim})

        def amount(given: Amount) -> Amount:
            if not callable(given):
                return given and given * size
            return lambda *shapes: size * given(*(shape[on:] for shape, on in zip(shapes, operands, strict=True)))

        read = tuple(((name,), *tensor) if on else tensor for tensor, on in zip(self.operands, operands, strict=True))
        made = tuple(((name,), *tensor) for tensor in self.results)
        whole = self.whole if any(operands) else self.whole | {name}
        return replace(self, operands=read, results=made, whole=whole, flops=amount(self.flops), nbytes=amount(self.nbytes))

    def kernel(self, operands: Sequence[Any], results: Sequence[Any]) -> Kernel:
        """The work of a call on arrays of these types; without a number an operation for each element, and each array moved once."""
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results))
        n = max(0, len(results[0].shape) - len(self.results[0])) if results and self.results else 0
        calls, shapes = math.prod(results[0].shape[:n]) if n else 1, [x.shape[n:] for x in operands]
        flops, nbytes = (_computed(name, given, shapes) for name, given in (("flops", self.flops), ("bytes", self.nbytes)))
        elements = float(sum(math.prod(x.shape) for x in results))
        work = (0.0, elements) if flops is None else (calls * flops, 0.0)
        return Kernel(*work, (operands or results)[0].dtype.name, float(moved) if nbytes is None else calls * nbytes)

    def __str__(self) -> str:
        sides = (f"({', '.join(map(_text, side))})" for side in (self.operands, self.results))
        return "->".join(sides)


def _computed(name: str, given: Amount, shapes: Sequence[Shape]) -> float | None:
    """The number of a call."""
    if not callable(given):
        return None if given is None else float(given)
    try:
        return float(given(*shapes))
    except Exception as error:  # the user's own function may raise anything
        raise RuleError(
            f"{name} of a kernel is a number, or a function of the shapes of its {len(shapes)} operands; got {given!r:.60}, which raised "
            f"{type(error).__name__}: {error}. Make it take {', '.join(map(str, map(tuple, shapes)))}."
        ) from error


def _arrays(what: str, shapes: Sequence[Shape], names: Sequence[str] = ()) -> list[str]:
    return [f"{what} {k}" + (f" ({names[k]})" if k < len(names) else "") for k in range(len(shapes))]


MANY = {"broadcast_all", "expand_dims", "legacy_vectorized"}
"""How a foreign function is called under `jax.vmap` with all calls at once, along a first dimension."""

DECLARED: dict[str, Declared] = {}
"""By the name of a foreign function, or of a primitive."""


def declared_of(name: str, params: Any) -> Declared | None:
    """The user's rule of an operation; None without one."""
    return DECLARED.get(params["target_name"] if name == "ffi_call" else name)


@rule("ffi_call")
def ffi_call(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule | None:
    """The rule that a user declared for the foreign function; None without one: it then reads whole arrays."""
    found = declared_of("ffi_call", params)
    if found is None:
        return None
    read, made = ([v.shape for v in side] for side in (operands, results))
    return found.rule(read, made, results[0].dtype if results else "float32", many=params.get("vmap_method") in MANY)


def _tensor(body: str) -> Tensor:
    return tuple(tuple(dim.split()) for dim in body.split(",")) if body.strip() else ()


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _text(tensor: Tensor) -> str:
    return "[" + ", ".join(" ".join(dim) for dim in tensor) + "]"
