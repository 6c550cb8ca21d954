"""Rules that users declare for kernels: functions, foreign functions, and the check of rules against kernels."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import kernel_examples
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.api import kernel_checks, kernel_rules
from autoshard.errors import AutoshardError, RuleError
from autoshard.rules.declared import DECLARED, Declared
from autoshard.testing import check_kernel_rule

X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
ROWS = {"cluster": "cpu:4", "mesh": {"data": 4}, "searcher": "manual", "pins": {"x": P("data")}}


@pytest.fixture
def declared():
    """The declared rules, which are the same again afterwards."""
    before = dict(DECLARED)
    yield
    DECLARED.clear()
    DECLARED.update(before)


def test_examples():
    """The examples of the docstrings."""
    assert not any(doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed for module in (kernel_rules, kernel_checks))


def test_a_rule_has_factors_of_any_name():
    """Several factors of one dimension, sizes, and what cannot be split: that which is not in all results, or in no operand."""
    rule = Declared.parse("([b, k g, q], [b, k, s])->([b, k g, q], [b, new]) {g=2} need_replication={q}").rule(
        [(4, 6, 5), (4, 3, 7)], [(4, 6, 5), (4, 9)]
    )
    assert str(rule).startswith("([i, jk, l], [i, j, n])->([i, jk, l], [i, m])")
    assert {factor.size for factor in rule.factors if factor.shardable} == {4}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b, h -> b", "reads"),
        ("([b, b])->([b])", "once in a tensor"),
        ("([b, h])->([b, h]) {b:4}", "{g=4}"),
        ("([b])->([b])", "2, 2"),
        ("([b, h])->([b, h]) need_replication={hh}", "got 'hh'"),
        ("([b, b2])->([b2, b])", "multiply to the sizes"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(text, reason):
    """Notation, repeated factors, ranks and sizes: the error says which."""
    with pytest.raises(AutoshardError, match=reason):
        autoshard.search(autoshard.kernel_rule(jnp.tanh, text), jax.ShapeDtypeStruct((8, 2), "float32"), cluster="cpu:8")
    with pytest.raises(RuleError, match="a function, a foreign"):
        autoshard.kernel_rule(3, "([b])->([b])")


def test_a_function_is_called_with_shards():
    """A kernel whose index maps say nothing is split by the rule that its caller declares, with the work that he declares."""
    fn = autoshard.kernel_rule(kernel_examples.numbered, "([i, j])->([i, j]) need_replication={i}", flops=1e6, bytes=10)
    strategy = autoshard.search(fn, X.T.copy(), **{**ROWS, "pins": {"x": P(None, "data")}})
    assert strategy.out_specs == P(None, "data") and strategy.cost.flops == 1e6 / 4
    for run in (strategy.apply(fn), strategy.apply(fn, lowering="constraints"), jax.jit(fn)):
        np.testing.assert_allclose(run(X.T.copy()), kernel_examples.numbered(X.T.copy()))


def test_a_rule_may_leave_everything_whole():
    """A function whose rule lets nothing through reads whole arrays, though its own operations could be split."""
    fn = autoshard.kernel_rule(jnp.tanh, "([i, j])->([i, j]) need_replication={i, j}")
    strategy = autoshard.search(lambda x: fn(x), X, **ROWS)
    assert [each.kind for each in strategy.cost.collectives] == ["all_gather"]
    np.testing.assert_allclose(strategy.apply(lambda x: fn(x))(X), np.tanh(X), rtol=1e-6)


def test_a_foreign_function_is_called_with_shards(declared):
    """A call by target name reads whole arrays without a rule, and shards with one."""

    def step(x):
        return jax.ffi.ffi_call("of_my_own", jax.ShapeDtypeStruct(x.shape, x.dtype))(x) + 1

    def text():
        return autoshard.search(step, X, **ROWS).apply(step).lower(X).as_text()

    assert "@of_my_own" in text() and "(tensor<8x2xf32>) -> tensor<8x2xf32>" in text()
    autoshard.kernel_rule("of_my_own", "([i, j])->([i, j]) need_replication={j}", flops=lambda shape: 10 * shape[0])
    assert "(tensor<2x2xf32>) -> tensor<2x2xf32>" in text()
    assert autoshard.search(step, X, **ROWS).cost.flops == 20


@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (kernel_examples.attention, [(2, 4, 4, 2), (2, 2, 6, 2), (2, 2, 6, 2)]),
        (kernel_examples.product, [(4, 4), (4, 8)]),
        (kernel_examples.grouped_gradient, [(4, 4, 3)]),
        (autoshard.kernel_rule(lambda x: x - x.max(-1, keepdims=True), "([i, j])->([i, j]) need_replication={j}"), [(8, 2)]),
    ],
)
def test_right_rules_pass_the_check(kernel, args):
    """Kernels with several factors, minor ones among them, run in parts as a whole."""
    check_kernel_rule(kernel, *(jax.ShapeDtypeStruct(shape, "float32") for shape in args))


def test_a_wrong_rule_fails_the_check():
    """A factor whose parts depend on each other is named, with the line and the size of the error."""
    wrong = autoshard.kernel_rule(lambda x: x - x.max(-1, keepdims=True), "([i, j])->([i, j])")
    with pytest.raises(RuleError, match=r"test_kernel_rules.py:\d+.* differs by .* when j of"):
        check_kernel_rule(lambda x: wrong(x) * 1, X)
    with pytest.raises(RuleError, match="found none"):
        check_kernel_rule(jnp.tanh, X)
