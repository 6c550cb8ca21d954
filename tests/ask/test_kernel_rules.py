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
from autoshard.ask import kernel_checks, kernel_report, kernel_rules
from autoshard.errors import RuleError
from autoshard.rules.declared import DECLARED, Declared
from autoshard.testing import check_kernel_rule, kernels

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
    assert not any(doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed for module in (kernel_rules, kernel_checks, kernel_report))


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
        ("([b])->([b])", r"operand 0 \(x\) is \[b\] in .* shape \(8, 2\)"),
        ("([b, h], [])->([b, h])", "2 operands, and the call 1"),
        ("([b, h])->([b, h]) reduction={b}", "no result has, and 'b'"),
        ("([b, h)->([b, h])", "reads"),
        ("([b, h])->([b, h]) need_replication={hh}", "got 'hh'"),
        ("([b, b2])->([b2, b])", "multiply to the sizes"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(text, reason):
    """Notation, repeated factors, ranks and sizes: the error says which."""
    with pytest.raises(RuleError, match=reason):
        autoshard.search(autoshard.kernel_rule(jnp.tanh, text), jax.ShapeDtypeStruct((8, 2), "float32"), cluster="cpu:8")
    with pytest.raises(RuleError, match="a function, a foreign"):
        autoshard.kernel_rule(3, "([b])->([b])")
    with pytest.raises(RuleError, match="flops of a kernel is a number"):
        autoshard.kernel_rule(jnp.tanh, "([b])->([b])", flops=-1)
    with pytest.raises(RuleError, match=r"which raised TypeError.*Make it take \(8, 2\)"):
        autoshard.search(autoshard.kernel_rule(jnp.tanh, "([b, h])->([b, h])", bytes=lambda: 1), X, cluster="cpu:8")
    wrong = autoshard.kernel_rule(jnp.tanh, "([b])->([b])")
    with pytest.raises(RuleError, match=r"at .*test_kernel_rules.py:\d+ .*operand 0"):
        autoshard.search(lambda x: wrong(x) + 1, X, cluster="cpu:8")


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


def test_parts_of_a_sum_are_added_up():
    """Along a reduction each device has a part of the results; in plain JAX the function is whole."""
    fn = autoshard.kernel_rule(lambda x, to: jnp.sum(x * to, 0), "([row, width], [row, width])->([width]) reduction={row}")
    strategy = autoshard.search(fn, X, X, **{**ROWS, "pins": {"x": P("data"), "to": P("data")}})
    assert [each.kind for each in strategy.cost.collectives] == ["all_reduce"]
    for run in (strategy.apply(fn), strategy.apply(fn, lowering="constraints"), jax.jit(fn)):
        np.testing.assert_allclose(run(X, X), np.sum(X * X, 0), rtol=1e-6)


def test_a_mapped_function_is_independent_calls():
    """`jax.vmap` adds a factor to the arrays that it maps, and multiplies the work; it may be split as the others are."""
    fn = jax.vmap(autoshard.kernel_rule(lambda x, by: x * by, "([i, j], [j])->([i, j]) need_replication={j}", flops=1000), (0, None))
    args = np.stack([X] * 4), X[0]
    strategy = autoshard.search(lambda x, by: fn(x, by), *args, **ROWS)
    assert strategy.out_specs == P("data", None, None) and not strategy.cost.collectives and strategy.cost.flops == 4000 / 4
    np.testing.assert_allclose(strategy.apply(lambda x, by: fn(x, by))(*args), args[0] * args[1], rtol=1e-6)


def factorised(x):
    """Cholesky factors by LAPACK, as a foreign function of one matrix."""
    made = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)
    return jax.ffi.ffi_call("lapack_spotrf_ffi", made, vmap_method="broadcast_all")(x, uplo=np.uint8(ord("L")))[0]


def test_a_foreign_function_is_mapped_and_scanned(declared):
    """Independent calls of `vmap` are split though the rule has one, in a loop, too, and work is that of all calls."""
    jnp.linalg.cholesky(jnp.eye(2))  # registers LAPACK
    autoshard.kernel_rule("lapack_spotrf_ffi", "([i, j])->([i, j], []) need_replication={i, j}", flops=lambda shape: shape[0] ** 3, bytes=8)

    def step(x):
        return jax.lax.scan(lambda h, _: (jax.vmap(factorised)(h) + x, None), x, None, length=3)[0]

    x = np.stack([np.eye(2, dtype=np.float32) * k for k in range(1, 9)])
    strategy = autoshard.search(step, x, **ROWS)
    assert strategy.out_specs == P("data", None, None) and not strategy.cost.collectives
    assert strategy.cost.flops == 3 * 8 * 2**3 / 4
    np.testing.assert_allclose(strategy.apply(step)(x), step(x), rtol=1e-6)


@pytest.mark.sample(1)
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


def test_kernels_are_shown_with_rule_and_work():
    """Each kernel with its line, its rule, its work, and why an axis is whole; nothing where there is none."""
    found = kernels(kernel_examples.product, jnp.ones((4, 4)), jnp.ones((4, 8)))
    ((place, rule),), text = found.rules, str(found)
    assert place.startswith("tests/kernel_examples.py:") and rule.startswith("([im, n], [o, kp])->([ij, kl])")
    assert "grid axis 2 is not" in text and "FLOP" in text and found.work[0][1].matrix_flops == 2 * 4 * 8 * 4
    assert "There are none" in str(kernels(jnp.tanh, X))


def test_a_wrong_rule_fails_the_check():
    """A factor whose parts depend on each other is named, with the line and the size of the error."""
    wrong = autoshard.kernel_rule(lambda x: x - x.max(-1, keepdims=True), "([row, col])->([row, col])")
    with pytest.raises(RuleError, match=r"test_kernel_rules.py:\d+.* differs by .* when col of \(\[row, col\]\)"):
        check_kernel_rule(lambda x: wrong(x) * 1, X)
    with pytest.raises(RuleError, match=r"test_kernel_rules.py:\d+"):
        check_kernel_rule(wrong, X)
    with pytest.raises(RuleError, match="found none"):
        check_kernel_rule(jnp.tanh, X)
