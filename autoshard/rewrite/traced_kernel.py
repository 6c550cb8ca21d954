"""A kernel traced for one problem: a program for the forward pass, which keeps what its gradient needs, and one for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autoshard.ir.kernel import Kernel
from autoshard.rewrite.attention_kernels import Implementation, Problem, estimated
from autoshard.rules.kernel_work import equations, kernel_of
from autoshard.trace.libraries import assumed


@dataclass(frozen=True, eq=False)
class TracedKernel:
    """A kernel traced for one problem.

    Attributes:
        forward: the function of queries, keys, values and segments to the output and what its gradient needs.
        backward: that of what is needed and the output's cotangent to gradients of queries, keys and values.
        kept: where what the gradient needs comes from: the number of an input, of a result of ``forward``, or a captured array.
        estimated: gives a kernel's equation with its work.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    kept: tuple[tuple[str, Any], ...]
    estimated: Callable[[JaxprEqn], JaxprEqn]

    @cached_property
    def works(self) -> tuple[list[Kernel], list[Kernel]]:
        """The work of each kernel, forward and backward."""
        found = ([kernel_of(self.estimated(eqn)) for eqn in equations(each.jaxpr)] for each in (self.forward, self.backward))
        first, second = ([work for work in some if work is not None] for some in found)
        return first, second

    @classmethod
    def of(cls, problem: Problem, implementation: Implementation, interpret: bool) -> TracedKernel:
        """The kernel of an implementation."""
        make = partial(jax.ShapeDtypeStruct, dtype=problem.dtype)
        q = make((*problem.batch, problem.group, problem.query, problem.width))
        k, v = (make((*problem.batch, problem.key, width)) for width in (problem.width, problem.value_width))
        segments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in problem.segments]
        share = partial(estimated, share=implementation.share(problem))
        return cls.traced(implementation.function(problem, interpret), (q, k, v), segments, share)

    @classmethod
    def traced(
        cls,
        attend: Callable,
        types: Sequence[Any],
        segments: Sequence[Any] = (),
        estimated: Callable[[JaxprEqn], JaxprEqn] = lambda eqn: eqn,
    ) -> TracedKernel:
        """The kernel of a function of queries, keys, values and segments of these types."""
        trees = list[Any]()

        def forward(q: Any, k: Any, v: Any, *segments: Any) -> Any:
            made, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
            leaves, tree = jax.tree.flatten(pull)
            trees[:] = [tree]
            return [made, *leaves]

        with assumed():
            first = jax.make_jaxpr(forward)(*types, *segments)
            made, *leaves = first.out_avals
            second = jax.make_jaxpr(lambda leaves, ct: trees[0].unflatten(leaves)(ct))([*_shapes(leaves)], *_shapes([made]))
        inputs, constants = first.jaxpr.invars, dict(zip(first.jaxpr.constvars, first.consts, strict=True))
        kept: list[tuple[str, Any]] = []
        for number, x in enumerate(first.jaxpr.outvars[1:], 1):
            if isinstance(x, Var) and x in constants:
                kept.append(("constant", (x, constants[x])))
            else:
                kept.append(("input", inputs.index(x)) if x in inputs else ("result", number))
        return cls(first, second, tuple(kept), estimated)


def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
