"""Small operations of every rule family: the table that goldens, laws and comparisons run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import kernel_examples as kernels
import numpy as np
from jax import lax
from jax.extend import core

from autoshard.ir import Rule, Value
from autoshard.rules import rule_of


@dataclass(frozen=True, eq=False)
class Operation:
    """One equation with concrete operands."""

    primitive: core.Primitive
    params: dict[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]  # abstract

    @property
    def rule(self) -> Rule | None:
        return rule_of(self.primitive.name, self.params, [value(x) for x in self.operands], [value(x) for x in self.results])

    def bind(self, *operands, **changes) -> tuple[Any, ...]:
        found = self.primitive.bind(*operands, **{**self.params, **changes})
        return tuple(found) if self.primitive.multiple_results else (found,)


def value(aval) -> Value:
    """The `Value` of an array, tracer or abstract value."""
    return Value(tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize)


def equations(jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation of a jaxpr and of the jaxprs in its parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(dict(eqn.params), is_leaf=lambda p: isinstance(p, (core.Jaxpr, core.ClosedJaxpr))):
            if isinstance(param, (core.Jaxpr, core.ClosedJaxpr)):
                yield from equations(param.jaxpr if isinstance(param, core.ClosedJaxpr) else param)


def operation(function: Callable, *args) -> Operation:
    """The last equation of a function, calls inlined, with the operands it meets."""
    closed = jax.make_jaxpr(function)(*args)
    environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    environment.update(zip(closed.jaxpr.invars, args, strict=True))
    *before, last = closed.jaxpr.eqns

    def read(atom):
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, core.Literal) else environment[atom]

    for eqn in before:
        found = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
        environment.update(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))
    operands = tuple(map(read, last.invars))
    if last.primitive.name == "jit":
        return operation(core.jaxpr_as_fun(last.params["jaxpr"]), *operands)
    return Operation(last.primitive, dict(last.params), operands, tuple(v.aval for v in last.outvars))


def normal(*shape: int, dtype=np.float32) -> np.ndarray:
    """The same pseudo-random array for the same shape."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 1


def integers(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, below, shape).astype(np.int32)


def spd(*batch: int, n: int = 4) -> np.ndarray:
    """Symmetric positive definite matrices."""
    x = normal(*batch, n, n)
    return x @ np.swapaxes(x, -1, -2) + n * np.eye(n, dtype=np.float32)


def conv(x, w, strides=(1, 1), padding="SAME", layout=("NCHW", "OIHW", "NCHW"), **kwargs):
    return operation(lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **kwargs), x, w)


def dot(x, y, contracting, batch=((), ())):
    return operation(lambda x, y: lax.dot_general(x, y, (contracting, batch)), x, y)


def lookup(x, indices, numbers, sizes, mode="clip"):
    return operation(lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers(**numbers), sizes, mode=mode), x, indices)


def write(function, x, indices, updates, mode="drop", **numbers):
    return operation(lambda x, i, u: function(x, i, u, lax.ScatterDimensionNumbers(**numbers), mode=mode), x, indices, updates)


ROWS = {"update_window_dims": (1,), "inserted_window_dims": (0,), "scatter_dims_to_operand_dims": (0,)}
PAIRED_ROWS = {
    "update_window_dims": (),
    "inserted_window_dims": (1,),
    "scatter_dims_to_operand_dims": (1,),
    "operand_batching_dims": (0,),
    "scatter_indices_batching_dims": (0,),
}


def pool_gradient(x, size=2, padding="VALID"):
    """The gradient of max pooling over windows of the middle dimensions, two elements apart."""
    window = ((1, size, size, 1), (1, 2, 2, 1))
    pooled, backward = jax.vjp(lambda x: lax.reduce_window(x, -np.inf, lax.max, *window, padding), x)
    return backward(pooled)[0]


def pool_tangent(x, t):
    """The tangent of max pooling over overlapping windows: the tangents of the elements that were selected."""
    return jax.jvp(lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME"), (x,), (t,))[1]


def strided(x, w):
    return lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_gradient(x, w, argument):
    """The gradient of a strided and dilated convolution, of its output squared, with respect to one argument."""
    y, backward = jax.vjp(lambda z: strided(*((z, w) if argument == 0 else (x, z))), (x, w)[argument])
    return backward(y)[0]


def with_ties(*shape: int) -> np.ndarray:
    """Few distinct values, and a NaN in the last row."""
    x = np.round(normal(*shape))
    x[-1, 5] = np.nan
    return x


def key() -> jax.Array:
    return jax.random.key(7)


EXAMPLES: dict[str, Callable[[], Operation]] = {
    # elementwise
    "add": lambda: operation(lax.add, normal(4, 6), normal(4, 6)),
    "sub_square": lambda: operation(lax.sub, normal(4, 4), normal(4, 4).T),
    "add_scalar": lambda: operation(lambda x: x + 1.0, normal(4, 6)),
    "mul_size_one": lambda: operation(lax.mul_p.bind, normal(4, 6), normal(4, 1)),
    "integer_pow": lambda: operation(lambda x: x**3, normal(4, 6)),
    "logistic": lambda: operation(lax.logistic, normal(4, 6)),
    "erf_inv": lambda: operation(lax.erf_inv, np.tanh(normal(4, 6))),
    "igamma": lambda: operation(lax.igamma, positive(4), positive(4)),
    "nextafter": lambda: operation(lax.nextafter, normal(4, 6), normal(4, 6)),
    "is_finite": lambda: operation(lax.is_finite, normal(4, 6)),
    "clamp_scalar": lambda: operation(lambda x: lax.clamp(-0.5, x, 0.5), normal(4, 6)),
    "clamp": lambda: operation(lax.clamp, normal(4) - 1, normal(4), normal(4) + 1),
    "select_n": lambda: operation(lax.select, normal(4, 6) > 0, normal(4, 6), -normal(4, 6)),
    "select_n_scalar": lambda: operation(lax.select, np.bool_(True), normal(4, 6), -normal(4, 6)),
    "convert_element_type": lambda: operation(lambda x: x.astype(jnp.bfloat16), jnp.asarray(normal(4, 6))),
    "reduce_precision": lambda: operation(lambda x: lax.reduce_precision(x, 5, 10), normal(4, 6)),
    "optimization_barrier": lambda: operation(lambda x, y: lax.optimization_barrier((x, y)), normal(4, 6), normal(8)),
    "bitcast_same": lambda: operation(lambda x: lax.bitcast_convert_type(x, np.int32), normal(4, 6)),
    "bitcast_narrower": lambda: operation(lambda x: lax.bitcast_convert_type(x, np.int16), normal(4, 6)),
    "bitcast_wider": lambda: operation(lambda x: lax.bitcast_convert_type(x, np.int32), normal(4, 2, dtype=np.float16)),
    # contraction
    "matmul": lambda: dot(normal(8, 4), normal(4, 16), ((1,), (0,))),
    "matmul_batched": lambda: dot(normal(4, 2, 6), normal(4, 8, 6), ((2,), (2,)), ((0,), (0,))),
    "matmul_two_contracted": lambda: dot(normal(4, 2, 6), normal(2, 8, 4), ((0, 1), (2, 0))),
    "outer": lambda: dot(normal(4), normal(6), ((), ())),
    "ragged_dot": lambda: operation(lambda x, w, n: lax.ragged_dot(x, w, n), normal(8, 4), normal(3, 4, 6), np.array([2, 3, 3], np.int32)),
    "ragged_dot_batched": lambda: operation(
        jax.vmap(lambda x, w, n: lax.ragged_dot(x, w, n)),
        *(normal(2, 8, 4), normal(2, 3, 4, 6)),
        np.array([[2, 3, 3], [8, 0, 0]], np.int32),
    ),
    "conv": lambda: conv(normal(4, 2, 6, 6), normal(8, 2, 3, 3)),
    "conv_channels_last": lambda: conv(normal(4, 6, 6, 2), normal(3, 3, 2, 8), layout=("NHWC", "HWIO", "NHWC")),
    "conv_pointwise": lambda: conv(normal(4, 2, 6, 6), normal(8, 2, 1, 1)),
    "conv_strided_pointwise": lambda: conv(normal(4, 2, 6, 6), normal(8, 2, 1, 1), (2, 2)),
    "conv_grouped": lambda: conv(normal(4, 4, 6, 6), normal(8, 2, 3, 3), feature_group_count=2),
    "conv_contracts_batch": lambda: conv(normal(4, 2, 6, 6), normal(4, 8, 4, 4), padding="VALID", layout=("CNHW", "IOHW", "NCHW")),
    "conv_strided": lambda: operation(strided, normal(4, 16, 16, 2), normal(3, 3, 2, 8)),
    "conv_cropped": lambda: conv(normal(4, 2, 8, 8), normal(8, 2, 1, 1), (2, 1), ((-1, 0), (0, 0))),
    "conv_input_gradient": lambda: operation(lambda x, w: conv_gradient(x, w, 0), normal(4, 16, 16, 2), normal(3, 3, 2, 8)),
    "conv_kernel_gradient": lambda: operation(lambda x, w: conv_gradient(x, w, 1), normal(4, 16, 16, 2), normal(3, 3, 2, 8)),
    "conv_depthwise": lambda: conv(normal(4, 8, 6, 6), normal(8, 1, 3, 3), feature_group_count=8),
    "conv_batch_grouped": lambda: conv(normal(4, 2, 6, 6), normal(8, 2, 3, 3), batch_group_count=2),
    # reduction
    "reduce_sum": lambda: operation(lambda x: lax.reduce_sum(x, (1,)), normal(4, 6, 8)),
    "reduce_sum_two": lambda: operation(lambda x: lax.reduce_sum(x, (0, 2)), normal(4, 6, 8)),
    "reduce_max": lambda: operation(lambda x: lax.reduce_max(x, (1,)), normal(4, 6)),
    "reduce_min": lambda: operation(lambda x: lax.reduce_min(x, (1,)), normal(4, 6)),
    "reduce_prod": lambda: operation(lambda x: lax.reduce_prod(x, (1,)), normal(4, 6)),
    "reduce_and": lambda: operation(lambda x: lax.reduce_and(x, (1,)), normal(4, 6) > -1),
    "reduce_or": lambda: operation(lambda x: lax.reduce_or(x, (1,)), normal(4, 6) > 0.8),
    "reduce_xor": lambda: operation(lambda x: lax.reduce_xor(x, (1,)), normal(4, 6) > 0),
    "reduce_and_bits": lambda: operation(lambda x: lax.reduce_and(x, (1,)), integers(256, 4, 6)),
    "argmax": lambda: operation(lambda x: lax.argmax(x, 1, np.int32), normal(4, 6)),
    "argmax_ties": lambda: operation(lambda x: lax.argmax(x, 1, np.int32), with_ties(4, 16)),
    "argmin_ties": lambda: operation(lambda x: lax.argmin(x, 1, np.int32), with_ties(4, 16)),
    "reduce": lambda: operation(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b - a * b, (1,)), normal(4, 6)),
    "reduce_like_max": lambda: operation(lambda x: lax.reduce(x, np.float32(-1), lambda a, b: lax.max(b, a), (1,)), normal(4, 6)),
    # ordering
    "cumsum": lambda: operation(lambda x: lax.cumsum(x, 1), normal(4, 6)),
    "cumlogsumexp": lambda: operation(lambda x: lax.cumlogsumexp(x, 1), normal(4, 6)),
    "cumsum_reverse": lambda: operation(lambda x: lax.cumsum(x, 0, reverse=True), integers(9, 8, 6)),
    "cumprod": lambda: operation(lambda x: lax.cumprod(x, 1), normal(4, 8)),
    "cummax": lambda: operation(lambda x: lax.cummax(x, 1), with_ties(4, 8)),
    "cummin": lambda: operation(lambda x: lax.cummin(x, 1, reverse=True), with_ties(4, 8)),
    "sort": lambda: operation(lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), normal(4, 6), integers(9, 4, 6)),
    "top_k": lambda: operation(lambda x: lax.top_k(x, 2), normal(4, 6)),
    "top_k_ties": lambda: operation(lambda x: lax.top_k(x, 4), with_ties(4, 16)),
    "approx_top_k": lambda: operation(lambda x: lax.approx_max_k(x, 2), normal(4, 6)),
    # shape
    "broadcast_in_dim": lambda: operation(lambda x: lax.broadcast_in_dim(x, (4, 6, 8), (1, 2)), normal(1, 8)),
    "merge": lambda: operation(lambda x: lax.reshape(x, (8, 6)), normal(2, 4, 6)),
    "split_dim": lambda: operation(lambda x: lax.reshape(x, (2, 4, 1, 6)), normal(8, 6)),
    "reshape_reordered": lambda: operation(lambda x: lax.reshape(x, (8, 12), (1, 2, 0)), normal(6, 4, 4)),
    "regroup": lambda: operation(lambda x: lax.reshape(x, (2, 16)), normal(8, 4)),
    "uneven_regroup": lambda: operation(lambda x: lax.reshape(x, (6, 4, 8)), normal(4, 6, 8)),
    "transpose": lambda: operation(lambda x: lax.transpose(x, (2, 0, 1)), normal(4, 6, 8)),
    "squeeze": lambda: operation(lambda x: lax.squeeze(x, (1,)), normal(4, 1, 6)),
    "rev": lambda: operation(lambda x: lax.rev(x, (1,)), normal(4, 6)),
    "rev_two": lambda: operation(lambda x: lax.rev(x, (0, 2)), normal(4, 6, 8)),
    "concatenate": lambda: operation(lambda x, y: lax.concatenate((x, y), 1), normal(4, 6), normal(4, 2)),
    "split": lambda: operation(lambda x: lax.split(x, (2, 4), 1), normal(4, 6)),
    "split_into_one": lambda: operation(lambda x: lax.split(x, (6,), 1), normal(4, 6)),
    "stack": lambda: operation(lambda x, y: jnp.stack((x, y), 1), normal(4, 6), -normal(4, 6)),
    "unstack": lambda: operation(lambda x: jnp.unstack(x, axis=1), normal(4, 2, 6)),
    "tile": lambda: operation(lambda x: jnp.tile(x, (2, 1)), normal(4, 6)),
    "pad": lambda: operation(lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 2, 1))), normal(4, 6)),
    "pad_shifts": lambda: operation(lambda x: lax.pad(x, np.float32(2), ((1, -1, 0), (0, 0, 0))), normal(4, 6)),
    "pad_shifts_back": lambda: operation(lambda x: lax.pad(x, np.float32(2), ((0, 0, 0), (-2, 2, 0))), normal(4, 8)),
    "slice": lambda: operation(lambda x: lax.slice(x, (0, 1, 0), (4, 6, 8), (1, 2, 1)), normal(4, 6, 8)),
    # indexing
    "dynamic_slice": lambda: operation(lambda x, i: lax.dynamic_slice(x, (0, i), (4, 2)), normal(4, 6), np.int32(3)),
    "dynamic_update_one": lambda: operation(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), normal(4, 6), normal(4, 1), np.int32(3)
    ),
    "dynamic_update_slice": lambda: operation(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), normal(4, 6), normal(4, 2), np.int32(3)
    ),
    "embedding": lambda: lookup(
        normal(8, 6), integers(8, 4, 2, 1), {"offset_dims": (2,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}, (1, 6)
    ),
    "embedding_fill": lambda: lookup(
        normal(8, 6), integers(12, 4, 1), {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}, (1, 6), "fill"
    ),
    "take_along_axis": lambda: lookup(
        normal(4, 8),
        integers(8, 4, 2, 1),
        {
            "offset_dims": (),
            "collapsed_slice_dims": (1,),
            "start_index_map": (1,),
            "operand_batching_dims": (0,),
            "start_indices_batching_dims": (0,),
        },
        (1, 1),
    ),
    "gather_points": lambda: lookup(
        normal(4, 8, 6), integers(4, 4, 2), {"offset_dims": (1,), "collapsed_slice_dims": (0, 1), "start_index_map": (0, 1)}, (1, 1, 6)
    ),
    "gather_kept": lambda: lookup(
        normal(8, 6), integers(8, 4, 1), {"offset_dims": (1, 2), "collapsed_slice_dims": (), "start_index_map": (0,)}, (1, 6)
    ),
    "gather_window": lambda: lookup(
        normal(8, 6), integers(6, 4, 1), {"offset_dims": (1, 2), "collapsed_slice_dims": (), "start_index_map": (0,)}, (2, 6)
    ),
    "gather_offsets_first": lambda: lookup(
        normal(8, 6), integers(8, 4, 1), {"offset_dims": (0,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}, (1, 6)
    ),
    "gather_bool": lambda: lookup(
        normal(8, 6) > 0, integers(8, 4, 1), {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}, (1, 6)
    ),
    "scatter": lambda: write(lax.scatter, normal(8, 6), np.array([[5], [0]], np.int32), normal(2, 6), **ROWS),
    "scatter_add": lambda: write(lax.scatter_add, normal(8, 6), integers(8, 4, 1), normal(4, 6), **ROWS),
    "scatter_sub": lambda: write(lax.scatter_sub, normal(8, 6), integers(8, 4, 1), normal(4, 6), **ROWS),
    "scatter_mul": lambda: write(lax.scatter_mul, normal(8, 6), integers(8, 4, 1), normal(4, 6), **ROWS),
    "scatter_min": lambda: write(lax.scatter_min, normal(8, 6), integers(8, 4, 1), normal(4, 6), **ROWS),
    "scatter_max": lambda: write(lax.scatter_max, normal(8, 6), integers(8, 4, 1), normal(4, 6), **ROWS),
    "scatter_add_paired": lambda: write(lax.scatter_add, normal(4, 8), integers(8, 4, 2, 1), normal(4, 2), **PAIRED_ROWS),
    "scatter_add_window": lambda: write(
        lax.scatter_add,
        normal(8, 6),
        np.array([[3], [0], [3], [5]], np.int32),
        normal(4, 2, 6),
        update_window_dims=(1, 2),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(0,),
    ),
    # creation
    "iota": lambda: operation(lambda: lax.broadcasted_iota(np.int32, (4, 6), 1)),
    "random_bits": lambda: operation(lambda k: jax.random.bits(k, (4, 6)), key()),
    "random_bits_many_keys": lambda: operation(jax.vmap(lambda k: jax.random.bits(k, (6,))), jax.random.split(key(), 4)),
    "random_bits_rbg": lambda: operation(lambda k: jax.random.bits(k, (4, 6)), jax.random.key(7, impl="rbg")),
    "random_bits_rbg_many_keys": lambda: operation(
        jax.vmap(lambda k: jax.random.bits(k, (6,))), jax.random.split(jax.random.key(7, impl="rbg"), 4)
    ),
    "random_gamma": lambda: operation(jax.vmap(jax.random.gamma), jax.random.split(key(), 4), positive(4, 6)),
    "random_split": lambda: operation(lambda k: jax.random.split(k, 4), key()),
    "random_fold_in": lambda: operation(jax.vmap(jax.random.fold_in), jax.random.split(key(), 4), np.arange(4, dtype=np.uint32)),
    "random_fold_in_unsafe_rbg": lambda: operation(
        jax.vmap(jax.random.fold_in), jax.random.split(jax.random.key(7, impl="unsafe_rbg"), 4), np.arange(4, dtype=np.uint32)
    ),
    "random_wrap": lambda: operation(jax.random.wrap_key_data, integers(9, 4, 2).astype(np.uint32)),
    "random_unwrap": lambda: operation(jax.random.key_data, jax.random.split(key(), 4)),
    "rng_bit_generator": lambda: operation(lambda k: lax.rng_bit_generator(k, (4, 6)), integers(9, 4).astype(np.uint32)),
    # linalg
    "cholesky": lambda: operation(lax.linalg.cholesky_p.bind, spd(4)),
    "triangular_solve": lambda: operation(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), spd(4), normal(4, 4, 6)),
    "triangular_solve_right": lambda: operation(lambda a, b: lax.linalg.triangular_solve(a, b, lower=True), spd(4), normal(4, 6, 4)),
    "qr": lambda: operation(lambda x: lax.linalg.qr(x, full_matrices=False), normal(4, 6, 4)),
    "eigh": lambda: operation(lambda x: lax.linalg.eigh(x, symmetrize_input=False), spd(4)),
    "svd": lambda: operation(lambda x: lax.linalg.svd(x, full_matrices=False), normal(4, 6, 4)),
    "lu": lambda: operation(lax.linalg.lu, spd(4)),
    "fft": lambda: operation(lambda x: jnp.fft.rfft(x), jnp.asarray(normal(4, 6, 8))),
    "tridiagonal_solve": lambda: operation(lax.linalg.tridiagonal_solve, *(positive(4, 6) for _ in "123"), normal(4, 6, 2)),
    # window
    "reduce_window_max": lambda: operation(
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), normal(4, 6, 6, 2)
    ),
    "reduce_window_sum": lambda: operation(
        lambda x: lax.reduce_window(x, np.float32(0), lax.add, (1, 3, 1), (1, 1, 1), "SAME"), normal(4, 6, 2)
    ),
    "reduce_window_min": lambda: operation(
        lambda x: lax.reduce_window(x, np.int32(2**31 - 1), lax.min, (5, 3), (2, 1), ((2, 1), (0, 2))), integers(9, 16, 8)
    ),
    "reduce_window": lambda: operation(
        lambda x: lax.reduce_window(x, np.float32(2), lambda a, b: a * b + a, (1, 3), (1, 2), "SAME"), normal(4, 16)
    ),
    "reduce_window_apart": lambda: operation(
        lambda x: lax.reduce_window(x, np.float32(2), lambda a, b: a * b + a, (1, 2), (1, 2), "VALID"), normal(4, 16)
    ),
    "reduce_window_uneven": lambda: operation(lambda x: lax.reduce_window(x, -np.inf, lax.max, (3, 1), (1, 1), "VALID"), normal(8, 2)),
    "select_and_scatter_add": lambda: operation(pool_gradient, normal(4, 6, 6, 2)),
    "select_and_scatter_overlapping": lambda: operation(lambda x: pool_gradient(x, 3, "SAME"), normal(2, 16, 8, 2)),
    "select_and_gather_add": lambda: operation(pool_tangent, normal(4, 16, 2), normal(4, 16, 2) + 1),
    # kernels
    "kernel_attention": lambda: operation(kernels.attention, normal(2, 4, 4, 2), normal(2, 2, 6, 2), normal(2, 2, 6, 2)),
    "kernel_attention_of_many": lambda: operation(
        jax.vmap(kernels.attention, 1), normal(2, 2, 4, 4, 2), normal(2, 2, 2, 6, 2), normal(2, 2, 2, 6, 2)
    ),
    "kernel_grouped_sum": lambda: operation(kernels.grouped_sum, normal(4, 2, 3)),
    "kernel_product": lambda: operation(kernels.product, normal(4, 4), normal(4, 8)),
    "kernel_running_sum": lambda: operation(kernels.running_sum, normal(4, 4)),
    "kernel_numbered": lambda: operation(kernels.numbered, normal(4, 8)),
    "kernel_chosen": lambda: operation(kernels.chosen, integers(4, 4), normal(4, 8)),
    "kernel_added": lambda: operation(kernels.added, normal(8, 3), normal(8, 3)),
    "kernel_skewed": lambda: operation(kernels.skewed, normal(8, 2)),
    "kernel_paged": lambda: operation(kernels.paged, integers(4, 4), integers(8, 8), normal(8, 4, 3)),
    "kernel_cross_entropy": lambda: operation(kernels.cross_entropy, normal(8, 8), integers(8, 8, 1)),
    "kernel_state_space": lambda: operation(kernels.state_space, normal(2, 4, 3, 2), normal(4)),
    "kernel_segment_sum": lambda: operation(kernels.segment_sum, np.array([1, 0, 0, 1], np.int32), normal(4, 3)),
    "kernel_segment_blocks": lambda: operation(kernels.segment_blocks, np.array([[1], [0], [0], [1]], np.int32), normal(4, 3)),
    "kernel_between": lambda: operation(kernels.between, integers(9, 5), normal(4, 3)),
    "kernel_edged": lambda: operation(kernels.edged, np.int32(2), normal(4, 6, 2)),
    "kernel_neighbours": lambda: operation(kernels.neighbours, integers(4, 4), normal(4, 3)),
}


@cache
def example(name: str) -> Operation:
    """The operation of that name."""
    return EXAMPLES[name]()
