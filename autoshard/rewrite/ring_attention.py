"""Attention kernels whose sequence may be divided over devices: each computes block by block what goes round (`autoshard.rules.ring`).

A block's outputs and sums of exponentials are those that the library's kernel keeps for its gradient, and a block's gradients are the
kernel's own, by the outputs and sums over all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from autoshard.ir.kernel import Kernel
from autoshard.ir.rewrites import KERNELS
from autoshard.rewrite.attention_kernels import CUDNN, LANES, SPLASH, Implementation, Problem
from autoshard.rewrite.traced_kernel import TracedKernel
from autoshard.rules.ring import attention

SAMPLE = 4096  # positions of the attention whose work tells that of a pair of a query and a key
LEAST = 8192  # positions from which on dividing a sequence is proposed


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Blocks of keys and values that a library's kernel computes.

    Attributes:
        name: of the implementation.
        causal, granule: see `autoshard.rules.ring.Blocks`.
        scale, softcap: of scores.
        interpret: whether JAX's operations compute them, on any device.
        works: the work of a pair of a query and a key, forward and backward.
    """

    name: str
    causal: bool
    granule: int
    scale: float
    softcap: float
    interpret: bool
    works: tuple[Kernel, Kernel]

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
        """The outputs, and the logarithms of the sums of exponentials in float32."""
        kernel, inputs = self._kernel(q, k, v, causal), self._inputs(q, k, v)
        made = jaxpr_as_fun(kernel.forward)(*inputs)
        n = math.prod(q.shape[:-1])
        (sums,) = (made[which] for kind, which in kernel.kept if kind == "result" and made[which].size == n)
        return self._leave(made[0], (*q.shape[:-1], v.shape[-1])), sums.reshape(q.shape[:-1])

    def backward(self, q: Any, k: Any, v: Any, out: Any, sums: Any, cotangent: Any, *, causal: bool) -> tuple[Any, Any, Any]:
        """The parts of the gradients."""
        kernel, inputs = self._kernel(q, k, v, causal), self._inputs(q, k, v)
        known = {sums.size: sums, out.size: self._enter(out, 2)}
        kept = []
        for kind, which in kernel.kept:
            if kind == "result":
                like = kernel.forward.out_avals[which]
                kept.append(known[like.size].reshape(like.shape) if like.size else jnp.zeros(like.shape, like.dtype))
            else:
                kept.append(which[1] if kind == "constant" else inputs[which])
        dq, dk, dv = jaxpr_as_fun(kernel.backward)(*kept, self._enter(cotangent, 2))
        return self._leave(dq, q.shape), self._leave(dk, k.shape), self._leave(dv, v.shape)

    def kernel(self, gradients: bool) -> Kernel:
        """The work of each pair of a query and a key, seen or not."""
        return self.works[gradients]

    @property
    def _is_cudnn(self) -> bool:
        return self.name == CUDNN.name and not self.interpret

    def _inputs(self, q: Any, k: Any, v: Any) -> list[Any]:
        return [self._enter(q, 2), self._enter(k, 1), self._enter(v, 1)]

    def _enter(self, x: Any, heads: int) -> Any:
        """An array in the kernel's layout, whose last dimensions of the batch, so many, are heads."""
        if not self._is_cudnn:
            return x
        batch, heads = math.prod(x.shape[: -2 - heads]), math.prod(x.shape[-2 - heads : -2])
        return jnp.moveaxis(x.reshape(batch, heads, *x.shape[-2:]), 1, 2)

    def _leave(self, x: Any, shape: tuple[int, ...]) -> Any:
        return jnp.moveaxis(x, 2, 1).reshape(shape) if self._is_cudnn else x

    def _kernel(self, q: Any, k: Any, v: Any, causal: bool) -> TracedKernel:
        seen: dict[str, Any] = {"lowest": 0 if causal else None, "highest": None, "segments": ()}
        sizes = q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        return _traced(self, Problem(*sizes, q.dtype.name, **seen, scale=self.scale, softcap=self.softcap))

    def traced(self, problem: Problem) -> TracedKernel:
        """The kernel of one block, in its own layout."""
        make = partial(jax.ShapeDtypeStruct, dtype=problem.dtype)
        q = make((*problem.batch, problem.group, problem.query, problem.width))
        k, v = (make((*problem.batch, problem.key, width)) for width in (problem.width, problem.value_width))
        types = jax.eval_shape(self._inputs, q, k, v)
        if self.name == SPLASH.name:
            function = SPLASH.function(problem, self.interpret)
        elif self.interpret:
            function = partial(_plain, problem)
        else:
            options: dict[str, Any] = {"is_causal": problem.is_masked, "scale": problem.scale, "implementation": "cudnn"}
            function = partial(jax.nn.dot_product_attention, **options)
        return TracedKernel.traced(function, types)


@lru_cache(maxsize=256)
def _traced(blocks: KernelBlocks, problem: Problem) -> TracedKernel:
    return blocks.traced(problem)


def _plain(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """Attention in JAX's operations that keeps what a kernel keeps."""
    wide: dict[str, Any] = {"preferred_element_type": jnp.float32}

    def scores(q: Any, k: Any) -> Any:
        found = jnp.einsum("...gtw,...sw->...gts", q, k, **wide) * problem.scale
        seen = jnp.tril(jnp.ones(found.shape[-2:], bool)) if problem.is_masked else jnp.ones((), bool)
        return jnp.where(seen, found, -jnp.inf)

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, tuple]:
        found = scores(q, k)
        sums = jax.nn.logsumexp(found, axis=-1)
        out = jnp.einsum("...gts,...sw->...gtw", jnp.exp(found - sums[..., None]), v, **wide).astype(q.dtype)
        return out, (q, k, v, out, sums)

    def backward(kept: tuple, cotangent: Any) -> tuple:
        q, k, v, out, sums = kept
        weights = jnp.exp(scores(q, k) - sums[..., None])
        own = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1, keepdims=True)
        slopes = weights * (jnp.einsum("...gtw,...sw->...gts", cotangent, v, **wide) - own) * problem.scale
        made = jnp.einsum("...gts,...sw->...gtw", slopes, k, **wide), jnp.einsum("...gts,...gtw->...sw", slopes, q, **wide)
        return *(x.astype(q.dtype) for x in made), jnp.einsum("...gts,...gtw->...sw", weights, cotangent, **wide).astype(q.dtype)

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(q, k, v)


# -- implementations -------------------------------------------------------------------------------------------------------


def divides(problem: Problem) -> bool:
    """Whether a sequence can go round: all positions see all others, or those before."""
    seen = problem.lowest in (None, 0) and problem.highest is None
    return seen and not problem.segments and problem.query == problem.key and problem.width == problem.value_width


def is_long(problem: Problem, n_devices: int) -> bool:
    """Whether a sequence is worth dividing: it is long, and there are devices for more than examples and heads."""
    return divides(problem) and problem.query >= LEAST and math.prod(problem.batch) % n_devices > 0


def _ring(name: str, base: Implementation) -> Implementation:
    """An implementation whose sequences may be divided where they can be."""

    def function(problem: Problem, interpret: bool) -> Callable:
        if not divides(problem):
            return base.function(problem, interpret)
        granule = LANES if base is SPLASH else 2
        forward, backward = _works(replace(problem, batch=(), group=1, query=SAMPLE, key=SAMPLE), base)
        share = base.share(problem) if base is SPLASH else 1.0
        works = _times(forward, share), _times(backward, share)
        blocks = KernelBlocks(base.name, problem.is_masked, granule, problem.scale, problem.softcap, interpret, works)
        return lambda q, k, v: attention(q, k, v, blocks, interpret)

    def share(problem: Problem) -> float:
        return 1.0 if divides(problem) else base.share(problem)

    return replace(base, name=name, function=function, share=share)


@lru_cache(maxsize=64)
def _works(problem: Problem, base: Implementation) -> tuple[Kernel, Kernel]:
    """The work of a pair of a query and a key where all are seen, forward and backward; cuDNN's counts what is masked itself."""
    seen = replace(problem, lowest=None) if base is SPLASH else replace(problem, dtype="bfloat16")
    forward, backward = TracedKernel.of(seen, base, False).works
    each = 1 / (problem.query * problem.key)
    return _times(_sum(forward), each), _times(_sum(backward), each)


def _sum(kernels: list[Kernel]) -> Kernel:
    """One kernel that does the work of some."""
    total = sum(kernel.matrix_flops for kernel in kernels)
    products = tuple((share * kernel.matrix_flops / total, sizes) for kernel in kernels for share, sizes in kernel.products)
    vector_flops, nbytes = sum(kernel.vector_flops for kernel in kernels), sum(kernel.nbytes for kernel in kernels)
    return Kernel(total, vector_flops, kernels[0].dtype, nbytes, products=products)


def _times(kernel: Kernel, share: float) -> Kernel:
    return replace(kernel, **{name: share * getattr(kernel, name) for name in ("matrix_flops", "vector_flops", "nbytes")})


RINGS = {base.name: _ring(name, base) for name, base in zip(KERNELS[2:], (SPLASH, CUDNN), strict=True)}
"""By the name of the kernel that computes blocks."""

IMPLEMENTATIONS = {each.name: each for base in (SPLASH, CUDNN) for each in (base, RINGS[base.name])}
"""All kernels of attention by name."""
