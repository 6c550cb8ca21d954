"""Programs outside the zoo: solvers, samplers, a user's own operations, odd dtypes; each searched, applied and equal to the plain run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg as sparse
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import eager_cluster

from autoshard import search
from autoshard.rules import rules_of
from autoshard.trace import trace


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def spd(n: int, *batch: int) -> np.ndarray:
    """Well-conditioned symmetric matrices."""
    x = 0.02 * normal(*batch, n, n)
    return x + np.swapaxes(x, -1, -2) + 2 * np.eye(n, dtype=np.float32)


# -- solvers -------------------------------------------------------------------------------------------------------------


def cg(a, b):
    return sparse.cg(lambda x: a @ x, b, maxiter=8)[0]


def cg_gradient(a, b):
    return jax.grad(lambda a, b: (cg(a, b) ** 2).sum(), (0, 1))(a, b)


def gmres(a, b):
    return sparse.gmres(lambda x: a @ x, b, maxiter=2, restart=4)[0]


def bicgstab(a, b):
    return sparse.bicgstab(lambda x: a @ x, b, maxiter=4)[0]


def solve(a, b):
    return jnp.linalg.solve(a, b)


def solve_gradient(a, b):
    return jax.grad(lambda a, b: jnp.tanh(solve(a, b)).sum(), (0, 1))(a, b)


def one_function_twice(a, b):
    """A linear solve whose parts are one and the same function object."""
    halve = lambda x: x / 2  # noqa: E731
    return lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: halve(b), lambda _, b: halve(b), symmetric=True) + a[0]


def cube_root(a, x):
    def newton(f, y):
        return lax.fori_loop(0, 12, lambda _, y: y - f(y) / (3 * y**2), y)

    def at(a, x):
        return lax.custom_root(lambda y: y**3 - a * x, jnp.ones_like(x), newton, lambda g, y: y / g(jnp.ones_like(y)))

    return at(a, x), jax.grad(lambda a, x: at(a, x).sum())(a, x)


# -- samplers ------------------------------------------------------------------------------------------------------------


def samples(a):
    keys = jax.random.split(jax.random.key(0), 3)
    return jax.random.gamma(keys[0], a), jax.random.beta(keys[1], a, a + 1), jax.random.dirichlet(keys[2], a)


def samples_by_key(keys, a):
    return jax.vmap(jax.random.gamma)(keys, a)


def sample_gradient(a):
    return jax.grad(lambda a: jax.random.gamma(jax.random.key(1), a).sum())(a)


def draws(seed, impl):
    key = jax.random.key(seed, impl=impl)
    return jax.random.normal(key, (16, 8)), jax.vmap(lambda k: jax.random.uniform(k, (8,)))(jax.random.split(key, 16))


# -- operations of the user's own ----------------------------------------------------------------------------------------


@jax.custom_batching.custom_vmap
def doubled(x):
    return jnp.sin(x) * 2


@doubled.def_vmap
def _(size, batched, x):
    return doubled(x), True


def custom_vmap(x):
    return jax.vmap(lambda x: doubled(x) @ x)(jnp.stack([x, x + 1]))


def linear_call(x, y):
    product = lambda x, y: jax.custom_derivatives.linear_call(lambda r, t: r * t, lambda r, t: r * t, x, y)  # noqa: E731
    return jax.grad(lambda y: (product(x, y) ** 2).sum())(y)


def callback(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x.T @ x) + io_callback(
        np.cos, jax.ShapeDtypeStruct((), x.dtype), x[0, 0]
    )


def printed(x):
    jax.debug.callback(lambda s: None, x.sum())
    return x * 2


def own_shards(x):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    row = PartitionSpec("i")
    return jax.shard_map(lambda x: x + jax.lax.axis_index("i"), mesh=mesh, in_specs=row, out_specs=row)(x * 2) @ x.T


def kernel(x):
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 3

    return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x @ x.T @ x) + x


@custom_partitioning
def own_partition(x):
    return jnp.tanh(x)


def _partition(mesh, arguments, result):
    sharding = NamedSharding(mesh, PartitionSpec(*arguments[0].sharding.spec))
    return mesh, jnp.tanh, sharding, (sharding,)


own_partition.def_partition(partition=_partition, sharding_rule="i j -> i j")


def own_partitioning(x):
    return own_partition(x @ x.T) * 2


def foreign(x):
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32)))
    return jnp.tril(call(x + 0, uplo=np.uint8(ord("L")))[0].mT) + x


# -- odd arrays ----------------------------------------------------------------------------------------------------------


def experts(x, w, sizes):
    return jnp.tanh(lax.ragged_dot(x, w, sizes)).sum(1)


def narrow(x, y):
    low = x.astype(jnp.int4) + jnp.int4(1), x.astype(jnp.float8_e4m3fn), x.astype(jnp.float8_e5m2).T, x.astype(jnp.uint4)
    return low, lax.dot(low[1], y.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.float32), low[0].astype(jnp.int8).sum(0)


def nothing(x, y):
    return x @ y, x.sum(1), jnp.concatenate([x, y.T]), jnp.where(y.sum() > 0, 1.0, 2.0), jnp.sort(y, 1)


def reordered(x):
    return lax.reshape(x, (32, 16), (1, 2, 0)) * 2, lax.reduce(x, np.float32(-1), lambda a, b: lax.max(a, b), (0,))


MATRICES, SYSTEM = spd(16, 8), (spd(64), normal(64))
POSITIVE = np.abs(normal(8, 16)) + 0.5

PROGRAMS = {
    "cg": (cg, SYSTEM),
    "cg_gradient": (cg_gradient, SYSTEM),
    "gmres": (gmres, SYSTEM),
    "bicgstab": (bicgstab, SYSTEM),
    "solve": (solve, (MATRICES, normal(8, 16, 4))),
    "solve_gradient": (solve_gradient, (MATRICES, normal(8, 16, 4))),
    "one_function_twice": (one_function_twice, SYSTEM),
    "inverse": (lambda x: (jnp.linalg.inv(x), jnp.linalg.slogdet(x)[1]), (MATRICES,)),
    "least_squares": (lambda a, b: jnp.linalg.lstsq(a, b)[0], (spd(16), normal(16, 8))),
    "cube_root": (cube_root, (np.float32(2.0), POSITIVE)),
    "samples": (samples, (POSITIVE,)),
    "samples_by_key": (samples_by_key, (jax.random.split(jax.random.key(0), 8), POSITIVE)),
    "sample_gradient": (sample_gradient, (POSITIVE,)),
    "custom_vmap": (custom_vmap, (normal(16, 16),)),
    "linear_call": (linear_call, (normal(16, 8), normal(16, 8) + 1)),
    "callback": (callback, (normal(16, 8),)),
    "printed": (printed, (normal(16, 8),)),
    "own_shards": (own_shards, (normal(16, 8),)),
    "kernel": (kernel, (normal(16, 8),)),
    "own_partitioning": (own_partitioning, (normal(16, 8),)),
    "foreign": (foreign, (MATRICES,)),
    "experts": (experts, (normal(16, 8), normal(4, 8, 8), np.array([4, 0, 9, 3], np.int32))),
    "narrow": (narrow, (np.round(3 * normal(16, 8)).clip(0, 6), normal(8, 16))),
    "nothing": (nothing, (np.zeros((0, 16), np.float32), np.zeros((16, 0), np.float32))),
    "reordered": (reordered, (normal(8, 8, 8),)),
    **{f"draws_{impl}": (partial(draws, impl=impl), (np.uint32(3),)) for impl in ("threefry2x32", "rbg", "unsafe_rbg")},
}

# Programs that compute what a rule of ours or of Shardy's shards, and that have to be sharded.
WHOLE = {"printed", "nothing", "sample_gradient", "draws_rbg", "draws_unsafe_rbg"}


def plain(x) -> np.ndarray:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None).astype(np.float64)


LONG = {"samples", "sample_gradient", "gmres", "bicgstab", "draws_rbg", "draws_unsafe_rbg"}  # seconds of compiling each


@pytest.fixture(scope="module", autouse=True)
def lapack():
    """jaxlib looks LAPACK's kernels up when it first lowers an operation that has one; to call one before that is a crash."""
    jax.jit(jnp.linalg.cholesky).lower(MATRICES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in PROGRAMS])
def test_it_is_searched_applied_and_equal(name):
    """A program that no rule was written for runs sharded, to the numbers of the plain run."""
    fn, args = PROGRAMS[name]
    strategy = search(fn, *args, cluster=eager_cluster("cpu:8"), searcher="recursive_programming", mesh={"x": 4, "y": 2})
    found, wanted = strategy.apply(fn)(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(plain(a), plain(b), rtol=2e-4, atol=2e-4)
    sharded = any(dim >= 0 for layout in strategy.record.assignment.layouts.values() for dim in layout)
    assert sharded or name in WHOLE


@pytest.mark.parametrize("name", ["cg", "cg_gradient", "gmres", "bicgstab", "solve", "solve_gradient"])
def test_a_solver_is_part_of_the_graph(name):
    """Whatever a linear solve runs has rules and layouts like any other op; nothing inside stays replicated for want of them."""
    fn, args = PROGRAMS[name]
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    solves = [op for op in graph.walk() if op.primitive == "custom_linear_solve"]
    assert solves and all(len(op.bodies) == 1 and op.bodies[0].ops for op in solves)
    assert [op.primitive for op in graph.walk() if rules[op.index] is None and not op.bodies] == []


def test_what_its_solver_does_not_read_stays_where_it_is():
    """The operands of a solve's other functions, which only derivatives would call, are neither resharded nor gathered."""
    graph = trace(cg, *SYSTEM).graph
    (op,) = [op for op in graph.walk() if op.primitive == "custom_linear_solve"]
    read = [flow.value for holder in op.holders for flow in holder.sources]
    assert len(read) == len(op.bodies[0].inputs) < len(op.operands)
    assert read == [op.operands[k] for k in (2, 3, 6)]
