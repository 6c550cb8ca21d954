"""Attention in traced programs: what is recognised of it, and what is told apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.rewrite.attention_match import Attention, Refused, attentions
from autoshard.rewrite.scopes import program
from autoshard.rewrite.wiring import Wiring
from autoshard.trace import trace
from tests.rewrite.attention_programs import FUSED, PLAIN, arrays, causal, gradients

KV_HEADS = {"grouped": 2, "unnormalised": 2}


def found(function: Callable, *args: Any) -> list[Attention | Refused]:
    root = program(trace(function, *args).jaxpr)
    return [*attentions(root, Wiring.of(root))]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("remat", [False, True])
def test_attention_is_recognised_however_it_is_written(name: str, remat: bool) -> None:
    """Mask, scale and cap are those written, and each pass has its results: output, and three gradients."""
    function, expected = FUSED[name]
    q, k, v, ct = arrays(length=64, kv_heads=KV_HEADS.get(name, 4))
    for call, args, several in ((function, (q, k, v), False), (gradients(function, remat=remat), (q, k, v, ct), True)):
        every = found(call, *args)
        assert every and all(isinstance(each, Attention) for each in every), every
        for each in every:
            mask = {name: getattr(each.mask, name) for name in ("lowest", "highest")}
            mask |= {name: bool(getattr(each.mask, name)) for name in ("segments", "valid")}
            assert mask == {name: expected.get(name, None if name in ("lowest", "highest") else False) for name in mask}
            assert each.softcap == pytest.approx(expected.get("softcap", 0.0))
            assert each.scale == pytest.approx(expected.get("scale", each.scale))
        assert sum(each.output is not None for each in every) >= 1
        assert sum(all(each.gradients) for each in every) == several


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_plain_attention_is_told_apart_with_a_reason(name: str) -> None:
    """Biases, dropout and other masks and functions of scores are refused, in the forward and in the backward pass."""
    function, word = PLAIN[name]
    q, k, v, ct = arrays(length=64)
    for each in (*found(function, q, k, v), *found(gradients(function), q, k, v, ct)):
        assert isinstance(each, Refused)
    (refused,) = found(function, q, k, v)
    assert isinstance(refused, Refused) and word in refused.reason


def test_a_mask_that_differs_at_one_distance_is_another_one() -> None:
    """A window's length is read to the position, in long sequences too."""

    def windowed(window: int) -> Callable:
        def call(q, k, v):
            at = jnp.arange(q.shape[1])
            mask = (at[:, None] >= at[None, :]) & (at[:, None] - at[None, :] < window)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)

        return call

    q, k, v, _ = arrays(length=4096, heads=1, kv_heads=1, batch=1)
    for window in (2, 511, 1024, 4000):
        (each,) = found(windowed(window), q, k, v)
        assert isinstance(each, Attention) and (each.mask.lowest, each.mask.highest) == (0, window - 1)


def test_a_mask_of_data_is_none_of_positions() -> None:
    """Keys of one rare token that are left out are padding, though no value that is made up is that token."""

    def attend(q, k, v, tokens):
        scores = jnp.where((tokens != 50256)[None, None, None, :], jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    (each,) = found(attend, *arrays()[:3], jax.ShapeDtypeStruct((16,), jnp.int32))
    assert isinstance(each, Attention) and each.mask.valid is not None and each.mask.valid[2]


def test_a_wrong_gradient_is_not_replaced() -> None:
    """A backward pass that is not the derivative stays as it is written."""

    @jax.custom_vjp
    def attend(q, k, v):
        return causal(q, k, v)

    def backward(kept, ct):
        dq, dk, dv = jax.vjp(causal, *kept)[1](ct)
        return dq, dk, dv

    def wrong(kept, ct):
        q, k, v = kept
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((q.shape[1],) * 2, bool)), scores, -1e9))
        ds = p * jnp.einsum("bqhd,bkhd->bhqk", ct, v)  # without the sums of rows
        return jnp.einsum("bhqk,bkhd->bqhd", ds, k), jnp.einsum("bhqk,bqhd->bkhd", ds, q), jnp.einsum("bhqk,bqhd->bkhd", p, ct)

    args = arrays()
    for rule, right in ((backward, True), (wrong, False)):
        attend.defvjp(lambda q, k, v: (causal(q, k, v), (q, k, v)), rule)
        last = found(gradients(lambda q, k, v: attend(q, k, v)), *args)[-1]
        assert (isinstance(last, Attention) and all(last.gradients)) == right


def test_random_programs_of_products_are_not_attention() -> None:
    """A mixture of experts' gates, a head's softmax and feed-forward layers are neither replaced nor told."""

    def other(x, w, gate):
        weights = jax.nn.softmax(x @ gate)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, w))
        return jnp.einsum("bte,btef->btf", weights, hidden), -jax.nn.log_softmax(x @ w[0]).mean()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 8), (4, 8, 8), (8, 4))]
    assert not found(other, *shapes)
    assert not found(jax.grad(lambda *args: sum(map(jnp.sum, other(*args))), argnums=(0, 1, 2)), *shapes)
