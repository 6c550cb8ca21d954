"""Searches that let the backward pass compute values again."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import InfeasibleError, NothingFasterError, ShardingError, TraceError
from autoshard.plan.recomputing import _least_that_fits
from benchmarks import models
from tests.recompute.test_program import SMALL

MAKE = partial(models.gpt, 3, 32, 4, 64, batch=16, length=32, **SMALL)


def test_a_step_that_fits_only_by_computing_again_is_found_saved_and_lowered(tmp_path):
    """Below the least memory of the plain step ``"auto"`` finds a plan, whose file is read again and lowers to the program it is for."""
    step, arguments = MAKE()
    common = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0, "microbatches": None}
    plain = autoshard.search(step, *arguments, **common)
    full = autoshard.search(step, *arguments, remat="full", **common)
    assert full.remat == "full" and full.cost.peak_bytes < plain.cost.peak_bytes and "computed again" in str(full.explain())
    limit = (full.cost.peak_bytes + plain.cost.peak_bytes) / 2
    found = autoshard.search(step, *arguments, remat="auto", memory_limit_bytes=limit, **common)
    assert found.remat == "auto" and found.cost.peak_bytes <= limit
    found.save(tmp_path / "found.json")
    read = autoshard.load(tmp_path / "found.json")
    assert read.record.program.remat == found.record.program.remat and plain.remat is None
    assert read.apply(step).lower(*arguments) is not None


@pytest.mark.parametrize("known", [9.0, 1.5, 0.5])
@pytest.mark.parametrize("first", [1, 2])
def test_recomputation_that_is_slower_than_what_is_known_leads_to_less(known, first):
    """Of options from little time to little memory the first that fits is found where it is faster than what is known, else nothing is."""

    def attempt(option):
        if option < first:
            raise InfeasibleError("too much", 9.0)
        if option > known:
            raise NothingFasterError("too slow")
        return option

    assert min(_least_that_fits(attempt, range(5)), default=None) == (first if first < known else None)
    with pytest.raises(InfeasibleError, match="too much"):
        _least_that_fits(attempt, range(first))


@pytest.mark.slow
def test_a_step_that_fits_in_no_microbatches_computes_again_by_itself():
    """By default what fits nothing else is recomputed; a refusal says that this was tried."""
    step, arguments = MAKE()
    common = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0, "microbatches": None}
    plain, full = (autoshard.search(step, *arguments, remat=remat, **common).cost.peak_bytes for remat in (None, "full"))
    found = autoshard.search(step, *arguments, memory_limit_bytes=(plain + full) / 2, **common)
    assert found.remat == "fit" and found.cost.peak_bytes <= (plain + full) / 2
    with pytest.raises(InfeasibleError, match="computes again"):
        autoshard.search(step, *arguments, memory_limit_bytes=full / 4, **common)
    with pytest.raises(InfeasibleError) as refused:
        autoshard.search(step, *arguments, memory_limit_bytes=(plain + full) / 2, remat=None, **common)
    assert "computes again" not in str(refused.value)


def test_checkpoints_that_keep_too_much_are_replaced():
    """Where nothing fits with the step's own checkpoints, what is chosen in their place is found; where neither fits, that is said."""

    def layer(w, x):
        return jnp.tanh(jnp.sin(jnp.cos(x @ w)))

    def step(weights, x):
        kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)

        def loss(weights):
            h = x
            for w in weights:
                h = kept(w, h)
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    arguments = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    common = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "microbatches": None}
    own = autoshard.search(step, *arguments, remat=None, **common)
    limit = 0.7 * own.cost.peak_bytes
    with pytest.raises(InfeasibleError):
        autoshard.search(step, *arguments, remat=None, memory_limit_bytes=limit, **common)
    found = autoshard.search(step, *arguments, remat="replace", memory_limit_bytes=limit, **common)
    assert found.remat == "replace" and found.cost.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match="must fit"):
        autoshard.search(step, *arguments, remat="replace", memory_limit_bytes=0.3 * limit, **common)


def adversarial(both, x, seed):
    """Two networks: one is trained, on noise, against the other as the step has just updated it."""

    def layers(weights, x):
        for w, b in weights[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ weights[-1][0] + weights[-1][1]

    def updated(weights, gradients):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    actor, critic = both
    noise = jax.random.normal(jax.random.key(seed), (len(x), 16))
    fake = layers(actor, noise)

    def judged(critic):
        return jnp.mean(jax.nn.softplus(-layers(critic, x))) + jnp.mean(jax.nn.softplus(layers(critic, fake)))

    def hidden(actor):
        return jnp.mean(jax.nn.softplus(-layers(critic, layers(actor, noise))))

    error, of_critic = jax.value_and_grad(judged)(critic)
    critic = updated(critic, of_critic)
    value, of_actor = jax.value_and_grad(hidden)(actor)
    return (updated(actor, of_actor), critic), error, value


@pytest.mark.slow
def test_forms_that_do_not_go_together_with_microbatches_are_left_out():
    """Of a step with two optimizers ``"auto"`` compares those that do, and is no slower than without; ``"full"`` is refused."""
    actor, critic = ([(jnp.ones(pair), jnp.zeros(pair[1])) for pair in pairwise(sizes)] for sizes in ((16, 64, 64, 32), (32, 64, 64, 1)))
    arguments = ((actor, critic), jnp.ones((16, 32)), jnp.uint32(0))
    common = {"cluster": "cpu:8", "mesh": {"data": 8}, "microbatches": 4}
    plain = autoshard.search(adversarial, *arguments, remat=None, **common)
    limit = plain.cost.peak_bytes * 0.9
    bound = autoshard.search(adversarial, *arguments, remat=None, memory_limit_bytes=limit, **common)
    found = autoshard.search(adversarial, *arguments, remat="auto", memory_limit_bytes=limit, **common)
    assert found.cost.makespan_seconds <= bound.cost.makespan_seconds and found.cost.peak_bytes <= limit
    assert {"taken", "there is no such form"} <= {each.outcome for each in found.record.trail}
    for ours, wanted in zip(jax.tree.leaves(found.apply(adversarial)(*arguments)), jax.tree.leaves(adversarial(*arguments)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-5)
    with pytest.raises(TraceError, match=r"recomputation is of one forward .* only without recomputation it runs in 4 microbatches"):
        autoshard.search(adversarial, *arguments, remat="full", **common)


def test_words_that_there_are_not_are_refused():
    """An unknown word is refused with those that there are."""
    with pytest.raises(ShardingError, match="got 'some'"):
        autoshard.search(lambda x: x, np.ones(8), cluster="cpu:8", remat="some")


@pytest.mark.slow
@pytest.mark.parametrize("is_scan", [False, True], ids=["unrolled", "scanned"])
def test_a_note_says_that_own_checkpoints_stay_and_how_to_have_them_reconsidered(is_scan):
    """With ``"full"`` and ``"auto"`` it names the line of each `jax.checkpoint`; else there is no such note."""
    common = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0, "microbatches": None}

    def notes(is_own, remat):
        step, arguments = MAKE(remat=is_own, scan=is_scan)
        return [note for note in autoshard.search(step, *arguments, remat=remat, **common).notes if "jax.checkpoint" in note]

    for remat in ("full", "auto"):
        (note,) = notes(True, remat)
        assert note.count("benchmarks/models/blocks.py:") == 1 and "remat='replace'" in note
    assert not any((notes(False, "full"), notes(True, "fit"), notes(True, "replace")))
