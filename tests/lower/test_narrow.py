"""Sums between slices in fewer bits: what they round, what is sent, and what they cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import AutoshardError
from autoshard.lower.narrow import BLOCK, WITHIN, decoded, encoded

OPTIONS = {"cluster": "2*cpu:4", "confirm": False, "microbatches": None}


def step(state, x):
    def loss(w):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]) ** 2) + jnp.sum(w["bias"] * x.mean(0))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 1e3 * g, state, gradients), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    state = {"up": jax.random.normal(keys[0], (256, 512)) / 16, "down": jax.random.normal(keys[1], (512, 256)) / 16, "bias": jnp.zeros(256)}
    return state, jax.random.normal(keys[2], (64, 256))


SHARDED = autoshard.FullySharded(stage=3)
FLAT, SEVERAL = {"data": 8}, {"data": 2, "model": 4}
CASES = [("bfloat16", "data_parallel", FLAT), ("int8", SHARDED, FLAT), ("int8", "data_parallel", SEVERAL), ("bfloat16", SHARDED, SEVERAL)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "searcher", "mesh"), CASES, ids=str)
def test_gradients_cross_slices_in_fewer_bits(width, searcher, mesh):
    """Results differ by what rounding makes, losses and small gradients not at all; what is sent is what XLA compiles."""
    exact = autoshard.search(step, *arguments(), searcher=searcher, mesh=mesh, **OPTIONS)
    narrow = autoshard.search(step, *arguments(), searcher=searcher, mesh=mesh, slow_reduction=width, **OPTIONS)
    before, after = (each.apply(step)(*each.shard(*arguments())) for each in (exact, narrow))
    assert float(before[1]) == pytest.approx(float(after[1]), abs=1e-7)
    state = arguments()[0]
    for name, x in before[0].items():
        error = np.abs(np.asarray(x) - np.asarray(after[0][name])).max() / np.abs(np.asarray(x) - np.asarray(state[name])).max()
        assert (1e-4 if name != "bias" else -1) < error < (WITHIN[width] if name != "bias" else 1e-5), name
    assert narrow.cost.communication_seconds < exact.cost.communication_seconds
    verified = autoshard.verify(narrow, step, *arguments(), target="cpu")
    assert verified.exact, str(verified)


@pytest.mark.slow
def test_rounding_has_no_mean():
    """Numbers between two that there are become each of them as often as they are near; zeros stay, and what is no number does."""
    x = jnp.full((1, 64 * BLOCK), 0.3).at[0, ::BLOCK].set(127.0) + jnp.arange(64 * BLOCK) * 1e-7
    for width, within in (("int8", 0.02), ("bfloat16", 1e-4)):
        rounded = decoded(encoded(x, width), x.size)
        assert float(jnp.mean(rounded - x)) == pytest.approx(0, abs=within)
        assert float(jnp.abs(rounded - x).max()) > within
        odd = jnp.array([[0.0, jnp.inf, -jnp.inf, jnp.nan]])
        zero = decoded(encoded(jnp.zeros((1, 4)), width), 4)
        assert not zero.any() and not bool(jnp.isfinite(decoded(encoded(odd, width), 4)[0, 1:]).any())


def test_verification_measures_the_error():
    """Of sums of the strategy's own slices."""
    narrow = autoshard.search(step, *arguments(), mesh={"data": 8}, searcher="data_parallel", slow_reduction="int8", **OPTIONS)
    (numbers,) = autoshard.verify(narrow, step, *arguments(), target="cpu", numbers=True).numbers
    assert 1e-3 < numbers.forward < numbers.within and "int8" in numbers.place


REFUSED = {
    "one slice": {"cluster": "cpu:8"},
    "no such type": {"slow_reduction": "int4"},
    "stages": {"stages": 2},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    """In one paragraph."""
    with pytest.raises(AutoshardError) as error:
        autoshard.search(step, *arguments(), **{**OPTIONS, "slow_reduction": "int8", "microbatches": "fit", **REFUSED[case]})
    assert "\n" not in str(error.value)


def test_constraints_are_refused():
    """For these XLA makes the sums."""
    narrow = autoshard.search(step, *arguments(), mesh={"data": 8}, slow_reduction="int8", **OPTIONS)
    with pytest.raises(AutoshardError, match="manual lowering"):
        narrow.apply(step, lowering="constraints")(*arguments())
