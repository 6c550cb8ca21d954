"""The user's way: search, apply, run, save, load, check."""

from __future__ import annotations

import re
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
from autoshard.cluster import Cluster
from autoshard.run.step import platform_options

SEARCHERS = ("data_parallel", "fully_sharded", "recursive_programming")


def is_spec(x):
    return isinstance(x, P)


def assert_close(got, wanted, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1e-3, np.abs(b).max(initial=0)), rtol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("program", PROGRAMS)
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
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 4, "model": 2})
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and hash(loaded) == hash(strategy) and not any(key.endswith("_seconds") for key in loaded.stats)
    assert loaded != autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 8}) != strategy.record
    real = concrete(args)
    assert_close(loaded.apply(fn)(*loaded.shard(*real)), jax.jit(fn)(*real))
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "s.json").read_bytes()


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
    fn, args = PROGRAMS["mlp"]()
    specs = (P(), *[P("data")] * (len(args) - 1))
    given = autoshard.evaluate(fn, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    searched = autoshard.search(fn, *args, cluster="cpu:8", mesh={"data": 8}, searcher="data_parallel")
    assert given.cost.objective_seconds == pytest.approx(searched.cost.objective_seconds, rel=1e-9)
    assert_close(given.apply(fn)(*concrete(args)), jax.jit(fn)(*concrete(args)))
    mesh = {"data": 8, "model": 4}
    assert autoshard.evaluate(fn, *args, cluster="v5e:4x8", mesh=mesh, in_specs=specs).mesh_shape == mesh


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.sample(1)
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
    assert platform_options("gpu", 5)["xla_gpu_all_reduce_combine_threshold_bytes"] == 5
