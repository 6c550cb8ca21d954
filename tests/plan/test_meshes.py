"""Meshes as users have them: axes of size 1, many axes, and specs whose axes are in another order than the mesh's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import ShardingError

NAMES = ("data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "autoregressive", "tensor", "tensor_sequence", "expert")
RANDOM = np.random.default_rng(0)
PARAMS = {"up": RANDOM.standard_normal((16, 32), np.float32) * 0.1, "down": RANDOM.standard_normal((32, 16), np.float32) * 0.1}
X = RANDOM.standard_normal((16, 16), np.float32)


def mesh_of(**sizes):
    shape = tuple(sizes.get(name, 1) for name in NAMES)
    return jax.make_mesh(shape, NAMES, axis_types=(AxisType.Auto,) * len(NAMES))


def step_on(mesh=None, spec=None):
    """A train step, with its activations constrained on a mesh, if there is one."""

    def step(params, x):
        def loss(params):
            h = jnp.tanh(x @ params["up"])
            h = h if mesh is None else jax.lax.with_sharding_constraint(h, NamedSharding(mesh, spec))
            return jnp.mean((h @ params["down"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def check(strategy, step, *args):
    for ours, wanted in zip(jax.tree.leaves(strategy.apply(step)(*args)), jax.tree.leaves(jax.jit(step_on())(PARAMS, X)), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}])
def test_axes_of_size_one_are_no_choice(options, tmp_path):
    """A program on a mesh of ten axes is searched as on its two larger ones, and keeps all names; a stage has fewer devices of it."""
    mesh = mesh_of(fsdp=4, tensor=2)
    step = step_on(mesh, P(("data", "fsdp", "expert"), ("tensor", "tensor_sequence")))
    strategy = autoshard.search(step, PARAMS, X, cluster="cpu:8", **options)
    assert {*strategy.mesh_shape} == {*NAMES} and np.prod([*strategy.mesh_shape.values()]) == 8
    check(strategy, step, PARAMS, X)
    if options:
        return
    assert strategy.mesh_shape == dict(mesh.shape) and strategy.record.mesh.sizes == (4, 2)
    strategy.save(tmp_path / "found.json")
    loaded = autoshard.load(tmp_path / "found.json")
    assert loaded.mesh_shape == strategy.mesh_shape and loaded.record == autoshard.load(tmp_path / "found.json").record
    check(loaded, step, PARAMS, X)


def test_specs_keep_the_names_of_axes_of_size_one():
    """Pins, batch axes, arrays on the mesh and given specs name them; where nothing pins an argument, its spec has the larger ones."""
    mesh, spec = mesh_of(fsdp=8), P(("data", "fsdp"))
    pinned = autoshard.search(step_on(), PARAMS, X, cluster="cpu:8", mesh=mesh, pins={"x": spec, "*up*": P(None, "tensor")})
    assert pinned.in_specs == ({"down": pinned.in_specs[0]["down"], "up": P(None, "tensor")}, P(("data", "fsdp"), None))
    check(pinned, step_on(), PARAMS, X)
    x = jax.device_put(X, NamedSharding(mesh, spec))
    kept = autoshard.search(step_on(), PARAMS, x, cluster="cpu:8", pins="arguments")
    assert kept.in_specs[1] == P(("data", "fsdp"), None) and kept.mesh_shape == dict(mesh.shape)
    check(kept, step_on(), PARAMS, x)
    split = autoshard.search(step_on(), PARAMS, X, cluster="cpu:8", mesh=mesh, batch_axes=("data", "fsdp"))
    assert split.in_specs[1] == P("fsdp", None)
    given = autoshard.evaluate(step_on(), PARAMS, X, cluster="cpu:8", mesh=mesh, in_specs=(P(), spec))
    assert given.in_specs[1] == P(("data", "fsdp"), None)
    with pytest.raises(ShardingError, match="'data' shards both dim 0 and dim 1"):
        autoshard.search(step_on(), PARAMS, X, cluster="cpu:8", mesh=mesh, pins={"x": P("data", "data")})


def test_axes_may_split_a_dimension_out_of_mesh_order(tmp_path):
    """As pins, of arrays, as constraints and as given specs, with the devices of the user's mesh, and also from a file."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    turned = NamedSharding(mesh, P(("y", "x")))
    x = jax.device_put(X, turned)
    constrained = step_on(mesh, P(("y", "x")))
    found = [
        (autoshard.search(step_on(), PARAMS, X, cluster="cpu:8", mesh={"x": 4, "y": 2}, pins={"x": P(("y", "x"))}), step_on(), X),
        (autoshard.search(step_on(), PARAMS, x, cluster="cpu:8", pins="arguments"), step_on(), x),
        (autoshard.search(constrained, PARAMS, X, cluster="cpu:8", pins={"x": P(("y", "x"))}), constrained, X),
        (autoshard.evaluate(step_on(), PARAMS, X, cluster="cpu:8", mesh=mesh, in_specs=(P(), P(("y", "x")))), step_on(), x),
    ]
    found[0][0].save(tmp_path / "found.json")
    found.append((autoshard.load(tmp_path / "found.json"), step_on(), X))
    for strategy, step, argument in found:
        assert strategy.mesh_shape == {"x": 4, "y": 2} and strategy.in_specs[1] == P(("y", "x"), None)
        assert strategy.shardings(X).devices_indices_map(X.shape) == turned.devices_indices_map(X.shape)
        check(strategy, step, PARAMS, argument)


def test_specs_with_axes_in_two_orders_are_refused():
    """A layout has one order; the error names both specs and what they are on."""
    with pytest.raises(ShardingError, match=r"same order in every spec.*x has P\(.*params\['up'\] has P\(.*Write them in the same order"):
        autoshard.search(
            step_on(), PARAMS, X, cluster="cpu:8", mesh={"a": 4, "b": 2}, pins={"*up*": P(None, ("a", "b")), "x": P(("b", "a"))}
        )


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["auto", "fully_sharded", "tensor_parallel"])
def test_meshes_of_many_axes_are_searched_axis_by_axis(searcher):
    """Six axes have more layouts of an array than tables of reshards could: searches do without, or say so."""
    shapes = jax.ShapeDtypeStruct((64, 8, 8, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    mesh = {f"a{number}": 2 for number in range(6)}
    strategy = autoshard.search(lambda x, w: jnp.tanh(x @ w).sum(), *shapes, cluster="v5e:8x8", mesh=mesh, searcher=searcher)
    assert strategy.mesh_shape == mesh
    if searcher == "auto":
        with pytest.raises(autoshard.SearchLimitError, match="all axes' tables at once"):
            autoshard.search(lambda x, w: jnp.tanh(x @ w).sum(), *shapes, cluster="v5e:8x8", mesh=mesh, searcher="dynamic_programming")


@pytest.mark.slow
def test_a_pipeline_runs_under_the_mesh_in_force():
    """Programs of stages are on meshes of their own, where the constraints of the step are on the mesh of `jax.set_mesh`."""
    mesh = jax.make_mesh((1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jax.lax.with_sharding_constraint(h + jnp.tanh(h @ w), P(("data", "fsdp")))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    args = [np.eye(8, dtype=np.float32)] * 2, np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    with jax.set_mesh(mesh):
        strategy = autoshard.search(step, *args, cluster="cpu:8", stages=2, microbatches=2)
        found, expected = strategy.apply(step)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6), found, expected)
