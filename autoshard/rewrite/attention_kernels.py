"""JAX's fused attention kernels as functions of queries, keys and values in one layout, and what each of them needs.

Queries are ``[*batch, group, query, width]``, keys and values ``[*batch, key, width]``: a group of queries shares keys, and all the rest is
independent. Kernels are mapped over the batch dimensions, so that each is an axis of their grid, and is split as such.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from autoshard.ir.kernel import Kernel
from autoshard.ir.rewrites import KERNELS
from autoshard.rules.kernel_work import kernel_of

LANES = 128  # of a TPU's vector registers, in which splash attention's blocks are counted
# Rows and columns of the blocks of scores that splash attention keeps in a TPU's vector memory: the largest that divide the lengths, of at
# most these. Blocks of 1,024 make the kernels a third faster than the defaults on v6e (apple/axlearn pull request 958).
BLOCKS = (1024, 1024)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel is to compute.

    Attributes:
        batch: sizes of the batch dimensions.
        group, query, key, width, value_width: the other sizes.
        dtype: of queries, keys and values.
        lowest, highest: the distances of queries from keys that are seen, None without an end.
        segments: the shapes of the segments of queries and of keys, or of keys alone where those that are there have segment one; of size
            one along batch dimensions that they lack. () where there are none.
        scale, softcap: of scores; no cap is 0.0.
    """

    batch: tuple[int, ...]
    group: int
    query: int
    key: int
    width: int
    value_width: int
    dtype: str
    lowest: int | None
    highest: int | None
    segments: tuple[tuple[int, ...], ...]
    scale: float
    softcap: float

    @property
    def is_masked(self) -> bool:
        return self.lowest is not None or self.highest is not None


@dataclass(frozen=True, slots=True)
class Implementation:
    """A library's fused attention.

    Attributes:
        name: in messages and records.
        missing: why it cannot compute a problem; empty where it can.
        function: the function of queries (scaled, if ``scales`` is not set), keys, values and segments that computes it.
        scales: whether it scales scores itself.
        share: which part of a kernel's programs has something to do.
        interpreted: what it runs as where there is no device for it, if that is not the kernel itself.
    """

    name: str
    missing: Callable[[Problem], str]
    function: Callable[[Problem, bool], Callable]
    scales: bool
    share: Callable[[Problem], float]
    interpreted: str = ""


# -- splash attention ------------------------------------------------------------------------------------------------------


def _block(length: int, most: int) -> int:
    """The largest block of at most so many positions, in multiples of the lanes, that divides a length."""
    return next((size for size in range(most, 0, -LANES) if length % size == 0), 0)


def _splash_missing(problem: Problem) -> str:
    for name, size in (("queries", problem.query), ("keys", problem.key)):
        if size % LANES:
            return f"splash attention takes lengths that are multiples of {LANES}, and it has {size} {name}"
    if problem.width % 64 or problem.value_width % 64:
        return f"splash attention takes heads of widths that are multiples of 64, and its heads have {problem.width}"
    if problem.width != problem.value_width:
        return "splash attention takes keys and values of one width"
    return "" if problem.dtype in ("bfloat16", "float32") else f"splash attention takes bfloat16 and float32, not {problem.dtype}"


@lru_cache(maxsize=32)
def _splash_kernel(problem: Problem, interpret: bool) -> Any:
    """The kernel of one example and one key head; JAX looks through all blocks of its mask, a minute for a million positions."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = problem.query, problem.key
    window = problem.highest, None if problem.lowest is None else -problem.lowest
    one = masks.LocalMask(shape, window, 0) if problem.is_masked else masks.FullMask(shape)
    if window == (None, 0):
        one = masks.CausalMask(shape)
    _make_quick(one, problem)
    q, k = (_block(length, most) for length, most in zip(shape, BLOCKS, strict=True))
    sizes = kernels.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=k, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=k, block_q_dq=q, block_kv_dq=k
    )
    heads = masks.MultiHeadMask([one] * problem.group)
    softcap = problem.softcap or None
    with jax.ensure_compile_time_eval():  # what it knows of its mask is no part of a program that is traced meanwhile
        return kernels.make_splash_mqa_single_device(heads, block_sizes=sizes, attn_logits_soft_cap=softcap, interpret=interpret)


def _splash(problem: Problem, interpret: bool) -> Callable:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    made = _splash_kernel(replace(problem, batch=(), segments=()), interpret)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        def single(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> Any:
            if len(segments) == 1:  # of keys alone: those that are there
                segments = jnp.ones(problem.query, jnp.int32), *segments
            return made(q, k, v, kernels.SegmentIds(*segments) if segments else None)

        mapped = single
        for dim in range(len(problem.batch)):
            at = len(problem.batch) - 1 - dim
            mapped = jax.vmap(mapped, in_axes=(0, 0, 0, *(0 if x.shape[at] != 1 else None for x in segments)))
        squeezed = [x.reshape([size for size in x.shape[: len(problem.batch)] if size != 1] + [x.shape[-1]]) for x in segments]
        return mapped(q, k, v, *squeezed)

    return attend


def _make_quick(mask: Any, problem: Problem) -> None:
    """Makes blocks of a mask that are all seen, or not at all, one element, since JAX looks through each block of a long sequence."""
    lowest, highest = (end if each is None else each for each, end in ((problem.lowest, -math.inf), (problem.highest, math.inf)))

    class Quick(type(mask)):
        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            rows, columns = idx
            least, most = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
            if most < lowest or least > highest:
                return np.zeros((1, 1), bool)
            return np.ones((1, 1), bool) if lowest <= least and most <= highest else super().__getitem__(idx)

    object.__setattr__(mask, "__class__", Quick)  # of a frozen dataclass, too


def _splash_share(problem: Problem) -> float:
    """The part of the blocks of scores in which there is something to see."""
    if not problem.is_masked:
        return 1.0
    rows, columns = _block(problem.query, BLOCKS[0]), _block(problem.key, BLOCKS[1])
    first = np.arange(0, problem.query, rows)[:, None] - np.arange(0, problem.key, columns)[None, :]
    most, least = first + rows - 1, first - columns + 1
    seen = (most >= (-math.inf if problem.lowest is None else problem.lowest)) & (
        least <= (math.inf if problem.highest is None else problem.highest)
    )
    return float(seen.mean())


# -- cuDNN's attention -----------------------------------------------------------------------------------------------------


def _cudnn_missing(problem: Problem) -> str:
    if problem.dtype not in ("bfloat16", "float16"):
        return f"cuDNN's attention takes bfloat16 and float16, not {problem.dtype}"
    if problem.softcap:
        return "cuDNN's attention caps no logits"
    if problem.segments:
        return "cuDNN's attention takes no segments"
    if problem.width % 8 or problem.value_width % 8 or max(problem.width, problem.value_width) > 128:
        return f"cuDNN's attention takes heads of widths up to 128 in multiples of 8, and its heads have {problem.width}"
    if problem.query % 2 or problem.key % 2:
        return f"cuDNN's attention takes even lengths where gradients are taken, not {problem.query} and {problem.key}"
    if problem.width != problem.value_width:
        return "cuDNN's attention takes keys and values of one width"
    if problem.is_masked and (problem.lowest != 0 or problem.query != problem.key):
        return "cuDNN's attention takes causal masks and windows before each query, of as many queries as keys"
    return ""


def _cudnn(problem: Problem, interpret: bool) -> Callable:
    """The attention that `jax.nn` has for cuDNN, or the same in JAX's operations; its layout is batch, length, heads, width."""
    implementation = "xla" if interpret else "cudnn"
    batch, heads = math.prod(problem.batch[:-1]), math.prod(problem.batch[-1:])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = None if problem.highest is None else (problem.highest, 0)
        q = jnp.moveaxis(q.reshape(batch, heads * problem.group, problem.query, problem.width), 1, 2)
        k, v = (jnp.moveaxis(x.reshape(batch, heads, *x.shape[-2:]), 1, 2) for x in (k, v))
        made = jax.nn.dot_product_attention(
            q, k, v, is_causal=problem.lowest == 0, scale=problem.scale, local_window_size=window, implementation=implementation
        )
        return jnp.moveaxis(made, 2, 1).reshape(*problem.batch, problem.group, problem.query, problem.value_width)

    return attend


SPLASH = Implementation(KERNELS[0], _splash_missing, _splash, False, _splash_share)
STANDS_IN = "JAX's operations for it, since it runs on GPUs alone"
CUDNN = Implementation(KERNELS[1], _cudnn_missing, _cudnn, True, lambda problem: 1.0, STANDS_IN)


def estimated(eqn: JaxprEqn, share: float) -> JaxprEqn:
    """A kernel with its work in its parameters, where it skips a part of its programs."""
    if eqn.primitive.name != "pallas_call" or share == 1.0 or (work := kernel_of(eqn)) is None:
        return eqn
    return eqn.replace(params={**eqn.params, "cost_estimate": _estimate(work, share)})


def _estimate(work: Kernel, share: float) -> Any:
    """The estimate of a part of a kernel's work; what its vector units do is counted as transcendentals."""
    import jax.experimental.pallas as pl

    counts = (work.matrix_flops, work.vector_flops, work.nbytes)
    flops, others, nbytes = (int(share * count) for count in counts)
    return pl.CostEstimate(flops=flops, transcendentals=others, bytes_accessed=nbytes)


def layouts(sizes: Sequence[int], order: Sequence[int], groups: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
    """A function that splits an array into dimensions of these sizes, orders them, and merges so many in turn.

    Those that stay together are never taken apart, since what is sharded over both would not be.
    """
    runs: list[list[int]] = []  # of source dimensions, in the order of the result
    starts = [*itertools.accumulate(groups, initial=0)]
    for at, dim in enumerate(order):
        if runs and at not in starts and runs[-1][-1] == dim - 1:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    source = sorted(runs)
    merged = [math.prod(sizes[dim] for dim in order[at : at + count]) for at, count in zip(starts, groups, strict=False)]

    def arranged(x: jax.Array) -> jax.Array:
        x = _reshaped(x, [math.prod(sizes[dim] for dim in run) for run in source])
        places = [source.index(run) for run in runs]
        x = x if places == sorted(places) else x.transpose(places)
        return _reshaped(x, merged)

    return arranged


def repeated(x: jax.Array, axis: int, times: int) -> jax.Array:
    """An array with each slice along an axis so many times in turn: devices look up those that they have."""
    return x if times == 1 else jnp.take(x, np.arange(x.shape[axis] * times) // times, axis=axis)


def unrepeated(x: jax.Array, axis: int, times: int) -> jax.Array:
    """The sums of so many slices in turn along an axis, as a product, of which devices add up their parts."""
    if times == 1:
        return x
    which = np.arange(x.shape[axis])[:, None] // times == np.arange(x.shape[axis] // times)[None, :]
    kept = jnp.tensordot(x, which.astype(x.dtype), ((axis,), (0,)), precision="highest", preferred_element_type=jnp.float32)
    return jnp.moveaxis(kept, -1, axis).astype(x.dtype)


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if tuple(x.shape) == tuple(shape) else x.reshape(tuple(shape))

