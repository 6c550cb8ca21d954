"""Values of traced programs at some places are those that JAX computes there."""

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.rewrite.scopes import program
from autoshard.rewrite.values import Values
from autoshard.rewrite.wiring import Wiring
from autoshard.trace import trace


def test_values_at_some_places_are_those_that_jax_computes() -> None:
    """Rearrangements, loops, checkpoints, reductions and products, from given arguments."""

    def function(x, y, w):
        a = x.reshape(2, 3, 4, 1, 5).transpose(1, 0, 2, 4, 3).reshape(6, 20)
        b = jnp.concatenate([a[:, :7], a[:, 7:][:, ::-1]], 1)
        s = jax.checkpoint(lambda b: jax.nn.softmax(b + jnp.tril(jnp.ones((6, 20), bool)), -1))(b)
        return s @ y, jax.lax.scan(lambda c, u: (c, jnp.where(u > 0, jnp.tanh(u), jnp.floor(u))), 0, w)[1]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 20), (20, 3), (4, 7))]
    traced = trace(function, *shapes)
    root = program(traced.jaxpr)
    wiring = Wiring.of(root)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(each.shape) for each in shapes]
    given = {each.inner: x.__getitem__ for each, x in zip(root.inputs, arrays, strict=True)}
    products = {v for v, eqn in wiring.maker.items() if eqn.primitive.name == "dot_general"}
    values = Values(wiring, products, {20: np.arange(20)}, lambda var, dim: (var.aval.shape[dim],), given, {})
    expected = jax.jit(function)(*arrays)
    rows, columns, others = values.axis(6), values.axis(3), values.axis(7)
    got = values.at(root.outputs[0].inner, (values.index(rows), values.index(columns)))
    np.testing.assert_allclose(got.squeeze(), expected[0], atol=1e-6)
    trip = np.full((1,) * got.ndim, 1, np.int64)
    np.testing.assert_allclose(values.at(root.outputs[1].inner, (trip, values.index(others))).squeeze(), expected[1][1], atol=1e-6)
    assert not values.made_up
