"""Padded dimensions from the search to the step: planned where faster, placed, run, given back, saved."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import concrete, moe
from programs import tied_step as step
from rewrite.padding_checks import everywhere, same

import autoshard
from autoshard import Padding, ShardingError, StrategyError
from autoshard.lower import abstract_mesh
from autoshard.run.padded import Sizes
from autoshard.run.tracing import TracedOnce
from autoshard.trace import trace

VOCABULARY = 4999  # a prime


def arguments(vocabulary=VOCABULARY, width=64, length=16):
    tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
    shapes = {"embed": (vocabulary, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}, tokens, tokens


@pytest.fixture(scope="module")
def strategy():
    return autoshard.search(step, *arguments(), cluster="cpu:8", donate_argnums=0)


@pytest.fixture(scope="module")
def wanted():
    return jax.jit(step)(*concrete(arguments(), below=VOCABULARY))


def alike(got, wanted):
    for k, (a, b) in enumerate(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)):
        same(k, a, b, 2e-3)


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_as_fast_as_one_that_does(strategy):
    """Without an option; with padding=False a note says what stays whole, and why."""
    even, odd = arguments(50304, 1600, 128), arguments(50257, 1600, 128)
    even, padded, whole = (
        autoshard.search(step, *args, cluster="v5e:4x4", donate_argnums=0, padding=padding)
        for args, padding in ((even, True), (odd, True), (odd, False))
    )
    assert padded.cost.makespan_seconds < 1.02 * even.cost.makespan_seconds < 0.9 * whole.cost.makespan_seconds
    assert any("dimension 0 of weights['embed'], of size 50,257, is padded to 50,272 over 16" in note for note in padded.notes)
    assert any("dimension 0 of weights['embed'], of size 50,257, does not divide by 16 devices" in note for note in whole.notes)
    assert not any("divide" in note or "is padded" in note for note in even.notes)
    assert "is padded to 5,000 over 8" in str(strategy.explain())


def test_a_dimension_that_no_plan_divides_is_no_repeated_work():
    """An image's sides after a strided convolution, where the batch alone divides: what is broadcast over them is computed by none."""

    def loss(weights, images):
        hidden = jax.lax.conv_general_dilated(images, weights, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(jax.nn.relu(hidden) - jnp.mean(hidden, 0))

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 3, 4, 8), (32, 28, 28, 4)))
    found = autoshard.search(jax.grad(loss), *shapes, cluster="cpu:8", mesh={"data": 8})
    assert not any("divide" in note for note in found.notes), found.notes


@pytest.mark.slow
def test_a_step_returns_things_in_the_form_it_was_given(strategy, wanted):
    """State with padding where it was placed so; its own sizes otherwise."""
    run = strategy.apply(step)
    placed = strategy.shard(*concrete(arguments(), below=VOCABULARY))
    assert placed[0]["embed"].shape == (5000, 64) and not np.any(placed[0]["embed"][VOCABULARY:])
    state, value = run(*placed)
    assert state["embed"].shape == (5000, 64)
    alike((strategy.unpad(state), value), wanted)
    alike(run(*concrete(arguments(), below=VOCABULARY)), wanted)
    again, _ = run(state, *placed[1:])
    assert strategy.unpad((again, *placed[1:]))[0]["embed"].shape == (VOCABULARY, 64)
    with pytest.raises(StrategyError, match="used up"):
        strategy.unpad(state)


def test_what_is_in_the_padding_is_never_read(strategy, wanted):
    """Nor NaN, such as that of an update which divides by a gradient's norm."""
    state, *batch = strategy.shard(*concrete(arguments(), below=VOCABULARY))
    state["embed"] = state["embed"].at[VOCABULARY:].set(jnp.nan)
    state, value = strategy.apply(step)(state, *batch)
    alike((strategy.unpad(state), value), wanted)


def test_collectives_are_the_predicted_ones_and_the_file_has_all(strategy, wanted, tmp_path):
    """Also of a strategy from a file, which pads as it was searched; arguments in their own sizes or padded are its program's."""
    assert autoshard.verify(strategy, step, *arguments()).exact
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy
    state, *batch = loaded.shard(*concrete(arguments(), below=VOCABULARY))
    alike(loaded.unpad(loaded.apply(step)(state, *batch)[0]), wanted[0])
    assert autoshard.verify(loaded, step, *(loaded.abstract(k) for k in range(3))).exact
    assert loaded.abstract(arguments()[0])["embed"].shape == loaded.abstract(0)["embed"].shape == (5000, 64)


def test_state_is_made_with_its_padding(strategy):
    """By init, sharded; shardings are found by either form."""
    made = strategy.init(lambda: jax.tree.map(lambda x: jnp.ones(x.shape), arguments()[0]))
    assert made["embed"].shape == (5000, 64) and made["embed"].sum() == VOCABULARY * 64
    assert len(made["embed"].sharding.device_set) == 8 and not made["embed"].is_fully_replicated
    assert strategy.shardings(made) == strategy.shardings(arguments()[0])


@pytest.mark.slow
def test_checkpoints_are_restored_with_other_padding(strategy, tmp_path):
    """Under a strategy without, and back; arrays in their own sizes are saved as the strategy stores them."""
    state = concrete(arguments(), below=VOCABULARY)[0]
    whole = autoshard.search(step, *arguments(), cluster="cpu:8", donate_argnums=0, padding=False)
    autoshard.checkpoint.save(tmp_path / "padded", strategy.shard(state)[0], strategy)
    autoshard.checkpoint.save(tmp_path / "own", state, strategy)
    for name in ("padded", "own"):
        restored = autoshard.checkpoint.restore(tmp_path / name, whole)
        assert restored["embed"].shape == (VOCABULARY, 64)
        alike(restored, state)
    autoshard.checkpoint.save(tmp_path / "whole", whole.shard(state)[0], whole)
    restored = autoshard.checkpoint.restore(tmp_path / "whole", strategy, like=arguments()[0])
    assert restored["embed"].shape == (5000, 64) and restored["embed"].sharding == strategy.shardings(0)["embed"]
    alike(strategy.unpad(restored), state)


@pytest.mark.slow
def test_a_decorated_step_takes_both_forms(wanted):
    """Without a second search, or its warning."""
    run = autoshard.parallelize(step, cluster="cpu:8", progress=False)
    alike(run(*concrete(arguments(), below=VOCABULARY)), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, value = run(*run.strategy.shard(*concrete(arguments(), below=VOCABULARY)))
    alike((run.strategy.unpad(state), value), wanted)


def test_uneven_batches_are_fed():
    """Batches of their own number of rows, placed with padding."""

    def regression(w, batch):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2))(w)
        return w - 0.1 * gradient, value

    rows = np.random.default_rng(0).normal(size=(1001, 8)).astype(np.float32)
    w, batch = jnp.ones((8, 8)) * 0.1, {"x": rows, "y": rows}
    strategy = autoshard.search(regression, w, batch, cluster="cpu:8", searcher="data_parallel")
    (fed,) = strategy.data([{"x": row, "y": row} for row in rows])
    assert fed["x"].shape == (1008, 8) and np.array_equal(fed["x"][:1001], rows) and not fed["x"][1001:].any()
    assert strategy.data_shard(1).batch_size == 1001
    alike(strategy.apply(regression)(*strategy.shard(w), fed), jax.jit(regression)(w, batch))


def model(name, *args, **sizes):
    folder = {"gpt": "language", "llama": "language", "vit": "encoders", "dlrm": "dense", "unet": "convolutions"}[name]
    return getattr(importlib.import_module(f"benchmarks.models.{folder}"), name)(*args, dtype=jnp.float32, **sizes)


STEPS = {
    "gpt": lambda: model("gpt", layers=2, width=15, heads=3, vocabulary=53, batch=6, length=11, scan=True, remat=True),
    "llama": lambda: model("llama", layers=1, width=36, heads=6, kv_heads=3, vocabulary=53, batch=3, length=7),
    "vit": lambda: model("vit", layers=1, width=15, heads=3, batch=6, side=12, patch=4),
    "dlrm": lambda: model("dlrm", tables=3, rows=37, width=9, batch=13),
    "unet": lambda: model("unet", depth=1, channels=6, batch=3, side=10, groups=3),
    "mixture": lambda: moe(d_model=13, ffn=17, experts=5, capacity=7, batch=27),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in list(STEPS)[1:])])
def test_train_steps_of_odd_sizes(name):
    """All dimensions that eight devices do not divide are padded, and the step is sharded: equal to the unsharded one."""
    fn, args = STEPS[name]()
    padded = everywhere(trace(fn, *args), 8)
    strategy = autoshard.search(TracedOnce(fn, (padded,)), *args, cluster="cpu:8", padding=False, searcher="fully_sharded")
    wanted = jax.jit(fn)(*concrete(args, below=5))
    state, value = strategy.apply(fn)(*strategy.shard(*concrete(args, below=5)))
    alike((strategy.unpad(state), value), wanted)


@pytest.mark.slow
def test_microbatches_and_recomputation_of_padded_programs():
    """The batch that is computed in parts is the padded one."""
    fn, args = model("gpt", layers=1, width=16, heads=8, vocabulary=53, batch=8, length=7)
    padded = everywhere(trace(fn, *args), 8, least=7)
    strategy = autoshard.search(TracedOnce(fn, (padded,)), *args, cluster="cpu:8", padding=False, microbatches=2, remat="full")
    assert strategy.microbatches == 2
    state, value = strategy.apply(fn)(*strategy.shard(*concrete(args, below=53)))
    alike((strategy.unpad(state), value), jax.jit(fn)(*concrete(args, below=53)))


@pytest.mark.slow
def test_heads_are_padded_where_neither_they_nor_examples_use_all_devices():
    """Twelve heads of one example on eight devices."""

    def attention(w, x):
        q, k, v = (jnp.einsum("bld,dhk->bhlk", x, w[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), q @ k.swapaxes(-1, -2), -1e9))
        return jnp.einsum("bhlk,hkd->bld", scores @ v, w["o"])

    def args(batch):
        w = {name: jax.ShapeDtypeStruct((256, 12, 64), jnp.float32) for name in "qkv"}
        w["o"] = jax.ShapeDtypeStruct((12, 64, 256), jnp.float32)
        return w, jax.ShapeDtypeStruct((batch, 256, 256), jnp.float32)

    one = autoshard.search(attention, *args(1), cluster="v5e:2x4")
    whole = autoshard.search(attention, *args(1), cluster="v5e:2x4", padding=False)
    assert one.cost.makespan_seconds <= whole.cost.makespan_seconds
    many = autoshard.search(attention, *args(64), cluster="v5e:2x4")
    assert not many.record.program.rewrites


def test_shards_of_whole_blocks():
    """A quantum is required of the arguments that it is for."""
    options = {"cluster": "cpu:8", "searcher": "fully_sharded", "padding": Padding({"weights['up']": 24})}
    strategy = autoshard.search(step, *arguments(5000), **options)
    assert strategy.abstract(0)["up"].shape == (72, 384) or all(n % 24 == 0 for n in strategy.abstract(0)["up"].shape)
    alike(strategy.apply(step)(*concrete(arguments(5000), below=50)), jax.jit(step)(*concrete(arguments(5000), below=50)))


def test_state_in_its_own_sizes_is_stored_evenly():
    """Axes of a dimension with padding split another one, which divides; what nothing divides is whole."""
    sizes = Sizes((50257, 64), (((50257, 50264),), ()))
    assert sizes.own_spec(("data", None), {"data": 8}) == (None, "data")
    assert sizes.own_spec((("data", "model"), "x"), {"data": 2, "model": 8, "x": 4}) == (None, ("x", "data", "model"))
    assert sizes.own_spec(("data", "x"), {"data": 8, "x": 16}) == (None, "x")
    assert Sizes((53,), (((53, 56),),)).own_spec(("data",), {"data": 8}) == (None,)


def test_kernels_that_take_no_padding_are_named():
    """By line and dimension, with what is cut there; results are those without padding."""
    scaled = autoshard.kernel_rule(lambda x: x - x.max(0, keepdims=True), "([i, j])->([i, j]) need_replication={i}")

    def fn(w, x):
        return jnp.sum(scaled(w @ x), axis=1)

    args = jax.ShapeDtypeStruct((53, 64), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    padded = everywhere(trace(fn, *args), 8)
    strategy = autoshard.search(TracedOnce(fn, (padded,)), *args, cluster="cpu:8", padding=False)
    (note,) = (note for note in strategy.notes if "takes no padding" in note)
    assert "custom_partitioning at" in note and "test_padded.py" in note and "dimension 0 of its operand 0, padded to 56" in note
    alike(strategy.apply(fn)(*concrete(args, below=5)), jax.jit(fn)(*concrete(args, below=5)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", ["auto", "fully_sharded", "tensor_parallel", "recursive_programming"])
@pytest.mark.parametrize("mesh", [None, {"x": 4, "y": 2}])
def test_shards_are_of_whole_blocks_where_nothing_is_padded(searcher, mesh):
    """Eight devices divide 256 and 384, into shards of 32 and 48: blocks of 128 are split over two and over none."""

    def train(w, mu, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.square(jax.nn.relu(x @ w["a"] + w["b"]) @ w["c"])))(w)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, gradient)
        return jax.tree.map(lambda a, m: a - 0.1 * m, w, mu), mu

    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("a", (1024, 256)), ("b", (256,)), ("c", (256, 384)))}
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    options = {"cluster": "v5e:2x4", "searcher": searcher, "mesh": mesh, "donate_argnums": (0, 1), "padding": Padding(128)}
    strategy = autoshard.search(train, w, w, x, **options)
    for tensor in strategy.record.arguments[:-1]:
        shards = jax.sharding.NamedSharding(abstract_mesh(strategy.record.mesh), P(*tensor.spec)).shard_shape(tuple(tensor.shape))
        assert all(part % 128 == 0 for part in shards)


def test_pins_that_divide_blocks_are_refused():
    """By path, pin and quantum."""
    w = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    fn, options = lambda w, x: w + jnp.sum(x), {"cluster": "cpu:8", "mesh": {"data": 8}, "padding": Padding(128), "donate_argnums": 0}
    assert autoshard.search(fn, w, w, pins={"w": P(None, "data")}, **options).in_specs[0] == P(None, "data")
    with pytest.raises(ShardingError, match=r"each device's shard of w is a multiple of 128 elements.*\(256, 1024\).*Pin it"):
        autoshard.search(fn, w, w, pins={"w": P("data")}, **options)


@pytest.mark.parametrize("padding", [8, "auto", None, {"quantum": 8}])
def test_padding_is_an_option_of_its_own_type(padding):
    """What else is passed is refused, by name."""
    with pytest.raises(ShardingError, match=r"padding is True or False, or an autoshard.Padding.*got"):
        autoshard.search(step, *arguments(), cluster="cpu:8", padding=padding)


@pytest.mark.parametrize("quantum", [0, 1.5, True, {"w": -1}])
def test_a_quantum_is_a_positive_number(quantum):
    """Of all arguments, or by patterns."""
    with pytest.raises(ShardingError, match=r"a quantum is the number of elements.*got"):
        Padding(quantum)


def test_other_programs_are_refused(strategy):
    """A padding is of the program that it was found for; pins are of programs as they are."""
    with pytest.raises(StrategyError, match=r"shape \(5000, 64\)"):
        strategy.shard(jax.tree.map(lambda x: jnp.zeros(x.shape), arguments(4998)[0]))
    with pytest.raises(StrategyError, match="is padded to 5,000"):
        strategy.pins(step, *arguments())
