"""The user's way: search, apply, run, save, load, check."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from problems import eager_cluster
from programs import PROGRAMS, concrete, mlp

import autoshard
from autoshard.api.prepared import RESERVE
from autoshard.api.step import bucket_options
from autoshard.cluster import Cluster
from autoshard.verify import collectives_of

SEARCHERS = ("data_parallel", "fully_sharded", "recursive_programming")
QUICK = {  # of three plans for each program those that share least: the searched one, and the baselines where control flow differs
    *((program, "recursive_programming") for program in PROGRAMS),
    *((program, searcher) for program in ("mlp", "lstm", "control_flow") for searcher in SEARCHERS),
    ("gpt_scan", "fully_sharded"),
    ("convnet", "fully_sharded"),
    ("moe", "data_parallel"),
}


def pairs_of(programs):
    """Each program with each searcher; those that are not `QUICK` run with the slow tests."""
    pairs = ((program, searcher) for program in programs for searcher in SEARCHERS)
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow, id="-".join(pair)) for pair in pairs]


def is_spec(x):
    return isinstance(x, P)


def assert_close(got, wanted, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1e-3, np.abs(b).max(initial=0)), rtol=0)


@pytest.mark.parametrize(("program", "searcher"), pairs_of(PROGRAMS))
def test_applied_steps_compute_the_same(program, searcher):
    """On eight devices, heavily sharded, every program gives the unsharded numbers, twice in a row where it steps."""
    fn, args = PROGRAMS[program]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), searcher=searcher)
    real = concrete(args)
    step = strategy.apply(fn)
    wanted = jax.jit(fn)(*real)
    got = step(*real)
    assert_close(got, wanted)
    for result, spec in zip(jax.tree.leaves(got), jax.tree.leaves(strategy.out_specs, is_leaf=is_spec), strict=True):
        assert result.sharding.is_equivalent_to(jax.sharding.NamedSharding(result.sharding.mesh, spec), result.ndim)
    if isinstance(wanted, tuple) and jax.tree.structure(wanted[0]) == jax.tree.structure(real[0]):
        assert_close(step(got[0], *real[1:]), jax.jit(fn)(wanted[0], *real[1:]), 1e-4)


@pytest.mark.parametrize(("program", "searcher"), pairs_of(["mlp", "convnet", "gpt", "gpt_scan", "control_flow"]))
def test_collectives_are_those_predicted(program, searcher):
    """The compiled module sends what the strategy says, within a fiftieth of its bytes, on one mesh axis."""
    fn, args = PROGRAMS[program]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), searcher=searcher, mesh={"data": 8})
    text = strategy.apply(fn).lower(*args).compile().as_text()
    sent = sum(c.bytes * c.count for c in collectives_of(text, strategy.record.mesh))
    predicted = sum(c.bytes * c.count for c in strategy.cost.collectives)
    assert sent == pytest.approx(predicted, rel=0.02)


def test_state_keeps_its_spec_and_donation_is_kept():
    """Returned state lies as its argument does, and a donated one gives its memory back."""
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), donate_argnums=0, mesh={"data": 8})
    assert jax.tree.leaves(strategy.in_specs[0]) == jax.tree.leaves(strategy.out_specs[0])
    step = strategy.apply(fn)
    state, *batch = strategy.shard(*concrete(args))
    new, _ = step(state, *batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert "may-alias" in step.lower(*args).compile().as_text()
    step(new, *batch)


def test_specs_are_structured_as_arguments_and_results():
    """One PartitionSpec a leaf, in the same containers, also after loading from a file."""
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster="cpu:8")
    assert jax.tree.structure(strategy.in_specs, is_leaf=is_spec) == jax.tree.structure(args)
    assert jax.tree.structure(strategy.out_specs, is_leaf=is_spec) == jax.tree.structure(jax.eval_shape(fn, *args))


def test_saved_strategies_run(tmp_path):
    """A strategy that was saved and loaded is equal, runs, and saves to the same bytes."""
    fn, args = PROGRAMS["gpt"]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 4, "model": 2})
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and hash(loaded) == hash(strategy) and not any(key.endswith("_seconds") for key in loaded.stats)
    assert loaded != autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 8}) != strategy.record
    real = concrete(args)
    assert_close(loaded.apply(fn)(*loaded.shard(*real)), jax.jit(fn)(*real))
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "s.json").read_bytes()


def test_a_strategy_refuses_another_program():
    """Applied to a different function, the first call says that the strategy is for another program."""
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster="cpu:8")
    step = strategy.apply(lambda *args: jax.tree.map(lambda x: x * 2, args[0]))
    with pytest.raises(autoshard.StrategyError, match="Search again"):
        step(*concrete(args))


def test_init_makes_the_state_sharded():
    """The state comes out where the strategy wants it, made by a function that never holds it whole."""
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster="cpu:8", searcher="fully_sharded")
    state = strategy.init(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), args[0]))
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(strategy.in_specs[0], is_leaf=is_spec), strict=True):
        assert leaf.sharding.spec == spec or leaf.sharding.is_fully_replicated
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    with pytest.raises(autoshard.StrategyError, match="shapes of none"):
        strategy.init(lambda: jnp.zeros((3, 5)))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 128, use_bias=False, rngs=rngs)  # before the norm a bias has no gradient but rounding
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(128, 16, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def train_step(network, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda n: optax.softmax_cross_entropy_with_integer_labels(n(x), y).mean())(network)
    optimizer.update(network, gradients)
    return value


def make():
    network = Network(nnx.Rngs(0))
    return network, nnx.Optimizer(network, optax.adamw(1e-2), wrt=nnx.Param)


def test_modules_train_as_under_nnx_jit():
    """NNX modules and optimizers are updated in place: dropout, running statistics, moments and all."""
    x, y = jax.random.normal(jax.random.key(1), (64, 64)), jnp.arange(64) % 16
    plain, sharded = make(), make()
    reference = nnx.jit(train_step)
    step = autoshard.parallelize(train_step, cluster=eager_cluster(), donate_argnums=(0, 1))
    for _ in range(3):
        np.testing.assert_allclose(step(*sharded, x, y), reference(*plain, x, y), rtol=1e-5)
    assert_close(nnx.state(sharded[0], nnx.Param, nnx.BatchStat), nnx.state(plain[0], nnx.Param, nnx.BatchStat), 1e-4)
    assert any(op.primitive == "sqrt" for op in step.strategy._traced.graph.walk())
    network, optimizer = step.strategy.init(make)
    strategy = step.strategy
    np.testing.assert_allclose(step(network, optimizer, x, y), reference(*make(), x, y), rtol=1e-5)
    assert step.strategy is strategy  # an optimizer made again has other functions, which do the same


def test_the_decorator_searches_once_per_structure():
    """The first call searches, the second does not; other shapes search again; .search runs nothing."""

    @autoshard.parallelize(cluster="cpu:8")
    def double(x):
        return 2 * x

    with pytest.raises(autoshard.StrategyError, match="Call one of them"):
        double.strategy
    strategy = double.search(jax.ShapeDtypeStruct((16,), jnp.float32))
    np.testing.assert_array_equal(double(jnp.ones(16)), 2 * np.ones(16))
    assert double.strategy is strategy
    with pytest.warns(UserWarning, match="double is searched again"):
        double(jnp.ones(24))
    assert double.strategy is not strategy


def test_rematerialisation_survives():
    """What is computed again stays behind barriers, and as many products are compiled into the step as into the plain one."""
    fn, args = PROGRAMS["mlp_remat"]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 8})
    plain, ours = jax.jit(fn).lower(*args).as_text(), strategy.apply(fn).lower(*args).as_text()
    several = re.compile(r"optimization_barrier %\w+(#\d+)?, ")  # of one value are those behind combined sums
    assert len(several.findall(ours)) == len(several.findall(plain)) > 0
    assert ours.count("stablehlo.dot_general") == plain.count("stablehlo.dot_general")


def test_custom_gradients_survive():
    """Under jax.grad of the applied function a custom gradient is still the custom one."""

    @jax.custom_vjp
    def clipped(x):
        return x * 3

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.full_like(g, 7.0),))

    def f(x, w):
        return clipped(x @ w).sum()

    x, w = jnp.ones((16, 8)), jnp.ones((8, 8))
    step = autoshard.search(f, x, w, cluster=eager_cluster()).apply(f)
    np.testing.assert_allclose(jax.grad(step)(x, w), jax.grad(f)(x, w))
    np.testing.assert_allclose(jax.grad(step)(x, w)[0, 0], 7.0 * 8)


def test_pins_and_constraints_inside_are_kept():
    """A pinned argument and a constrained intermediate lie as told; a bare spec names an axis of the searched mesh."""

    def f(w, x):
        h = jax.lax.with_sharding_constraint(x @ w, P("rows", None))
        return jnp.tanh(h).sum()

    args = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    strategy = autoshard.search(f, *args, cluster=eager_cluster(), pins={"w": P(None, "columns")})
    assert {"rows", "columns"} <= set(strategy.mesh_shape)
    assert strategy.in_specs[0] == P(None, "columns")
    real = concrete(args)
    np.testing.assert_allclose(strategy.apply(f)(*real), jnp.tanh(real[1] @ real[0]).sum(), rtol=1e-4)


def test_evaluate_costs_a_given_sharding():
    """Data parallel, given by its argument specs, costs what the searcher of that name says; any cluster will do."""
    fn, args = PROGRAMS["gpt"]()
    specs = (P(), *[P("data")] * (len(args) - 1))
    given = autoshard.evaluate(fn, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    searched = autoshard.search(fn, *args, cluster="cpu:8", mesh={"data": 8}, searcher="data_parallel")
    assert given.cost.objective_seconds == pytest.approx(searched.cost.objective_seconds, rel=1e-9)
    assert_close(given.apply(fn)(*concrete(args)), jax.jit(fn)(*concrete(args)))
    mesh = {"data": 8, "model": 4}
    assert autoshard.evaluate(fn, *args, cluster="v5e:4x8", mesh=mesh, in_specs=specs).mesh_shape == mesh


@pytest.mark.parametrize(
    ("options", "error", "pieces"),
    [
        ({"cluster": "v9:8"}, autoshard.ClusterError, ["v9", "v5e"]),
        ({"mesh": {"data": 3}}, autoshard.ClusterError, ["8 devices", "data=3"]),
        ({"mesh": {"data": 0}}, autoshard.ShardingError, ["positive", "0"]),
        ({"mesh": 4}, autoshard.ShardingError, ["1 to 3", "4"]),
        ({"mesh": True}, autoshard.ShardingError, ["1 to 3", "True"]),
        ({"pins": {"nothing*": P("data")}}, autoshard.ShardingError, ["matches none", "state"]),
        ({"pins": {"state['params']*'w']": P("model")}, "mesh": {"data": 8}}, autoshard.ShardingError, ["'model'", "data=8"]),
        ({"pins": {"state['params'][0]['w']": P(None, None, "data")}}, autoshard.ShardingError, ["rank 2"]),
        ({"memory_limit_bytes": 10}, autoshard.InfeasibleError, ["smallest peak", "higher memory limit"]),
        ({"memory_limit_bytes": -1}, autoshard.ShardingError, ["positive number"]),
        ({"memory_limit_bytes": "12GB"}, autoshard.ShardingError, ["'12GB'", "12e9"]),
        ({"cluster": "v5x:4x4"}, autoshard.ClusterError, ["'v5x'", "Did you mean 'v5"]),
        ({"searcher": "magic"}, autoshard.SearcherError, ["magic", "recursive_programming"]),
        ({"searcher": "fsdp"}, autoshard.SearcherError, ["Did you mean 'fully_sharded'?"]),
        ({"searcher": "dynamic"}, autoshard.SearcherError, ["Did you mean 'dynamic_programming'?"]),
        ({"donate_argnums": 9}, autoshard.TraceError, ["donate_argnums", "9"]),
    ],
)
def test_bad_input_is_told(options, error, pieces):
    """Each mistake is one paragraph: the rule, what was got, what to do."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(error) as caught:
        autoshard.search(fn, *args, **{"cluster": "cpu:8", **options})
    message = str(caught.value)
    assert "\n" not in message
    assert all(piece in message for piece in pieces), message


def test_a_number_as_the_mesh_is_how_many_axes_it_may_have():
    """More axes give more meshes to search, and an answer that is no slower."""
    fn, args = PROGRAMS["mlp"]()
    found = [autoshard.search(fn, *args, cluster="v5p:2x2x2", mesh=most) for most in (1, 2, 3)]
    assert len(found[0].mesh_shape) == 1
    assert found[0].stats["meshes"] < found[1].stats["meshes"] < found[2].stats["meshes"]
    seconds = [strategy.cost.makespan_seconds for strategy in found]
    assert seconds == sorted(seconds, reverse=True)
    unnamed = autoshard.search(fn, *args, cluster="v5p:2x2x2")
    assert unnamed.stats["meshes"] == found[1].stats["meshes"]


def test_indivisible_specs_are_told():
    """A spec that does not divide its dimension names the dimension, the axes and what to do."""
    args = (jax.ShapeDtypeStruct((6, 4), jnp.float32),)
    with pytest.raises(autoshard.ShardingError, match=r"dim 0 of x has size 6.*\('data',\) of size 8"):
        autoshard.evaluate(lambda x: x, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=(P("data"),))


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"mesh": "data"}, ["axis sizes by name", "'data'"]),
        ({"mesh": {}}, ["axis sizes by name"]),
        ({"pins": [P()]}, ["pins map argument paths"]),
        ({"pins": {"state*": None}}, ["PartitionSpec", "P()"]),
        ({"donate_argnums": None}, ["donate_argnums"]),
        ({"donate_argnums": True}, ["donate_argnums"]),
    ],
)
def test_options_of_a_wrong_type_are_told(options, pieces):
    """What is no mesh, no pin, no position is refused in words."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(autoshard.AutoshardError) as caught:
        autoshard.search(fn, *args, **{"cluster": "cpu:8", **options})
    assert all(piece in str(caught.value) for piece in pieces), caught.value


def test_a_jax_mesh_is_a_mesh():
    """Axis names and sizes may come as a jax.sharding.Mesh."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    fn, args = PROGRAMS["mlp"]()
    assert autoshard.search(fn, *args, cluster="cpu:8", mesh=mesh).mesh_shape == {"a": 4, "b": 2}


def test_leaves_are_placed_by_their_own_specs():
    """Named tuples whose fields are not in alphabetical order, and dicts of more than ten integers, keep their leaves apart."""

    class State(NamedTuple):
        w: jax.Array
        b: jax.Array

    def step(state, table):
        return State(state.w * 2, state.b * 3), {key: x + 1 for key, x in table.items()}

    x = jnp.ones((16, 16))
    args = State(x, x), {key: x for key in range(12)}
    pins = {"state.w": P("data"), "state.b": P(None, "data"), "table[2]": P("data")}
    strategy = autoshard.search(step, *args, cluster="cpu:8", mesh={"data": 8}, pins=pins)
    state, table = strategy.shard(*args)
    assert (state.w.sharding.spec, state.b.sharding.spec) == (P("data", None), P(None, "data"))
    assert table[2].sharding.spec == P("data", None)
    made = strategy.init(lambda: State(x, x))
    assert (made.w.sharding.spec, made.b.sharding.spec) == (P("data", None), P(None, "data"))
    with pytest.raises(autoshard.StrategyError, match="structured otherwise"):
        strategy.shard((x, x))


def test_calls_may_name_arguments():
    """Keywords go to their positions; one that is none is refused."""

    def f(x, y):
        return x - y

    step = autoshard.search(f, jnp.ones(8), jnp.ones(8), cluster="cpu:8").apply(f)
    np.testing.assert_array_equal(step(y=jnp.ones(8), x=3 * jnp.ones(8)), 2 * np.ones(8))
    with pytest.raises(autoshard.TraceError, match="does not fit"):
        step(jnp.ones(8), z=1)


def test_depthwise_convolutions_run_sharded():
    """A grouped convolution whose batch is sharded runs per shard, forward and backward."""

    def f(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8).sum()

    w, x = jax.random.normal(jax.random.key(0), (3, 3, 1, 8)), jax.random.normal(jax.random.key(1), (16, 6, 6, 8))
    g = jax.value_and_grad(f)
    strategy = autoshard.search(g, w, x, cluster=eager_cluster(), mesh={"data": 8}, pins={"x": P("data")})
    assert_close(strategy.apply(g)(w, x), g(w, x))


def test_a_sharded_function_stands_for_what_it_was_made_of():
    """A decorated or applied function is searched, evaluated, applied and verified as the plain one is."""
    fn, args = mlp(layers=1)
    decorated = autoshard.parallelize(fn, cluster="cpu:8", mesh={"data": 8})
    strategy = autoshard.search(decorated, *args, cluster="cpu:8", mesh={"data": 8})
    assert strategy.record.program.fingerprint == autoshard.search(fn, *args, cluster="cpu:8", mesh={"data": 8}).record.program.fingerprint
    assert autoshard.verify(strategy, strategy.apply(decorated), *args).exact


def test_arguments_that_do_not_fit_the_function_are_told():
    """A tuple in the place of what is in it, and an argument that is missing, are told as that; the error says what to pass."""
    x = jnp.ones((8, 8))
    for args, advice in (
        (((x, x),), r"and missing a required argument: 'b'. Pass the tuple's elements one by one, as \*args"),
        ((x,), "Pass all"),
    ):
        with pytest.raises(autoshard.TraceError, match=advice):
            autoshard.search(lambda a, b: a @ b, *args, cluster="cpu:8")


def test_another_shape_is_searched_again_with_a_warning():
    """A decorated step that is called with another batch says what it waits for, once."""

    @autoshard.parallelize(cluster="cpu:1", progress=False)
    def scaled(w, batch):
        return batch["x"] @ w

    w = jnp.ones((8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            scaled(w, {"x": jnp.ones((16, 8))})
    with pytest.warns(
        UserWarning, match=r"scaled is searched again for args\[1\]\['x'\] of float32\[4,8\], after float32\[16,8\]"
    ) as caught:
        np.testing.assert_allclose(scaled(w, {"x": jnp.ones((4, 8))}), 8.0 * jnp.ones((4, 8)))
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"of bfloat16\[4,8\], after float32\[4,8\]. Pass the same dtypes"):
        scaled(w, {"x": jnp.ones((4, 8), jnp.bfloat16)})
    with pytest.warns(UserWarning, match="arguments of another structure"):
        scaled(w, {"x": jnp.ones((4, 8)), "y": jnp.ones(4)})


def test_parallelize_takes_its_options_by_name():
    """A cluster in the function's place is refused at once, with how to write it."""
    with pytest.raises(autoshard.TraceError, match=r"options by name, got 'cpu:8'. Write @parallelize\(cluster='cpu:8'\)"):
        autoshard.parallelize("cpu:8")


def test_what_is_misspelt_is_said_where_the_decorator_stands():
    """A searcher or a cluster that there is not is refused before any call."""
    with pytest.raises(autoshard.SearcherError, match="dynamic_programming"):
        autoshard.parallelize(cluster="cpu:8", searcher="dynamic_program")
    with pytest.raises(autoshard.ClusterError, match="v5e"):
        autoshard.parallelize(cluster="v5x:2x4")


def test_a_decorated_step_is_searched_without_its_devices():
    """A search alone asks for no devices; the first call does."""
    step = autoshard.parallelize(lambda w, x: jnp.tanh(x @ w), cluster="cpu:32", progress=False)
    w, x = jnp.ones((64, 64)), jnp.ones((4096, 64))
    assert step.search(w, x).record.mesh.size == 32
    with pytest.raises(autoshard.ClusterError, match="has 32, got 8"):
        step(w, x)


def test_clusters_of_files_are_taken_wherever_clusters_are(tmp_path):
    """What `calibrate` writes is given by its path, as text or as a path."""
    file = tmp_path / "cluster.toml"
    Cluster.parse("v5e:2x2").save(file)
    w = jnp.ones((64, 64))
    for path in (file, str(file)):
        assert autoshard.search(jnp.dot, w, w, cluster=path).record.cluster["name"] == "v5e:2x2"
    with pytest.raises(autoshard.ClusterError, match=r"nowhere.toml' cannot be read"):
        autoshard.search(jnp.dot, w, w, cluster="nowhere.toml")


def test_axes_that_shard_nothing_are_told():
    """Where sending costs more than sharing saves, the notes say how many devices would do."""
    strategy = autoshard.search(lambda w, x: jnp.tanh(x @ w), jnp.ones((64, 64)), jnp.ones((16, 64)), cluster="h100:8x4")
    assert any("shards nothing: its devices repeat each other's work, and 1 device would be as fast" in note for note in strategy.notes)


def test_repeated_work_is_told_whatever_else_is_sharded():
    """A vector that is sharded hides no axis whose devices repeat the products; nothing is told of a tenth or less."""

    def product_and_vector(w, x, b):
        return x @ w, b * 2

    w, x, b = jnp.ones((15, 15)), jnp.ones((7, 15)), jnp.ones(1600)
    options = {"cluster": "v5e:4x4", "mesh": {"data": 16}}
    strategy = autoshard.evaluate(product_and_vector, w, x, b, in_specs={"b": P("data")}, **options)
    assert "mesh axis data of size 16 repeats 100 % of the work of all products: 16 devices do the same" in strategy.notes
    split = autoshard.evaluate(product_and_vector, w, jnp.ones((16, 15)), b, in_specs={"x": P("data")}, **options)
    assert not any("repeats" in note for note in split.notes)


def test_products_that_an_axis_repeats_say_which_size_does_not_divide():
    """Twelve heads of 63 positions on eight devices: notes name the products, their share of the work and the sizes; on four none do."""

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k))
        return jnp.einsum("hst,thd->shd", weights, v)

    heads = jax.ShapeDtypeStruct((63, 12, 5), jnp.float32)
    on_eight, on_four = (autoshard.search(attention, heads, heads, heads, cluster=eager_cluster(f"cpu:{n}"), mesh={"a": n}) for n in (8, 4))
    told = [note for note in on_eight.notes if "does not split dot_general at" in note]
    assert len(told) == 2 and all("50 % of the work of all products: 5 and 12 and 63 do not divide by 8" in note for note in told)
    assert not any("does not split" in note for note in on_four.notes)


def test_donated_arguments_are_not_taken_twice():
    """What an earlier call used up is told by its path, where jaxlib would crash."""

    @autoshard.parallelize(cluster="cpu:8", donate_argnums=0, progress=False)
    def step(state, x):
        return {"w": state["w"] + x.T @ x}

    state, x = {"w": jnp.ones((64, 64))}, jnp.ones((512, 64))
    kept = step(state, x)
    step(kept, x)
    with pytest.raises(autoshard.StrategyError, match=r"state\['w'\] was passed to an earlier one"):
        step(kept, x)


@pytest.mark.parametrize("searcher", ["data_parallel", "dynamic_programming", "auto"])
def test_a_search_leaves_a_reserve_where_it_can(searcher):
    """What takes all of a device's memory, as near as that is predicted, is returned where nothing smaller is there, and says so."""
    fn, args = mlp()
    options = {"searcher": searcher, "mesh": {"data": 8}}
    free = autoshard.search(fn, *args, cluster="cpu:8", **options)
    smallest = autoshard.search(fn, *args, cluster="cpu:8", **options | {"searcher": "fully_sharded"})
    least = min(found.cost.peak_bytes for found in (free, smallest)) if searcher != "data_parallel" else free.cost.peak_bytes

    def searched(of_least):
        cluster = dataclasses.replace(Cluster.parse("cpu:8"), memory_limit_bytes=int(least * of_least))
        return autoshard.search(fn, *args, cluster=cluster, **options)

    def warned(strategy):
        return any("ask the compiler" in note for note in strategy.notes)

    assert not warned(free) and not warned(searched(1.03))
    barely = searched(1.01)
    assert warned(barely) == (barely.cost.peak_bytes > least * 1.01 * (1 - RESERVE)) and barely.cost.peak_bytes <= least * 1.01
    assert warned(barely) or searcher != "data_parallel"  # of which there is but one
    with pytest.raises(autoshard.InfeasibleError):
        searched(0.25)
    asked = autoshard.search(fn, *args, cluster="cpu:8", memory_limit_bytes=int(least * 1.01), **options)
    assert not warned(asked) and asked.cost.peak_bytes <= least * 1.01


@pytest.mark.parametrize("searched_weak", [True, False])
def test_weakly_typed_state_may_become_strong(searched_weak):
    """A temperature made by `jnp.log` of a number is weakly typed until its first update; the strategy is of that step all the same."""

    def step(state, x):
        loss, gradient = jax.value_and_grad(lambda state: jnp.mean((jnp.exp(state["scale"]) * x @ state["w"]) ** 2))(state)
        return jax.tree.map(lambda a, b: (a - 1e-3 * b).astype(a.dtype), state, gradient), loss

    state, x = {"w": jnp.full((16, 16), 0.1, jnp.float32), "scale": jnp.log(0.7)}, jnp.ones((16, 16))
    assert state["scale"].weak_type
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type and searched_weak), state)
    applied = autoshard.search(step, described, x, cluster=eager_cluster()).apply(step)
    wanted, found = state, state
    for _ in range(3):
        wanted, loss = jax.jit(step)(wanted, x)
        found, got = applied(found, x)
        assert_close(got, loss)
    other = {**state, "scale": jnp.log(0.7).astype(jnp.bfloat16)}
    with pytest.raises(autoshard.StrategyError):
        applied(other, x)


def test_compiler_options_reach_the_compiler():
    """What `apply` is given goes to `jax.jit`; a strategy knows those of its cluster that overlap more, and there are none for CPUs."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    args = jnp.ones((16, 8)), jnp.ones((32, 16))
    strategy = autoshard.search(step, *args, cluster="cpu:8", searcher="fully_sharded")
    assert strategy.compiler_options == {}
    of_tpus = autoshard.search(step, *args, cluster="v5e:2x4", searcher="fully_sharded")
    assert "xla_enable_async_reduce_scatter_fusion" in of_tpus.compiler_options
    with pytest.raises(Exception, match="no_such_option"):
        strategy.apply(step, compiler_options={"no_such_option": "1"})(*args)
    given = strategy.apply(step, compiler_options={"xla_cpu_enable_fast_math": False})
    np.testing.assert_allclose(given(*args), step(*args), rtol=1e-5)
    with pytest.raises(Exception, match="no_such_option"):
        autoshard.parallelize(step, cluster="cpu:8", compiler_options={"no_such_option": "1"})(*args)


def test_buckets_are_the_compilers():
    """The limit of what one collective combines is an option of the compiler; where there is none, a warning says so."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    args = jnp.ones((16, 8)), jnp.ones((32, 16))
    strategy = autoshard.search(step, *args, cluster="cpu:8", searcher="data_parallel")
    with pytest.warns(UserWarning, match="no effect on 'cpu'"):
        np.testing.assert_allclose(strategy.apply(step, bucket_bytes=2**20)(*args), step(*args), rtol=1e-5)
    with pytest.warns(UserWarning, match="no effect on 'cpu'"):
        autoshard.parallelize(step, cluster="cpu:8", bucket_bytes=0)(*args)
    for wrong in (-1, 2.5e7, True):
        with pytest.raises(autoshard.StrategyError, match=r"bucket_bytes is a whole number of bytes.*got"):
            strategy.apply(step, bucket_bytes=wrong)
    assert bucket_options("gpu", 5)["xla_gpu_all_reduce_combine_threshold_bytes"] == 5
