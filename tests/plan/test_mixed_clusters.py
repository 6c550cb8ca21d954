"""Clusters of unequal parts: pipelines whose stages have other devices and more or fewer layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError

LAYERS = 6


def step(state, x):
    def loss(state):
        y = x
        for w in state:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, gradients, strict=True)], value


def arguments(width=16, batch=24):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys], jnp.ones((batch, width))


def shapes(width, batch):
    return jax.eval_shape(lambda: arguments(width, batch))


def layers_of(strategy):
    """How many layers' weights each stage has."""
    return np.bincount(strategy.record.pipeline.argument_stages[:LAYERS], minlength=len(strategy.stages)).tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("cluster", ["cpu:4+cpu:2", "cpu:2+cpu:4+cpu:2"])
def test_unequal_stages_run(cluster, tmp_path):
    """Each on its own devices; results are those of one device, and a file has it all."""
    found = autoshard.search(step, *arguments(), cluster=cluster, microbatches=2, searcher="data_parallel", confirm=False)
    sizes = [part.n_devices for part in Cluster.parse(cluster).parts]
    assert [stage.record.mesh.size for stage in found.stages] == sizes
    expected = step(*arguments())
    for strategy in (found, (found.save(tmp_path / "found.json"), autoshard.load(tmp_path / "found.json"))[1]):
        placed = strategy.shard(*arguments())
        assert {len(w.sharding.device_set) for w in placed[0]} <= {*sizes}
        got = strategy.apply(step)(*placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    assert str(found.explain())


def test_faster_devices_have_more_layers():
    """In inverse proportion to the seconds that a layer takes them."""
    options = {"microbatches": 4, "searcher": "data_parallel", "confirm": False}
    mixed = autoshard.search(step, *shapes(4096, 4096), cluster="a100:8+h100:8", **options)
    equal = autoshard.search(step, *shapes(4096, 4096), cluster="2*a100:8", stages=2, **options)
    slow, fast = layers_of(mixed)
    assert layers_of(equal) == [3, 3] and slow < fast
    assert mixed.cost.makespan_seconds < equal.cost.makespan_seconds
    seconds = [stage.forward_seconds + stage.backward_seconds + stage.weights_seconds for stage in mixed.record.pipeline.stages]
    assert max(seconds) < 1.25 * min(seconds)


def test_text_forms():
    """Round trips; parts in turn, as many stages on each."""
    mixed = Cluster.parse("a100:8x4+h100:8x2")
    assert mixed == Cluster.from_dict(mixed.to_dict()) == Cluster.parse(mixed.name) and mixed.n_devices == 48
    assert [part.name for part in mixed.stage_parts(4)] == ["a100:8x2", "a100:8x2", "h100:8", "h100:8"]


REFUSED = {
    "no stages": {"schedule": "one_program", "stages": 2},
    "a mesh": {"mesh": {"data": 2}},
    "all plans": {"plan": "full"},
    "stages that parts do not divide": {"stages": 3},
    "other platforms": {"cluster": "cpu:2+h100:8"},
    "one part": {"cluster": "cpu:2+"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    """In one paragraph."""
    with pytest.raises(AutoshardError) as error:
        autoshard.search(step, *arguments(), **{"cluster": "cpu:4+cpu:2", "microbatches": 2, "confirm": False, **REFUSED[case]})
    assert "\n" not in str(error.value)
    with pytest.raises(AutoshardError, match="mixed"):
        autoshard.evaluate(step, *arguments(), cluster="cpu:4+cpu:2", mesh={"data": 6}, in_specs={})
