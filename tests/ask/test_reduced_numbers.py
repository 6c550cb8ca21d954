"""Numbers of kernels next to those of the program as it is written."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import kernel_examples
import pytest

import autoshard
from autoshard.ask.reduced_numbers import reduced_numbers
from autoshard.rewrite import ring_attention
from tests.rewrite.attention_programs import FUSED, arrays, gradients


@pytest.fixture(scope="module")
def fused():
    """A strategy with fused attention of more examples, heads and positions than are compared, its function and arguments."""
    fn, args = gradients(FUSED["windowed"][0]), arrays(length=2048, width=64, heads=4, kv_heads=4, batch=8)
    return autoshard.search(fn, *args, cluster="v5e:2x4", kernels="auto"), fn, args


@pytest.mark.slow
def test_fused_attention_computes_what_it_replaces(fused):
    """Forward and gradients, at a reduced size, in the verification, its report and its JSON."""
    strategy, fn, args = fused
    found = autoshard.verify(strategy, fn, *args)
    (numbers,) = found.numbers
    assert "attention_programs.py" in numbers.place and "256 of 2,048 queries" in numbers.compared and "4 of 32 heads" in numbers.compared
    assert 0 < numbers.forward < 1e-5 and 0 < numbers.gradients < 1e-5
    assert found.as_predicted and f"{numbers.forward:.1e}" in str(found) and found.to_json()["numbers"][0]["forward"] == numbers.forward
    assert not autoshard.verify(strategy, fn, *args, numbers=False).numbers


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_told(fused, monkeypatch):
    """A window that is one key shorter: the verdict, and so the command's exit code."""
    strategy, fn, args = fused
    right = ring_attention.IMPLEMENTATIONS["splash attention"]

    def shorter(problem, interpret):
        return right.function(replace(problem, highest=problem.highest - 1), interpret)

    monkeypatch.setitem(ring_attention.IMPLEMENTATIONS, right.name, replace(right, function=shorter))
    found = reduced_numbers(fn, args, strategy.record)
    verified = replace(autoshard.verify(strategy, fn, *args, numbers=False), numbers=found)
    assert not found[0].agree and found[0].forward > 1e-3 < found[0].gradients
    assert not verified.as_predicted and "Not as predicted" in str(verified) and "differs" in str(verified)


def test_attention_for_gpus_is_compared_in_jaxs_operations():
    """cuDNN runs on GPUs alone, which the report says; the lowered program has calls in its place."""
    fn, args = gradients(FUSED["causal"][0]), arrays(length=1024, width=64, kv_heads=4, batch=8)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), args)
    strategy = autoshard.search(fn, *args, cluster="h100:8x1", kernels="auto")
    (numbers,) = autoshard.verify(strategy, fn, *args).numbers
    assert numbers.agree and "GPUs alone" in numbers.compared


def test_kernels_of_the_program_are_compared_in_parts():
    """In a loop, with fewer blocks: each of the kernel's own sizes is of two blocks."""

    def step(w, x):
        return jax.lax.scan(lambda x, w: (kernel_examples.attention(x @ w, x, x) + x, None), x, w)[0]

    args = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4, 16, 8), jnp.float32)
    found = autoshard.verify(autoshard.search(step, *args, cluster="cpu:8"), step, *args)
    (numbers,) = found.numbers
    assert "4 parts" in numbers.compared and "[2, 4, 4, 8]" in numbers.compared and numbers.agree and found.as_predicted


def test_a_rule_that_is_wrong_shows_in_numbers():
    """Rows that depend on each other, declared independent."""
    wrong = autoshard.kernel_rule(lambda x: x - x.max(-1, keepdims=True), "([i, j])->([i, j])")
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    (numbers,) = autoshard.verify(autoshard.search(wrong, x, cluster="cpu:8"), wrong, x).numbers
    assert not numbers.agree and not numbers.missing


def test_what_cannot_be_compared_says_why():
    """A foreign function that is not there, and a kernel without parts."""
    made = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    autoshard.kernel_rule("not_there", "([i, j])->([i, j])")
    found = autoshard.search(lambda x: jax.ffi.ffi_call("not_there", made)(x), made, cluster="cpu:8")
    (numbers,) = reduced_numbers(lambda x: jax.ffi.ffi_call("not_there", made)(x), (made,), found.record)
    assert "does not run on this machine" in numbers.missing and numbers.agree


@pytest.mark.slow
def test_stages_with_kernels_are_verified():
    """Each stage's lowered programs, with calls in the place of kernels, and the numbers of the whole."""

    def block(x, w):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
        return x + FUSED["causal"][0](q, k, v).reshape(x.shape), None

    step = jax.grad(lambda w, x: jnp.sum(jnp.sin(jax.lax.scan(block, x, w)[0])))
    args = jax.ShapeDtypeStruct((2, 3, 128, 2, 64), jnp.float32), jax.ShapeDtypeStruct((8, 2048, 128), jnp.float32)
    strategy = autoshard.search(step, *args, cluster="v5e:2x2", kernels="auto", stages=2, microbatches=2)
    found = autoshard.verify(strategy, step, *args)
    assert [each.agree for each in found.numbers] == [True] and "attention at" in str(found) and found.to_json()["numbers"]
