"""What a stage computes again, and what it has in the memory of hosts, is a choice of that stage alone."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.pipeline.lowered_stage import LoweredStage
from autoshard.plan.prepared import traced_of
from autoshard.plan.request import Request
from autoshard.plan.stage_searches import Call, in_stages
from autoshard.progress import silent
from autoshard.recompute import Options
from autoshard.search import DynamicProgramming
from benchmarks import models
from benchmarks.microbatches import filled

OPTIONS = {"cluster": "cpu:8", "donate_argnums": 0}
STAGES = {"stages": 4, "microbatches": 8, "mesh": {"data": 2}, "schedule": "1f1b"}


@cache
def step():
    """A GPT of four layers, its arguments, and its results on one device."""
    fn, args = models.gpt(4, 256, 4, 4096, batch=16, length=64, dtype=jnp.float32)
    leaves, tree = jax.tree.flatten_with_path(args)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    inputs = tree.unflatten([filled(leaf, key, jax.tree_util.keystr(path)) for (path, leaf), key in zip(leaves, keys, strict=True)])
    return fn, inputs, jax.tree.leaves(jax.jit(fn)(*inputs))


def ran(strategy):
    """The results of a strategy, which are those of one device."""
    fn, inputs, expected = step()
    found = jax.tree.leaves(strategy.apply(fn)(*strategy.shard(*jax.tree.map(jnp.copy, inputs))))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5 * float(jnp.abs(a).max()))
    return found


@pytest.mark.slow(minutes=2)
def test_optimizer_state_is_on_hosts_for_the_stages_that_do_not_fit_otherwise(tmp_path):
    """The first stage, which has most microbatches in flight; a saved strategy runs so, too."""
    fn, inputs, _ = step()
    free = autoshard.search(fn, *inputs, **OPTIONS, **STAGES, remat=None)
    limit = 0.95 * free.cost.peak_bytes
    found = autoshard.search(fn, *inputs, **OPTIONS, **STAGES, remat=None, offload="auto", memory_limit_bytes=limit)
    peaks = [[stage.peak_bytes for stage in each.record.pipeline.stages] for each in (free, found)]
    assert peaks[1][0] < limit and peaks[1][1:] == pytest.approx(peaks[0][1:])
    assert {found.record.pipeline.argument_stages[leaf] for leaf in found.record.program.offload} == {0}
    assert "stage 0: optimizer state is in the memory of hosts between steps" in found.notes
    found.save(tmp_path / "strategy.json")
    kinds = [[x.sharding.memory_kind for x in ran(each)] for each in (found, autoshard.load(tmp_path / "strategy.json"))]
    assert kinds[0] == kinds[1] and kinds[0].count("pinned_host") == len(found.offload)


@pytest.mark.slow(minutes=2)
def test_stages_compute_again_or_send_to_hosts_each_what_it_should(monkeypatch):
    """The first stage computes again, the third one has what it keeps on hosts between its tasks, and the others keep everything."""
    fn, inputs, _ = step()
    cluster = Cluster.of("cpu:8")
    known = traced_of(fn, inputs, 0, (), cluster)
    options = Options(known[0], known[1], cluster.device, hosts=True)
    again, hosted = Options(known[0], known[1], cluster.device).all[-1], options.all[-1]
    assert hosted.hosted_bytes
    chosen = options.by_part([(0.25, again), (0.5, None), (0.75, hosted), (1.0, None)])
    assert 0 < chosen.hosted_bytes < 0.5 * hosted.hosted_bytes and again.kept_bytes < chosen.kept_bytes < chosen.plain_bytes
    request = Request(cluster=cluster, searcher=DynamicProgramming(), donate_argnums=0, **STAGES)
    found = Strategy.of(in_stages(Call(fn, inputs, request, silent, chosen), 4, known)[0])
    assert "stage 2: some of what is kept for the backward pass is in the memory of hosts" in found.notes
    assert not any("stage 1" in note and "again" in note for note in found.notes)
    kinds, jitted = set(), LoweredStage.jitted

    def watched(self, function, name, *specs, **more):
        call = jitted(self, function, name, *specs, **more)

        def called(*groups):
            made = call(*groups)
            kinds.update((self.stage.number, x.sharding.memory_kind) for x in (made[2] if name in "FB" else ()))
            return made

        return called

    monkeypatch.setattr(LoweredStage, "jitted", watched)
    ran(found)
    assert {stage for stage, kind in kinds if kind == "pinned_host"} == {2}
