"""What programs from outside the repository brought to light, each shrunk to the lines that matter, under every baseline and search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec
from problems import eager_cluster

import autoshard
from autoshard import DataParallel, FullySharded, RecursiveProgramming
from autoshard.errors import StrategyError

MESH = {"x": 2, "y": 4}
SEARCHERS = {"data_parallel": DataParallel(), "fully_sharded": FullySharded(), "recursive": RecursiveProgramming()}


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(0, 0.3, shape), jnp.float32)


def loop_constant_read_sharded(x, y, v):
    """A while loop that reads a constant whole as it stands, and sliced in the body."""

    def body(carry):
        i, v = carry
        rest = x @ v - y
        return i + 1, v + x.T @ (rest / (1 + jnp.abs(rest).sum()))

    return jax.lax.while_loop(lambda carry: (carry[0] < 5) & (carry[1].sum() < 100), body, (0, v))


def fixed_point(w, x, u):
    """A loss through a fixed point with a derivative of its own: weights are read by the solver, and on the way back."""

    def layer(w, x, z):
        return jnp.tanh(z @ w / 2 + x @ u)

    @jax.custom_vjp
    def solve(w, x):
        return jax.lax.fori_loop(0, 4, lambda _, z: layer(w, x, z), jnp.zeros((x.shape[0], w.shape[0])))

    def forward(w, x):
        z = solve(w, x)
        return z, (w, x, z)

    def backward(kept, g):
        w, x, z = kept
        _, vjp = jax.vjp(layer, w, x, z)
        adjoint = jax.lax.fori_loop(0, 4, lambda _, a: vjp(a)[2] + g, g)
        return vjp(adjoint)[:2]

    solve.defvjp(forward, backward)
    return jax.value_and_grad(lambda w: (solve(w, x) ** 2).mean())(w)


def constants_put_together(x, y):
    """Weights that are made of constants by way of sums and transposes, read sharded and whole."""
    ranks = jnp.log(8.5) - jnp.log(jnp.arange(1.0, 9.0))
    weights = ranks / ranks.sum()
    table = jnp.concatenate([weights, -weights]).reshape(4, 4).T.reshape(16)
    decay = jnp.cumprod(weights)
    return jnp.einsum("i,ij,ik->jk", weights, x, x) @ y * weights, (table * decay.sum()) @ jnp.concatenate([x, x]), y.sum(0) + decay


def mapped_loop(x, n):
    """Loops that `vmap` maps over their trip counts: as long as any goes on, every device asks all others."""

    def halved(x, n):
        return jax.lax.while_loop(lambda c: (c[1] < n) & (jnp.abs(c[0]).max() > 0.01), lambda c: (jnp.sin(c[0] / 2), c[1] + 1), (x, 0))

    return jax.vmap(halved)(x, n)


def diagonal(a, x):
    """A diagonal, which JAX takes by one branch in kernels and by another on devices."""
    return x * jnp.diagonal(a), jnp.diagonal(x.reshape(2, 8, 8), axis1=1, axis2=2) @ a


def loops_from_anywhere(w, x):
    """While loops that start, step and stop where they like; one that never runs."""

    def advanced(x, start, stop, step):
        def body(carry):
            i, x = carry
            return i + step, jnp.tanh(x @ w) / (1 + jnp.abs(x).sum())

        return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (start, x))[1]

    return advanced(x, 0, 3, 1), advanced(x, 2, 9, 3), advanced(x, 8, 8, 1)


def named_and_read_twice(w, x):
    """An activation that is read under a name in one layout, and by itself in another."""
    h = jnp.tanh(x @ w)
    return checkpoint_name(h, "h").T @ x, jnp.sort(checkpoint_name(h, "h"), 0), h * 3


def tells_python_of_an_array(w, x):
    """A branch that shows Python an array."""

    def tell(h):
        jax.debug.callback(lambda h: None, h)
        return h + 1

    h = jnp.tanh(x @ w)
    return w - 0.1 * x.T @ jax.lax.cond(h.sum() > 0, tell, lambda h: h, h)


def calls_python(w, x):
    """A step that asks Python for an array, and tells it a number."""
    h = jnp.tanh(x @ w)
    h = jax.pure_callback(lambda a: np.sort(a, -1), jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="sequential")
    io_callback(lambda mean: None, None, h.mean())
    return w - 0.1 * x.T @ h


def flow_of_mixed_dimensions(w, x):
    """A gradient through a determinant, which solves a system for all sides at once; a matrix of one layout, its inverse of another."""
    return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean() - jnp.linalg.slogdet(w)[1] - jnp.tanh(x @ jnp.linalg.inv(w)).mean())(w)


PROGRAMS = {
    "loop_constant_read_sharded": (loop_constant_read_sharded, (normal(32, 6), normal(32, 2), normal(6, 2))),
    "fixed_point": (fixed_point, (normal(16, 16), normal(16, 8), normal(8, 16))),
    "constants_put_together": (constants_put_together, (normal(8, 8), normal(8, 8))),
    "mapped_loop": (mapped_loop, (normal(16, 8), jnp.arange(16) % 5)),
    "diagonal": (diagonal, (normal(8, 8), normal(16, 8))),
    "loops_from_anywhere": (loops_from_anywhere, (normal(16, 16), normal(32, 16))),
    "named_and_read_twice": (named_and_read_twice, (normal(16, 16), normal(32, 16))),
    "tells_python_of_an_array": (tells_python_of_an_array, (normal(16, 16), normal(32, 16))),
    "flow_of_mixed_dimensions": (flow_of_mixed_dimensions, (normal(16, 16) + 4 * jnp.eye(16), normal(32, 16))),
    "calls_python": (calls_python, (normal(16, 32), normal(32, 16))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_outside_programs_are_equal_and_do_what_is_predicted(name, searcher):
    """The strategy gives the numbers of the plain run, and the partitioner inserts the predicted collectives."""
    fn, args = PROGRAMS[name]
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), searcher=SEARCHERS[searcher], mesh=MESH)
    found = autoshard.verify(strategy, fn, *args)
    assert found.exact, str(found)
    for got, wanted in zip(jax.tree.leaves(strategy.apply(fn)(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [("x", None, None), (None, ("x", "y"), None), (None, None, ("x", "y")), (None, "x", "y")])
def test_two_sides_of_a_mask_are_made_of_one_iota(spec):
    """Positions that are compared with themselves are computed by each device as it needs them, whichever side is sharded."""

    def masked(x):
        i = jnp.broadcast_to(jnp.arange(16), (8, 16))
        return jnp.where(i[:, :, None] >= i[:, None, :], x, 0.0)

    x = normal(8, 16, 16)
    strategy = autoshard.search(masked, x, cluster=eager_cluster(), mesh=MESH, pins={"x": PartitionSpec(*spec)})
    found = autoshard.verify(strategy, masked, x)
    assert found.exact and not strategy.cost.collectives, str(found)
    np.testing.assert_array_equal(strategy.apply(masked)(x), masked(x))


def test_constants_may_be_long_in_the_making():
    """A constant of many steps, each of which reads the last one twice, is lowered without recursion."""

    def scaled(x):
        c = jnp.arange(16.0)
        for _ in range(300):
            c = jnp.sin(c) + c / 2
        return x * c

    assert autoshard.verify(autoshard.search(scaled, normal(32, 16), cluster="cpu:8", mesh=MESH), scaled, normal(32, 16)).exact


def test_effects_in_an_order_are_refused():
    """JAX orders effects on one device alone: a step that asks for that is told where, and what to do."""

    def step(x):
        jax.debug.print("{x}", x=x.sum(), ordered=True)
        return 2 * x

    strategy = autoshard.search(step, normal(8, 8), cluster="cpu:8")
    with pytest.raises(StrategyError, match=r"debug_print at .*test_outside_programs.*ordered=False"):
        strategy.apply(step)(normal(8, 8))


def test_a_shard_map_fixes_the_mesh():
    """Where the mesh is searched, one that the program partitions itself over is the mesh."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("a", "b")

    def step(x, w):
        return jax.shard_map(lambda x: x - jax.lax.pmean(x, "a"), mesh=mesh, in_specs=spec, out_specs=spec)(x @ w)

    args = normal(16, 8), normal(8, 8)
    strategy = autoshard.search(step, *args, cluster="cpu:8")
    assert strategy.mesh_shape == {"a": 4, "b": 2}
    np.testing.assert_allclose(strategy.apply(step)(*args), step(*args), rtol=1e-4, atol=1e-5)


def test_what_is_lowered_for_devices_alone_is_costed_and_pinned():
    """A program with callbacks, which JAX lowers for devices alone, is costed as given and gets its pins."""
    fn, args = PROGRAMS["calls_python"]
    given = autoshard.evaluate(fn, *args, cluster="cpu:8", mesh=MESH, in_specs=(PartitionSpec(), PartitionSpec("x")))
    assert given.in_specs[1] == PartitionSpec("x", None)
    assert not given.pins(fn, *args).found.differing
