"""Attention as a program has it against the kernel that takes its place, in numbers, at a reduced size.

The program's own operations are evaluated in float64 at the first positions of queries and keys, and for few examples, heads and elements
of these, as they are for its recognition (`values`). The kernel computes the same queries, keys, values and cotangents in float32, in
interpret mode: output and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.rewrite.attention_kernels import Implementation, Problem
from autoshard.rewrite.attention_match import Attention, attentions
from autoshard.rewrite.attention_program import words_of
from autoshard.rewrite.attention_roles import Operand, Roles
from autoshard.rewrite.dimensions import Dimension
from autoshard.rewrite.scopes import program
from autoshard.rewrite.values import RANK
from autoshard.rewrite.wiring import Wiring
from autoshard.trace import Traced

LENGTHS = (1024, 512, 256, 128)  # positions of queries and keys: as few as reach the ends of windows, and blocks of kernels divide
FEW = 2  # examples and heads
ELEMENTS = 4  # of a head that are not zero
MOST = 1 << 27  # numbers that are multiplied


@dataclass(frozen=True, slots=True)
class Compared:
    """One attention and its kernel.

    Attributes:
        place: where it is, in words.
        sizes: what was compared, in words.
        forward, backward: the largest difference of outputs and of gradients, of the largest element; None where there are none.
        missing: why nothing was compared; empty where it was.
    """

    place: str
    sizes: str = ""
    forward: float | None = None
    backward: float | None = None
    missing: str = ""


def compared(traced: Traced, implementation: Implementation) -> list[Compared]:
    """The attention of a program against a kernel, those that are alike once."""
    wiring = Wiring.of(root := program(traced.jaxpr))
    found: dict[tuple, Compared] = {}
    for attention in attentions(root, wiring):
        if not isinstance(attention, Attention):
            continue
        roles = Roles.of(wiring, attention)
        key = words_of(attention), roles.problem
        if not implementation.missing(roles.problem) and key not in found:
            try:
                found[key] = _Reduced(attention, roles, implementation).compared(key[0])
            except NotImplementedError as error:
                found[key] = Compared(key[0], missing=str(error))
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Reduced:
    """One attention at a reduced size."""

    attention: Attention
    roles: Roles
    implementation: Implementation

    def compared(self, place: str) -> Compared:
        whole = self.roles.problem
        samples = self._samples()
        places = [*(samples.get(d.size, ()) for dims in self._dims(("query", "key", "width")) for d in dims), *self._few(samples)]
        if math.prod(map(len, places)) > MOST:
            return Compared(place, missing="its examples or heads are as many as its positions, and all of these are too many to compare")
        self.attention.reading.begin(self.attention.reading.data, samples)
        inputs = [self._operand(each, own) for each, own in zip((self.roles.q, self.roles.k, self.roles.v), OPERANDS, strict=True)]
        problem = self._problem(inputs)
        found = self._kernel(problem, inputs)
        wanted = [self.roles.output if self.attention.output is not None else None, *self.roles.gradients]
        errors = [
            _error(made, self._operand(each, own)) if each is not None and made is not None else None
            for made, each, own in zip(found, wanted, (RESULT, *OPERANDS), strict=True)
        ]
        behind = [error for error in errors[1:] if error is not None]
        sizes = f"{problem.query:,} of {whole.query:,} queries, {problem.key:,} of {whole.key:,} keys, "
        sizes += f"{math.prod(problem.batch) * problem.group:,} of {math.prod(whole.batch) * whole.group:,} heads of all examples"
        if any(end is not None and abs(end) >= problem.query for end in (whole.lowest, whole.highest)):
            sizes += "; the window is longer"
        return Compared(place, sizes, errors[0], max(behind, default=None))

    def _dims(self, names: Sequence[str]) -> list[tuple[Dimension, ...]]:
        return [self.roles.dimensions[name] for name in names]

    def _few(self, samples: dict[int, np.ndarray]) -> list[np.ndarray]:
        return [samples[d.size] for d in (*self.roles.batch, *self.roles.dimensions["group"])]

    def _samples(self) -> dict[int, np.ndarray]:
        """The places of dimensions, by their sizes: the first positions, and few of all others."""
        others = (*self.roles.batch, *self.roles.dimensions["group"])
        of = {d.size: np.unique(np.linspace(0, d.size - 1, FEW).astype(np.int64)) for d in others}
        for dims in self._dims(("width", "value_width")):
            of |= {d.size: np.arange(min(d.size, ELEMENTS)) for d in dims}
        mask, lengths = self.roles.problem, self._dims(("query", "key"))
        ends = [abs(end) for end in (mask.lowest, mask.highest) if end is not None]
        for dims in lengths:
            size = math.prod(d.size for d in dims)
            fitting = [n for n in LENGTHS if n <= size and size % 128 == 0] or [size]
            wanted = [n for n in fitting if n > max(ends, default=0) and n >= 256]
            most = min(wanted, default=min(fitting, key=lambda n: abs(n - 256)))
            *outer, last = dims
            of |= {d.size: np.arange(min(d.size, max(1, most // last.size))) for d in outer}
            of[last.size] = np.arange(min(last.size, most))
        return of

    def _operand(self, operand: Operand, own: Sequence[str]) -> np.ndarray:
        """The values of a variable in the kernel's layout, of the elements of heads that are not zero."""
        reading, groups = self.attention.reading, [*((d,) for d in self.roles.batch), *self._dims(own)]
        x, axes = reading.at(operand), [reading.axes(dims) for dims in groups]
        shape = list(x.shape)
        for dims, along in zip(groups, axes, strict=True):
            for d, axis in zip(dims, along, strict=True):
                shape[axis] = len(reading.values.places(d.size))
        x = np.broadcast_to(x, shape)
        order = [axis for along in axes for axis in along]
        x = x.transpose([*order, *(axis for axis in range(RANK) if axis not in order)])
        return x.reshape([math.prod(shape[axis] for axis in along) for along in axes])

    def _problem(self, inputs: Sequence[np.ndarray]) -> Problem:
        q, k, _ = inputs
        whole, n = self.roles.problem, len(self.roles.batch)
        segments = tuple(tuple(x.shape) for x in self._segments())
        sizes: dict[str, Any] = {"batch": q.shape[:n], "group": q.shape[n], "query": q.shape[n + 1], "key": k.shape[n]}
        return replace(whole, **sizes, dtype="float32", segments=segments)

    def _segments(self) -> list[np.ndarray]:
        found, reading = [], self.attention.reading
        for (var, labels, nonzero), name in zip(self.roles.segments, self.roles.segmented, strict=True):
            x = self._operand((var, labels), (name,))
            x = x if nonzero is None else (x != 0) == nonzero
            has = {axis for axis in range(RANK) if reading.at((var, labels)).shape[axis] != 1}
            index = tuple(slice(None) if reading.axis(d) in has else slice(1) for d in self.roles.batch)
            found.append(x[index].astype(np.int32))
        return found

    def _kernel(self, problem: Problem, inputs: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The kernel's output and gradients; no gradients where the program has none."""
        implementation, scale = self.implementation, self.roles.scale
        q, k, v = (_wide(x, width) for x, width in zip(inputs, (problem.width, problem.width, problem.value_width), strict=True))
        segments = list(map(jnp.asarray, self._segments()))
        attend = implementation.function(problem, True)

        def scaled(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q if implementation.scales else q * np.float32(scale), k, v, *segments)

        if not any(self.attention.gradients):
            made, found = jax.jit(scaled)(q, k, v), []
        else:
            cotangent = _wide(self._operand(self.roles.cotangent, RESULT), problem.value_width)
            made, found = jax.jit(_with_gradients(scaled))(cotangent, q, k, v)
        return [np.asarray(x, np.float64) for x in (made, *found)] + [None] * (3 - len(found))


OPERANDS = (("group", "query", "width"), ("key", "width"), ("key", "value_width"))
RESULT = ("group", "query", "value_width")


def _with_gradients(function: Callable) -> Callable:
    """The function with its gradients, of the result's cotangent and its arguments."""

    def called(cotangent: jax.Array, *args: jax.Array) -> tuple[Any, tuple]:
        made, pull = jax.vjp(function, *args)
        return made, pull(cotangent)

    return called


def _wide(x: np.ndarray, width: int) -> jax.Array:
    """An operand in float32, with heads of their whole width, of zeros beyond the elements that there are."""
    return jnp.asarray(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]), jnp.float32)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, of the largest element; infinite where something is no number."""
    found = found[..., : wanted.shape[-1]]
    error = float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-300))
    return error if math.isfinite(error) else math.inf
