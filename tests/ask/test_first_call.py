"""At the first call of a step what XLA says of its memory is read, and what does not fit is searched again, once."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.ask import first_call
from autoshard.run.step import Step

LIMIT = 5e6  # the step is predicted to need 4.5 MB, and in microbatches less


def train(w, x):
    def loss(w):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def made(**options):
    """The step, to be searched at its first call."""
    return autoshard.parallelize(train, cluster="cpu:8", mesh={"data": 8}, donate_argnums=0, progress=False, **options)


def arguments():
    return jnp.eye(256), jnp.ones((8192, 256))


def checked(step):
    """Two calls, of which the second gets the first one's state."""
    w, loss = step(*arguments())
    expected, value = train(*arguments())
    assert jnp.allclose(w, expected, atol=1e-5) and jnp.allclose(loss, value, atol=1e-5)
    step(w, arguments()[1])


def test_what_does_not_fit_as_compiled_is_searched_again_once(monkeypatch):
    """The next strategy is predicted to need less; one warning says why, and a note stays."""
    told = iter([8e6])
    monkeypatch.setattr(first_call, "peak_bytes_of", lambda memory: next(told))
    step = made(memory_limit_bytes=LIMIT)
    first = step.search(*arguments())
    with pytest.warns(UserWarning, match=r"train is searched again, within .* XLA needs 8\.00 MB of 5\.00 MB a device") as caught:
        checked(step)
    assert len([each for each in caught if "searched again" in str(each.message)]) == 1
    assert step.strategy.cost.peak_bytes < first.cost.peak_bytes * 5 / 8
    assert step.strategy.notes[-1].startswith("searched again on devices")


@pytest.mark.slow
@pytest.mark.parametrize("message", ["Out of memory allocating 123 bytes.", "Ran out of memory. Used 9.5M of 5M hbm."])
def test_a_step_that_runs_out_of_memory_is_searched_again(monkeypatch, message):
    """No error reaches the user where nothing was used up."""
    anew, failures = Step.anew, iter([f"RESOURCE_EXHAUSTED: {message}"])

    def fails(self, args, kwargs):
        if message := next(failures, None):
            raise jax.errors.JaxRuntimeError(message)
        return anew(self, args, kwargs)

    monkeypatch.setattr(Step, "anew", fails)
    step = made(memory_limit_bytes=1e9)
    first = step.search(*arguments())
    with pytest.warns(UserWarning, match="searched again"):
        checked(step)
    assert step.strategy.cost.peak_bytes < first.cost.peak_bytes


def test_other_errors_and_used_up_state_are_not_searched_again(monkeypatch):
    """What was donated before the failure is gone, and the error is what JAX says."""
    for message, uses_up in (("INTERNAL: no", False), ("RESOURCE_EXHAUSTED: Out of memory", True)):

        def fails(self, args, kwargs, message=message, uses_up=uses_up):
            if uses_up:
                args[0].delete()
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(Step, "anew", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            made()(*arguments())


@pytest.mark.slow
def test_where_nothing_needs_less_the_step_runs_as_it_is(monkeypatch):
    """The compiler's word is no reason to refuse what may run."""
    monkeypatch.setattr(first_call, "peak_bytes_of", lambda memory: 1e12)
    step = made(memory_limit_bytes=LIMIT)
    checked(step)


def test_it_is_compiled_once(caplog):
    """Reading the memory leaves the call nothing to compile."""
    step = made(memory_limit_bytes=LIMIT)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        step(*arguments())
    compiled = [record.getMessage() for record in caplog.records if "Finished XLA compilation of jit(train)" in record.getMessage()]
    assert len(compiled) == 1, compiled
