"""Optimizer state in the memory of hosts: which leaves are, what it costs, and that steps compute the same."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.errors import InfeasibleError, ShardingError, StrategyError
from autoshard.ir import is_transfer
from autoshard.ir.rewrites import Offload
from autoshard.recompute import optimizer_state
from autoshard.rewrite import applied
from autoshard.run.program import program_of
from autoshard.trace import trace
from tests.requirements import needs_tpu_compiler

WIDTH = 512
LEAF = WIDTH * WIDTH * 4
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)  # in which rounding does not grow, as by Adam's quotients
HOST = "pinned_host"


def _step(state, x):
    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] + weights["bias"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value


def _state():
    one, other = jax.random.split(jax.random.key(0))
    weights = {"up": jax.random.normal(one, (WIDTH, WIDTH)), "down": jax.random.normal(other, (WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)}
    return {"weights": weights, "moments": OPTIMIZER.init(weights)}


STATE, X = jax.eval_shape(_state), jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)


def _search(**options):
    return autoshard.search(_step, STATE, X, **{"cluster": "cpu:8", "mesh": {"data": 8}, "donate_argnums": 0} | options)


def test_optimizer_state_is_what_no_product_reads_and_a_result_replaces():
    """Moments are; weights, which products read, are not, nor leaves that are small or that no result replaces."""
    traced = trace(_step, STATE, X, donate_argnums=0)
    found = {traced.graph.argument_paths[leaf] for leaf in optimizer_state(traced)}
    assert found == {f"state['moments'][0].trace['{name}']" for name in ("up", "down")}
    assert optimizer_state(trace(lambda state, x: (state + x, x), jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))) == (0,)
    assert optimizer_state(trace(lambda state, x: x.sum(), jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))) == ()


def test_each_leaf_is_moved_to_the_device_for_its_update_and_back():
    """The rewritten program has two transfers a leaf; its arguments and results of these leaves are on the host, and no others are."""
    traced = trace(_step, STATE, X, donate_argnums=0)
    leaves = optimizer_state(traced)
    graph = applied(Offload(leaves), traced).graph
    assert sum(is_transfer(op) for op in graph.ops) == 2 * len(leaves)
    assert {k for k, value in enumerate(graph.arguments) if graph.values[value].on_host} == set(leaves)
    assert {argument for result, argument in graph.aliases if graph.values[graph.results[result]].on_host} == set(leaves)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"lowering": "constraints"}], ids=str)
def test_steps_compute_the_same_with_state_on_hosts(options):
    """Three steps give the losses and weights of the unsharded step, and leave moments in the memory of hosts."""
    lowering = options.get("lowering", "manual")
    strategy = _search(offload="optimizer", **{name: value for name, value in options.items() if name != "lowering"})
    assert len(strategy.offload) == 2
    x = jax.random.normal(jax.random.key(1), X.shape)
    expected, plain = _state(), jax.jit(_step)
    state, step = strategy.init(_state), strategy.apply(_step, lowering=lowering)
    assert state["moments"][0].trace["up"].sharding.memory_kind == HOST
    for _ in range(3):
        expected, loss = plain(expected, x)
        state, found = step(state, x)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert state["moments"][0].trace["down"].sharding.memory_kind == HOST
    assert state["weights"]["up"].sharding.memory_kind == "device"
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), state, expected)


@pytest.mark.slow
def test_stages_of_one_program_keep_state_on_hosts():
    """Scanned layers as stages of one program: moments are on hosts, split over stages, and three steps equal the unsharded ones."""

    def step(state, x):
        def loss(weights):
            return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(state["weights"])
        updates, moments = OPTIMIZER.update(gradients, state["moments"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value

    def state_of():
        weights = 0.02 * jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH))
        return {"weights": weights, "moments": OPTIMIZER.init(weights)}

    options = {"cluster": "cpu:4", "mesh": {"data": 2}, "stages": 2, "schedule": "one_program", "microbatches": 4, "donate_argnums": 0}
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    strategy = autoshard.search(step, jax.eval_shape(state_of), x, offload="optimizer", **options)
    expected, plain, state, run = state_of(), jax.jit(step), strategy.init(state_of), strategy.apply(step)
    for _ in range(3):
        (expected, loss), (state, found) = plain(expected, x), run(state, x)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert state["moments"][0].trace.sharding.memory_kind == HOST
    assert state["moments"][0].trace.sharding.spec[0] == "stage"
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), state, expected)


def test_transfers_are_charged_on_the_link_to_the_host():
    """The objective grows by the bytes of each device's part of the state, both ways, over the link's bandwidth."""
    plain, found = (_search(offload=offload, searcher="data_parallel") for offload in (None, "optimizer"))
    rate = autoshard.Cluster.parse("cpu:8").device.host_bandwidth_bytes_per_second
    moved = 2 * 2 * LEAF / rate  # replicated: each device moves all of it
    assert found.cost.objective_seconds - plain.cost.objective_seconds == pytest.approx(moved, rel=0.02)
    assert found.cost.peak_bytes < plain.cost.peak_bytes


def test_a_note_says_that_the_gpu_compiler_may_fetch_state_early():
    """On GPUs a strategy with state on hosts says so, one without does not, nor does one on TPUs."""
    asked = ((None, "h100:1x1"), ("optimizer", "v5e:1x1"), ("optimizer", "h100:1x1"))
    notes = [str(_search(offload=offload, cluster=cluster, mesh={"data": 1}, searcher="data_parallel").notes) for offload, cluster in asked]
    assert ["may bring it to the device where a step begins" in text for text in notes] == [False, False, True]


def test_state_is_offloaded_where_nothing_fits_otherwise():
    """``"auto"`` keeps state on devices where the step fits, moves it to hosts where only that fits, and says what was tried else."""
    assert _search(offload="auto").offload == ()
    whole, moved = (_search(offload=offload, searcher="data_parallel").cost.peak_bytes for offload in (None, "optimizer"))
    limit = (whole + moved) / 2
    found = _search(offload="auto", searcher="data_parallel", memory_limit_bytes=limit, microbatches=None, remat=None)
    assert found.offload and found.cost.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match="Nor does it fit with optimizer state in the memory of hosts: the smallest peak is"):
        _search(offload="auto", searcher="data_parallel", memory_limit_bytes=moved / 2, microbatches=None, remat=None)
    with pytest.raises(InfeasibleError, match="offload='auto'"):
        _search(searcher="data_parallel", memory_limit_bytes=limit, microbatches=None, remat=None)


@pytest.mark.slow
def test_each_point_of_a_frontier_has_its_offload():
    """With ``"optimizer"`` moments of all points are on hosts, with ``"auto"`` those of the least memory and not of the least time."""
    options = {"cluster": "v5e:1x1", "mesh": {"data": 1}, "donate_argnums": 0, "points": 4}
    hosted = autoshard.frontier(_step, STATE, X, offload="optimizer", **options)
    assert all(len(strategy.offload) == 2 for strategy in hosted)
    both = autoshard.frontier(_step, STATE, X, offload="auto", **options)
    assert both[0].offload and not both[-1].offload
    assert both[0].cost.peak_bytes == hosted[0].cost.peak_bytes
    assert "2 leaves" in str(both)
    state, value = both[0].apply(_step)(both[0].init(_state), jnp.ones(X.shape))
    np.testing.assert_allclose(value, _step(_state(), jnp.ones(X.shape))[1], rtol=1e-6)
    assert state["moments"][0].trace["up"].sharding.memory_kind == HOST
    with pytest.raises(ShardingError, match="Use remat='fit', 'auto' or 'full' with it"):
        autoshard.frontier(_step, STATE, X, offload="activations", **options)


def test_what_cannot_be_offloaded_is_refused():
    """A device without a link, a step without state and an unknown word are refused with what to do."""
    cluster = autoshard.Cluster.parse("cpu:8")
    unlinked = replace(cluster, device=replace(cluster.device, host_bandwidth_bytes_per_second=0.0))
    with pytest.raises(ShardingError, match="no bandwidth of such a link is known"):
        _search(offload="optimizer", cluster=unlinked)
    with pytest.raises(ShardingError, match="has no such leaf of"):
        autoshard.search(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((8, 8)), cluster="cpu:8", offload="optimizer")
    with pytest.raises(ShardingError, match="'activations', 'auto' or None, got 'all'"):
        _search(offload="all")
    with pytest.raises(StrategyError, match=r"in the memory of hosts.*Search with offload=None\."):
        _search(offload="optimizer").pins(_step, STATE, X)


def test_a_saved_strategy_keeps_state_on_hosts(tmp_path):
    """A loaded strategy has the same leaves on hosts, explains them, and is verified."""
    strategy = _search(offload="optimizer")
    strategy.save(tmp_path / "found.json")
    loaded = autoshard.load(tmp_path / "found.json")
    assert loaded.offload == strategy.offload
    assert "2 leaves of optimizer state" in str(loaded.explain())
    assert autoshard.verify(loaded, _step, STATE, X).exact


@pytest.mark.sample(1)
@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_loaded_strategy_runs_its_function_with_state_on_hosts(microbatches, tmp_path):
    """The function, traced anew, becomes the program of the file: microbatches first, then the same leaves on hosts."""
    _search(offload="optimizer", microbatches=microbatches).save(tmp_path / "found.json")
    loaded = autoshard.load(tmp_path / "found.json")
    traced, *_ = program_of(_step, (STATE, X), loaded.record)
    assert traced.offload == loaded.record.program.offload != () and traced.microbatches == (microbatches or 1)
    assert [traced.graph.values[value].on_host for value in traced.graph.arguments].count(True) == len(loaded.offload)
    x = jax.random.normal(jax.random.key(1), X.shape)
    state, value = loaded.apply(_step)(loaded.init(_state), x)
    np.testing.assert_allclose(value, _step(_state(), x)[1], rtol=1e-6)
    assert {state["moments"][0].trace[name].sharding.memory_kind for name in ("up", "down")} == {HOST}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("saved", "restored"), [("optimizer", None), (None, "optimizer"), ("optimizer", "optimizer")])
def test_checkpoints_are_restored_where_their_strategy_has_them(saved, restored, tmp_path):
    """State on hosts is saved, and comes back equal in the memory that the strategy says, whichever it was saved from."""
    before, after = _search(offload=saved), _search(offload=restored, mesh={"data": 4, "model": 2})
    state = before.init(_state)
    autoshard.checkpoint.save(tmp_path / "first", state, before)
    found = autoshard.checkpoint.restore(tmp_path / "first", after)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found["moments"]) if leaf.nbytes >= LEAF}
    assert kinds == {HOST if restored else "device"}


@needs_tpu_compiler
@pytest.mark.slow(minutes=3)
def test_a_tpu_program_needs_as_much_as_predicted():
    """XLA:TPU's peak of a GPT that fits a chip by offload alone is within 10 % of the predicted one: `pytest -m slow tests/recompute`."""
    from benchmarks.models import gpt

    step, args = gpt(24, 2048, batch=4, length=1024, remat=True)
    options = {"cluster": "v5e:1x1", "mesh": {"data": 1}, "donate_argnums": 0, "microbatches": None, "remat": None}
    strategy = autoshard.search(step, *args, offload="auto", **options)
    found = autoshard.verify(strategy, step, *args, target="tpu")
    assert strategy.offload and found.fits
    assert found.actual_peak_bytes == pytest.approx(strategy.cost.peak_bytes, rel=0.1)
