"""Shardings that users ask for, wherever they write them: kept in the compiled program, or named in a note or an error."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ShardingError
from tests.problems import eager_cluster

MESH = {"data": 2, "model": 4}
INIT = nn.initializers.lecun_normal()
TX = optax.sgd(0.1, momentum=0.9)
RULES = (("batch", "data"), ("embed", None), ("heads", "model"), ("hidden", "model"))


def mesh_of(shape=None):
    shape = shape or MESH
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def search(fn, *args, **options):
    return autoshard.search(fn, *args, **{"cluster": eager_cluster(), "searcher": "recursive_programming"} | options)


def specs(strategy) -> dict[str, P]:
    return {tensor.path: P(*tensor.spec) for tensor in strategy.record.arguments}


def check(strategy, fn, args, wanted, layouts, rtol=2e-4):
    """A run gives the wanted result, and the compiled program takes arguments of these paths in these layouts."""
    step = strategy.apply(fn)
    compiled = jax.tree.leaves(step.lower(*args).compile().input_shardings[0])
    found = dict(zip(specs(strategy), compiled, strict=True))
    shapes = {tensor.path: tensor.shape for tensor in strategy.record.arguments}
    for path, spec in layouts.items():
        assert found[path].is_equivalent_to(NamedSharding(strategy.mesh, spec), len(shapes[path])), path
    made = step(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), made, wanted)


# -- programs ---------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, kernel_init=nn.with_partitioning(INIT, (None, "model")), name="up")(x)
        return nn.Dense(16, kernel_init=nn.with_partitioning(INIT, ("model", None)), name="down")(nn.relu(x))


def linen_step(state, x, y):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def linen_state(module, x):
    params = module.init(jax.random.key(0), x)["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=TX)


def mlp_args():
    return linen_state(Mlp(), jnp.ones((32, 16))), array(32, 16), array(32, 16, seed=1)


def kernels(path="state.{}['{}']['kernel'].value"):
    trees = ("params", "opt_state[0].trace")
    layouts = {"up": P(None, "model"), "down": P("model", None)}
    return {path.format(tree, name): spec for tree in trees for name, spec in layouts.items()}


class Block(nn.Module):
    """A transformer block with logical axes, of parameters and of activations."""

    @nn.compact
    def __call__(self, x):
        x = nn.with_logical_constraint(x, ("batch", None, "embed"))
        dense = lambda n, name, *names: nn.Dense(n, use_bias=False, kernel_init=self.logical(*names), name=name)  # noqa: E731
        q, k, v = (dense(32, name, "embed", "heads")(nn.LayerNorm()(x)).reshape(*x.shape[:2], 4, 8) for name in "qkv")
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + dense(32, "out", "heads", "embed")(mixed)
        hidden = nn.gelu(nn.Dense(64, kernel_init=self.logical("embed", "hidden"), name="up")(nn.LayerNorm()(x)))
        hidden = nn.with_logical_constraint(hidden, ("batch", None, "hidden"))
        return x + nn.Dense(32, kernel_init=self.logical("hidden", "embed"), name="down")(hidden)

    def logical(self, *names):
        return nn.with_logical_partitioning(INIT, names)


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, None, "out"), sharding_rules=(("out", "model"),))
        self.conv = nnx.Conv(3, 16, (3, 3), kernel_init=split, rngs=rngs)
        self.head = nnx.Linear(16, 8, kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None)), rngs=rngs)

    def __call__(self, images):
        return self.head(nnx.relu(self.conv(images)).mean((1, 2)))


def nnx_step(model, optimizer, images, labels):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def conv_state():
    model = ConvNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def plain_step(params, x, y):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def plain_args():
    return {"up": array(16, 64), "down": array(64, 16)}, array(32, 16), array(32, 16, seed=1)


# -- shardings of arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("searcher", ["auto", "fully_sharded", "tensor_parallel", "dynamic_programming"])
def test_arrays_keep_their_shardings(searcher):
    """On their mesh, whatever the searcher would choose; arrays on one device are free."""
    params, x, y = plain_args()
    mesh = mesh_of()
    placed = {"up": jax.device_put(params["up"], NamedSharding(mesh, P("model", "data"))), "down": params["down"]}
    x = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    strategy = search(plain_step, placed, x, y, pins="arguments", searcher=searcher)
    assert strategy.mesh_shape == MESH and not any("arguments'" in note for note in strategy.notes)
    check(strategy, plain_step, (placed, x, y), plain_step(params, x, y), {"params['up']": P("model", "data"), "x": P(None, "data")})


def test_abstract_arguments_keep_their_shardings(tmp_path):
    """Those of an abstract mesh too; and a strategy that was saved has them."""
    args = plain_args()
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    shapes[0]["down"] = jax.ShapeDtypeStruct((64, 16), "float32", sharding=NamedSharding(mesh, P(None, ("data", "model"))))
    strategy = search(plain_step, *shapes, pins="arguments")
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    check(loaded, plain_step, args, plain_step(*args), {"params['down']": P(None, ("data", "model"))})


def test_what_is_given_comes_first():
    """A spec by path comes before the array's sharding, with a note; other arrays keep theirs."""
    args = jax.device_put(plain_args(), NamedSharding(mesh_of(), P("model")))
    strategy = search(plain_step, *args, pins=("arguments", {"params['up']": P(None, "model")}))
    found = specs(strategy)
    assert found["params['up']"] == P(None, "model") and found["params['down']"] == found["x"] == P("model", None)
    assert any("params['up'], which has P('model') and gets P(None, 'model'): pins say so" in note for note in strategy.notes)


def test_arrays_nobody_asked_to_keep_are_named():
    """In a note, where the strategy has them elsewhere; no note where it agrees."""
    params, x, y = plain_args()
    mesh = mesh_of({"x": 8})
    placed = jax.device_put(params, NamedSharding(mesh, P("x")))
    noted = search(plain_step, placed, x, y)
    assert any("2 arguments with shardings on a mesh are" in note and "pins='arguments'" in note for note in noted.notes)
    agreed = search(plain_step, placed, x, y, pins={"params*": P("x")}, mesh={"x": 8})
    assert not any("shardings on a mesh" in note for note in agreed.notes)
    pinned = search(plain_step, placed, x, y, pins={"params*": P(None, "x")}, mesh={"x": 8})
    assert any("which has P('x') and gets P(None, 'x'): pins say so" in note for note in pinned.notes)


def test_arrays_on_two_meshes_are_refused():
    """With both named; so is a mesh that is given and has other sizes, and a cluster of another size."""
    params, x, y = plain_args()
    x = jax.device_put(x, NamedSharding(mesh_of({"data": 8}), P("data")))
    placed = jax.device_put(params, NamedSharding(mesh_of(), P("data")))
    with pytest.raises(ShardingError, match=r"params\['down'\] .*data=2 x model=4.* x .*data=8"):
        search(plain_step, placed, x, y, pins="arguments")
    with pytest.raises(ShardingError, match=r"mesh= has data=4 x model=2, while params\['down'\] \(by its array\) is on data=2 x model=4"):
        search(plain_step, placed, y, y, pins="arguments", mesh={"data": 4, "model": 2})
    with pytest.raises(ShardingError, match="of 8 devices, and v5e:4x4 has 16"):
        search(plain_step, placed, y, y, pins="arguments", cluster="v5e:4x4")


def test_nothing_to_keep_is_noted():
    """Arrays on one device have no sharding; those that are whole on all devices stay so, which a note says of what is no state."""
    args = plain_args()
    assert any("keeps nothing" in note for note in search(plain_step, *args, pins="arguments").notes)
    whole = jax.device_put(args, NamedSharding(mesh_of({"data": 8}), P()))
    strategy = search(plain_step, *whole, pins="arguments")
    assert set(specs(strategy).values()) == {P(None, None)}
    assert any("x, y stay whole" in note and "batch_axes=" in note for note in strategy.notes)
    split = search(plain_step, *whole, pins="arguments", batch_axes="data")
    assert specs(split)["x"] == specs(split)["y"] == P("data", None)
    assert any("x is split as batch_axes say, not P() by its array" in note for note in split.notes)


# -- Flax's metadata ---------------------------------------------------------------------------------------------------------


def test_linen_partitioning_is_kept(tmp_path):
    """Of parameters and of the optimizer state that inherits it; a saved strategy has it; a mesh that is searched has its axes."""
    args = mlp_args()
    wanted = jax.jit(linen_step)(*args)
    strategy = search(linen_step, *args, pins="arguments", mesh=MESH, batch_axes="data", donate_argnums=0)
    check(strategy, linen_step, jax.tree.map(jnp.array, args), wanted, kernels())
    assert specs(strategy)["x"][0] == specs(strategy)["y"][0] == "data"
    strategy.save(tmp_path / "s.json")
    check(autoshard.load(tmp_path / "s.json"), linen_step, jax.tree.map(jnp.array, args), wanted, kernels())
    assert "model" in search(linen_step, *args, pins="arguments").mesh_shape


def test_linen_boxes_constrain_inside():
    """As they do under a mesh; what they are stored as is free, and named where it differs."""
    args = mlp_args()
    strategy = search(linen_step, *args, searcher="fully_sharded", mesh=MESH)
    constrained = [op for op in strategy._traced.graph.walk() if op.primitive == "sharding_constraint"]
    assert len(constrained) >= 2
    (note,) = [note for note in strategy.notes if "4 arguments with Flax metadata are sharded otherwise" in note]
    assert "has P('model') and gets" in note and "pass pins='arguments'" in note
    check(strategy, linen_step, args, jax.jit(linen_step)(*args), {})


def test_linen_metadata_is_of_the_mesh_in_force():
    """Under jax.set_mesh, where arrays are made whole on all devices: their metadata counts, with a note."""
    args = mlp_args()
    wanted = jax.jit(linen_step)(*args)
    with jax.set_mesh(mesh_of()):
        args = jax.tree.map(jnp.array, args)
        strategy = search(linen_step, *args, pins="arguments")
        assert strategy.mesh_shape == MESH
        assert any("are split as their Flax metadata says" in note for note in strategy.notes)
        check(strategy, linen_step, args, wanted, kernels())


def test_metadata_against_an_array_is_refused():
    """Where both split the argument, and otherwise; both are named, and a spec by path settles it."""
    state, x, y = mlp_args()
    up = state.params["up"]["kernel"]
    moved = up.replace(value=jax.device_put(up.value, NamedSharding(mesh_of(), P("data"))))
    state = state.replace(params={**state.params, "up": {**state.params["up"], "kernel": moved}})
    with pytest.raises(ShardingError, match=r"P\('data'\) by its array, and P\(None, 'model'\) by its nn.Partitioned metadata"):
        search(linen_step, state, x, y, pins="arguments")
    settled = search(linen_step, state, x, y, pins=("arguments", {"state.params['up']['kernel'].value": P("data")}))
    assert specs(settled)["state.params['up']['kernel'].value"] == P("data", None)


@pytest.mark.slow
def test_linen_logical_axes_follow_their_rules():
    """Of parameters, optimizer state and activations; also once the rules are not in force any more."""
    state, x = linen_state(Block(), jnp.ones((8, 4, 32))), array(8, 4, 32)
    wanted = jax.jit(linen_step)(state, x, x)
    with nn.logical_axis_rules(RULES):
        strategy = search(linen_step, state, x, x, pins="arguments", batch_axes="data", mesh=MESH)
    layouts = {"q": P(None, "model"), "out": P("model"), "up": P(None, "model"), "down": P("model")}
    layouts = {
        f"state.{tree}['{name}']['kernel'].value": spec for tree in ("params", "opt_state[0].trace") for name, spec in layouts.items()
    }
    graph = strategy._traced.graph
    inside = [op.params["sharding"].spec for op in graph.walk() if op.primitive == "sharding_constraint"]
    assert P("data", None, "model") in inside and P(None, "model") in inside
    check(strategy, lambda state, x, y: linen_step(state, x, y), (state, x, x), wanted, layouts)  # traced again
    assert specs(strategy)["x"][0] == "data"


def test_logical_axes_without_rules_are_named():
    """Without any rule in an error; one of several is left unsharded, as Flax does, with a note."""
    state, x = linen_state(Block(), jnp.ones((8, 4, 32))), array(8, 4, 32)
    with pytest.raises(ShardingError, match=r"has 'hidden', 'embed' without any.*nn.logical_axis_rules\(\(\('hidden', 'model'\)"):
        search(linen_step, state, x, x, pins="arguments")
    assert any("has logical axes 'hidden', 'embed' and gets" in note for note in search(linen_step, state, x, x).notes)
    with nn.logical_axis_rules((("hidden", "model"), ("embed", None))):
        strategy = search(linen_step, state, x, x, pins="arguments", mesh=MESH)
    assert specs(strategy)["state.params['up']['kernel'].value"] == P(None, "model")
    assert any("there is no rule for logical axis 'heads'" in note for note in strategy.notes)


@pytest.mark.slow
def test_nnx_partitioning_is_kept(tmp_path):
    """Of a model's variables and of its optimizer's, with rules of a variable's own, and where variables were made on a mesh."""
    images, labels = array(16, 4, 4, 3), np.arange(16) % 8
    with nnx.use_eager_sharding(False):
        wanted = nnx.jit(nnx_step)(*conv_state(), images, labels)
        strategy = search(nnx_step, *conv_state(), images, labels, pins="arguments", mesh=MESH, batch_axes="data")
        layouts = {"conv.kernel": P(None, None, None, "model"), "head.kernel": P("model")}
        places = ("model.{}", "optimizer.opt_state[0].trace.{}")
        kept = {place.format(name): spec for place in places for name, spec in layouts.items()}
        assert specs(strategy)["images"][0] == specs(strategy)["labels"][0] == "data"
        check(strategy, nnx_step, (*conv_state(), images, labels), wanted, kept)
        strategy.save(tmp_path / "s.json")
        check(autoshard.load(tmp_path / "s.json"), nnx_step, (*conv_state(), images, labels), wanted, kept)
    with jax.set_mesh(mesh_of()):
        on_mesh = conv_state()
        strategy = search(nnx_step, *on_mesh, images, labels, pins="arguments")
        assert strategy.mesh_shape == MESH
        check(strategy, nnx_step, (*on_mesh, images, labels), wanted, {"model.conv.kernel": P(None, None, None, "model")})


def test_nnx_names_without_a_rule_are_axes():
    """Of the mesh that is searched; of a given mesh they have to be, or have a rule, where others have one."""
    with nnx.use_eager_sharding(False), nnx.logical_axis_rules((("out", "model"),)):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("inner", "out"))
        layer = nnx.Linear(16, 64, kernel_init=init, rngs=nnx.Rngs(0))
        with pytest.raises(ShardingError, match=r"'inner' of layer.kernel .*Add a rule, \('inner', None\)"):
            search(lambda layer, x: layer(x), layer, array(32, 16), pins="arguments", mesh=MESH)
        found = search(lambda layer, x: layer(x), layer, array(32, 16), pins="arguments", mesh={"inner": 2, "model": 4})
    assert specs(found)["layer.kernel"] == P("inner", "model")
    with nnx.use_eager_sharding(False):
        found = search(lambda layer, x: layer(x), layer, array(32, 16), pins="arguments")
    assert specs(found)["layer.kernel"] == P("inner", "out")
    assert any("names 'inner', 'out', taken for axes of the mesh" in note for note in found.notes)


def test_inherited_metadata_of_another_shape_is_left():
    """As of factored second moments, which are vectors that inherit the names of a matrix."""
    params = Mlp().init(jax.random.key(0), jnp.ones((32, 16)))["params"]
    state = TrainState.create(apply_fn=Mlp().apply, params=params, tx=optax.adafactor(1e-2, min_dim_size_to_factor=8))
    strategy = search(linen_step, state, array(32, 16), array(32, 16), pins="arguments", mesh=MESH)
    assert specs(strategy)["state.params['up']['kernel'].value"] == P(None, "model")
    assert any("metadata of another shape is not kept" in note and "v_row" in note for note in strategy.notes)


def test_constraints_that_flax_cannot_apply_are_named():
    """As of `nn.DenseGeneral`, which names the axes of its kernel before that has them; the parameter is kept all the same."""
    layer = nn.DenseGeneral((4, 8), kernel_init=nn.with_logical_partitioning(INIT, ("embed", "heads", "kv")))
    x = array(32, 16)
    params = layer.init(jax.random.key(0), x)
    with nn.logical_axis_rules((*RULES, ("kv", None))):
        strategy = search(layer.apply, params, x, pins="arguments", mesh=MESH)
    assert any("Flax's sharding constraints inside the function are left out" in note for note in strategy.notes)
    check(strategy, layer.apply, (params, x), layer.apply(params, x), {"variables['params']['kernel'].value": P(None, "model")})


@pytest.mark.slow
def test_a_strategy_found_under_a_mesh_runs_without_it(tmp_path):
    """And the other way round: the axes of constraints count, not the mesh in force; NNX state is made on the strategy's mesh."""
    args = mlp_args()
    wanted = jax.jit(linen_step)(*args)
    with jax.set_mesh(mesh_of()):
        strategy = search(linen_step, *args, pins="arguments")
    strategy.save(tmp_path / "s.json")
    check(autoshard.load(tmp_path / "s.json"), linen_step, args, wanted, kernels())
    images, labels = array(16, 4, 4, 3), np.arange(16) % 8
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(conv_state)
    found = search(nnx_step, *abstract, images, labels, pins="arguments", mesh=MESH)
    assert found.init(conv_state)[0].head.kernel.get_value().sharding.spec == P("model", None)
    found = search(nnx_step, *abstract, images, labels, searcher="data_parallel", mesh={"batch": 8})
    model, optimizer = found.init(conv_state)
    assert model.head.kernel.get_value().sharding.spec == P(None, None)
    assert any("4 arguments with Flax metadata are sharded otherwise" in note for note in found.notes)
    with jax.set_mesh(mesh_of()):
        np.testing.assert_allclose(
            found.apply(nnx_step)(model, optimizer, images, labels), nnx_step(*conv_state(), images, labels), rtol=1e-4
        )


def test_what_arguments_have_is_evaluated():
    """As specs that are given, on the arguments' mesh or, of metadata alone, on one that is given."""
    params, x, y = plain_args()
    placed = jax.device_put(params, NamedSharding(mesh_of(), P("model")))
    found = autoshard.evaluate(plain_step, placed, x, y, cluster="cpu:8", in_specs="arguments")
    given = autoshard.evaluate(plain_step, params, x, y, cluster="cpu:8", mesh=MESH, in_specs={"params*": P("model")})
    assert found == given
    args = mlp_args()
    of_metadata = autoshard.evaluate(linen_step, *args, cluster="cpu:8", mesh=MESH, in_specs="arguments")
    assert {path: specs(of_metadata)[path] for path in kernels()} == kernels()
    with pytest.raises(ShardingError, match="Give the sizes of its axes: mesh="):
        autoshard.evaluate(linen_step, *args, cluster="cpu:8", in_specs="arguments")
    with pytest.raises(ShardingError, match=r"mesh= has data=4 x model=2, while params\['down'\]"):
        autoshard.evaluate(plain_step, placed, x, y, cluster="cpu:8", mesh={"data": 4, "model": 2}, in_specs="arguments")


# -- constraints, patterns, the batch ----------------------------------------------------------------------------------------


def test_constraints_and_patterns_are_kept():
    """Side by side; where a constraint on an argument says otherwise than its pin, a note names both."""

    def f(w, x):
        h = jax.lax.with_sharding_constraint(x, P("data"))
        return jnp.tanh(jax.lax.with_sharding_constraint(h @ w, P(None, "model"))).sum(0)

    args = array(16, 32), array(64, 16)
    strategy = search(f, *args, pins={"w": P("model"), "?": P("model")}, mesh=MESH)
    check(strategy, f, args, f_plain(*args), {"w": P("model"), "x": P("model")})
    assert any("x is pinned otherwise than the value constrained at" in note and "test_user_pins.py" in note for note in strategy.notes)
    with pytest.raises(ShardingError, match=r"'wx' matches none of 2. Near ones: "):
        search(f, *args, pins={"wx": P("model")}, mesh=MESH)


def f_plain(w, x):
    return jnp.tanh(x @ w).sum(0)


def test_constraints_on_another_mesh_are_refused():
    """Than the one that is given, or that of another constraint; both are named."""
    first, second = mesh_of(), mesh_of({"data": 8})

    def f(x):
        return jax.lax.with_sharding_constraint(x + 1, NamedSharding(first, P("data")))

    def g(x):
        return jax.lax.with_sharding_constraint(f(x) * 2, NamedSharding(second, P("data")))

    with pytest.raises(ShardingError, match=r"mesh= has data=4 x model=2, while the value constrained at .* is on data=2 x model=4"):
        search(f, array(16, 8), mesh={"data": 4, "model": 2})
    with pytest.raises(ShardingError, match=r"constrained at .* is on data=2 x model=4, while the value constrained at .* is on data=8"):
        search(g, array(16, 8))


@pytest.mark.parametrize("axes", ["data", ("data", "model"), "model"])
def test_the_batch_is_split_over_its_axes(axes):
    """Over these exactly, found without its name; other dimensions of it stay free."""
    args = plain_args()
    strategy = search(plain_step, *args, batch_axes=axes, mesh=MESH, donate_argnums=0)
    for path in ("x", "y"):
        assert specs(strategy)[path][0] == axes
    entry = {"x": P(axes, *specs(strategy)["x"][1:])}
    check(strategy, plain_step, jax.tree.map(jnp.array, args), plain_step(*args), entry)
    assert any("the batch is dimension 0 of x, y" in note for note in strategy.notes)


def test_the_batch_of_a_forward_pass_and_under_a_scan():
    """Weights are not taken for it where nothing is replaced, nor steps that come before it."""

    def scanned(params, xs):
        return jax.lax.scan(lambda total, x: (total + jnp.sum(jnp.tanh(x @ params)), None), 0.0, xs)[0]

    def forward(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params, x, _ = plain_args()
    assert specs(search(forward, params, x, batch_axes="data"))["x"][0] == "data"
    found = search(scanned, array(16, 64), array(6, 32, 16), batch_axes="data", mesh={"data": 8})
    assert specs(found)["xs"] == P(None, "data", None)


@pytest.mark.parametrize("padding", [True, False])
def test_a_batch_that_does_not_divide_is_still_the_batch(padding):
    """It is padded, or refused; another dimension that divides, such as of features, is not taken for it."""
    args = array(16, 64), array(30, 16)
    options = {"batch_axes": "data", "mesh": {"data": 8}, "padding": padding}

    def forward(params, x):
        return (x @ params).sum()

    if padding:
        assert specs(search(forward, *args, **options))["x"] == P("data", None)
    else:
        with pytest.raises(ShardingError, match="dimension 0 of x has size 30"):
            search(forward, *args, **options)


def test_batch_axes_that_do_not_fit_are_refused():
    """An axis that the mesh lacks, a batch that does not divide, a pin that says otherwise, a program without a batch."""
    args = plain_args()
    with pytest.raises(ShardingError, match="got 'fsdp', and the mesh has data=2 x model=4"):
        search(plain_step, *args, batch_axes="fsdp", mesh=MESH)
    uneven = args[0], array(30, 16), array(30, 16)
    with pytest.raises(ShardingError, match="split it into 8, and dimension 0 of x has size 30"):
        search(plain_step, *uneven, batch_axes=("data", "model"), mesh=MESH, padding=False)
    assert specs(search(plain_step, *uneven, batch_axes=("data", "model"), mesh=MESH))["x"][0] == ("data", "model")  # 32 with padding
    with pytest.raises(ShardingError, match=r"pins and batch_axes agree on the batch.*of x over these axes alone"):
        search(plain_step, *args, pins={"x": P("model")}, batch_axes="data", mesh=MESH)
    with pytest.raises(ShardingError, match="has none that can be split"):
        search(lambda w: w - 1, args[0]["up"], batch_axes="data", mesh=MESH, donate_argnums=0)
    with pytest.raises(ShardingError, match="'dta' looks like 'data' misspelt"):
        search(plain_step, *args, pins={"params*": P(None, "data")}, batch_axes="dta")
    for wrong in (("data", "data"), 3, ""):
        with pytest.raises(ShardingError, match="batch_axes is a mesh axis"):
            search(plain_step, *args, batch_axes=wrong)


def test_the_decorator_takes_them():
    """The first call's arguments decide; what is wrong is said where it is decorated."""
    params, x, y = plain_args()
    placed = jax.device_put(params, NamedSharding(mesh_of(), P(None, "model")))
    step = autoshard.parallelize(plain_step, cluster=eager_cluster(), pins="arguments", batch_axes="data", progress=False)
    made, wanted = step(placed, x, y), plain_step(params, x, y)
    assert made[0]["up"].sharding.spec == P(None, "model")
    np.testing.assert_allclose(made[1], wanted[1], rtol=1e-5)
    with pytest.raises(ShardingError, match="or are 'arguments'"):
        autoshard.parallelize(plain_step, pins="argument")
