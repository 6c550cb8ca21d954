"""Kept activations in the memory of hosts: results stay the same, peaks fall, transfers are charged and wait."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.ir import is_transfer
from autoshard.ir.rewrites import Recompute
from autoshard.recompute import Options
from autoshard.rewrite import applied
from autoshard.rules import rules_of
from autoshard.trace import trace

LAYERS, WIDTH, BATCH = 5, 64, 8192
CPU = Cluster.parse("cpu:8")
COMMON = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0, "microbatches": None}


def _layer(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def _step(loss):
    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-2 * g, weights, gradients), value

    return step


def _unrolled(weights, x):
    for number in range(LAYERS):
        x = _layer(x, jax.tree.map(lambda w: w[number], weights))  # noqa: B023
    return jnp.mean(x**2)


def _scanned(weights, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (_layer(x, w), None), x, weights)[0] ** 2)


def _by_user(weights, x):
    for number in range(LAYERS):
        x = jax.checkpoint(_layer)(x, jax.tree.map(lambda w: w[number], weights))  # noqa: B023
    return jnp.mean(x**2)


LOSSES = {"unrolled": _unrolled, "scanned": _scanned, "user's checkpoints": _by_user}


def _arguments():
    one, other, third = jax.random.split(jax.random.key(0), 3)
    up, down = jax.random.normal(one, (LAYERS, WIDTH, 2 * WIDTH)) / 8, jax.random.normal(other, (LAYERS, 2 * WIDTH, WIDTH)) / 8
    return {"up": up, "down": down}, jax.random.normal(third, (BATCH, WIDTH))


TYPES = jax.eval_shape(_arguments)


def _search(name, **options):
    return autoshard.search(_step(LOSSES[name]), *TYPES, **COMMON | options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOSSES)
def test_steps_compute_the_same_with_activations_on_hosts(name):
    """On 8 devices a step whose kept activations are on hosts gives the unsharded step's results."""
    strategy = _search(name, remat="full", offload="activations")
    assert strategy.record.program.remat.hosted_bytes > 0
    expected = jax.jit(_step(LOSSES[name]))(*_arguments())
    found = strategy.apply(_step(LOSSES[name]))(*strategy.shard(*_arguments()))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), jax.device_get(found), expected)


@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_each_hosted_value_moves_once_to_the_host_and_once_back(name):
    """The rewritten program has two transfers a value, which a loop makes in each trip; the choice's bytes are those of what moves."""
    traced = trace(_step(LOSSES[name]), *TYPES)
    options = Options(traced, program_facts(traced.graph, rules_of(traced.graph), compiler_of(CPU)), CPU.device, hosts=True)
    graph = applied(Recompute(options.all[-1]), traced).graph
    moves = [op for op in graph.walk() if is_transfer(op)]
    to_host = sum(graph.values[op.operands[0]].nbytes * op.trips for op in moves if graph.values[op.results[0]].on_host)
    assert options.all[-1].hosted_bytes == to_host > 0
    assert sum(graph.values[op.operands[0]].nbytes * op.trips for op in moves) == 2 * to_host


def test_transfers_are_charged_and_the_peak_falls():
    """Where the user's own checkpoints say what is kept, hosts add at least the time of moving each device's part, and the peak falls."""
    kept, hosted = (_search("user's checkpoints", remat="full", offload=offload) for offload in (None, "activations"))
    nbytes = hosted.record.program.remat.hosted_bytes / 8
    moved = 2 * nbytes / CPU.device.host_bandwidth_bytes_per_second
    assert hosted.cost.objective_seconds - kept.cost.objective_seconds > 0.99 * moved  # and barriers end some fusions
    assert kept.cost.peak_bytes - hosted.cost.peak_bytes > nbytes / 4  # where the kept run's peak is, some of it is no longer held


def test_what_comes_back_waits_for_the_backward_pass():
    """Between unrolled layers each transfer to the device is under a condition, since compilers drop barriers; loops need none."""
    strategy = _search("unrolled", remat="full", offload="activations")
    text = strategy.apply(_step(_unrolled)).lower(*TYPES).as_text()
    assert text.count("stablehlo.case") == len(strategy.record.program.remat.kept.hosted) > 0
    strategy = _search("scanned", remat="full", offload="activations")
    assert "stablehlo.case" not in strategy.apply(_step(_scanned)).lower(*TYPES).as_text()


def test_activations_go_to_hosts_where_nothing_fits_otherwise(tmp_path):
    """``"auto"`` moves them where only that fits; the file says so, is read again, and is explained."""
    full, hosted = (_search("unrolled", remat="full", offload=offload).cost.peak_bytes for offload in (None, "activations"))
    limit = (full + hosted) / 2
    with pytest.raises(InfeasibleError):
        _search("unrolled", memory_limit_bytes=limit)
    found = _search("unrolled", memory_limit_bytes=limit, offload="auto")
    assert found.cost.peak_bytes <= limit and found.record.program.remat.hosted_bytes > 0
    assert "in the memory of hosts" in " ".join(str(found.explain()).split())
    found.save(tmp_path / "found.json")
    assert autoshard.load(tmp_path / "found.json").record.program == found.record.program
    with pytest.raises(InfeasibleError, match="Nor does it fit with kept activations in the memory of hosts: the smallest peak is"):
        _search("unrolled", memory_limit_bytes=hosted / 4, offload="auto")


def test_activations_that_cannot_be_offloaded_are_refused():
    """Without recomputation there is no choice to extend; a device without a link has no transfers."""
    with pytest.raises(ShardingError, match="with remat=None nothing is chosen"):
        _search("unrolled", remat=None, offload="activations")
    unlinked = replace(CPU, device=replace(CPU.device, host_bandwidth_bytes_per_second=0.0))
    with pytest.raises(ShardingError, match="no bandwidth of such a link is known"):
        _search("unrolled", cluster=unlinked, offload="activations")
