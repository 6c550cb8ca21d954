"""Functions that partition themselves: the author's rule is read, and holds as far as the author's callback agrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P
from rule_examples import value

import autoshard
from autoshard.rules import rule_of

WHOLE = ("d", "k")


def attend(q, k, v):
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v


def alike(mesh, arguments, result):
    """A callback that wants all operands sharded in the same way."""
    if len({str(each.sharding.spec) for each in arguments}) > 1:
        raise ValueError("operands are sharded alike")
    return mesh, attend, result.sharding, tuple(each.sharding for each in arguments)


def partitioning(rule, partition=None, **factors):
    """Attention with an author's rule."""
    made = custom_partitioning(lambda q, k, v: attend(q, k, v))
    made.def_partition(
        partition=partition or (lambda mesh, args, result: (mesh, attend, result.sharding, tuple(each.sharding for each in args))),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule=rule,
        **factors,
    )
    return made


NAMED = "b q d, b k d, b k d -> b q d"
RULES = {
    "named": (partitioning(NAMED, need_replication_factors=WHOLE), "([i, j, k], [i, l, k], [i, l, k])->([i, j, k])", {"k", "l"}),
    "computed": (
        partitioning(lambda mesh, operands, results: (NAMED, {"need_replication_factors": WHOLE})),
        "([i, j, k], [i, l, k], [i, l, k])->([i, j, k])",
        {"k", "l"},
    ),
    "leading": (
        partitioning("... q d, ... k d, ... k d -> ... q d", need_replication_factors=WHOLE),
        "([i, j, k], [i, l, k], [i, l, k])->([i, j, k])",
        {"k", "l"},
    ),
    "reduced": (
        partitioning(NAMED, reduction_factors=("k",), need_replication_factors=("d",)),
        "([i, j, k], [i, l, k], [i, l, k])->([i, j, k])",
        {"k", "l"},
    ),
    "refused": (partitioning(NAMED, alike), "([i, j, k], [i, l, k], [i, l, k])->([i, j, k])", {"j", "l"}),
}


def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(8, length, 4)).astype(np.float32) for length in (6, 10, 10)]


@pytest.mark.parametrize("name", RULES)
def test_an_authors_rule_is_read(name):
    """Written or computed, with named or leading dimensions: what the author and his callback allow passes through, the rest is whole."""
    function, dims, whole = RULES[name]
    (eqn,) = jax.make_jaxpr(function)(*arrays()).eqns
    rule = rule_of(eqn.primitive.name, eqn.params, [value(v.aval) for v in eqn.invars], [value(v.aval) for v in eqn.outvars])
    text, _, kinds = str(rule).partition(" need_replication={")
    assert text.startswith(dims + " {") and set(kinds.rstrip("}").split(", ")) == whole


@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_a_function_that_partitions_itself_runs_on_shards(lowering):
    """Each device runs the author's function; where the callback does not keep to the rule, the function's own operations are split."""
    loose = partitioning("b q d, c k d, e k d -> b q d", alike, need_replication_factors=("q", "k", "d"))
    expected = attend(*arrays())
    for function in (RULES["computed"][0], loose):
        q, k, v = arrays()
        options = {"cluster": "cpu:8", "mesh": {"data": 4, "rows": 2}, "searcher": "manual", "pins": {"q": P("data", None)}}
        strategy = autoshard.search(lambda q, k, v, of=function: of(q, k, v) * 1, q, k, v, **options)
        step = strategy.apply(lambda q, k, v, of=function: of(q, k, v) * 1, lowering=lowering)
        np.testing.assert_allclose(step(q, k, v), expected, rtol=1e-5, atol=1e-6)
        assert strategy.cost.flops < 2 * 2 * 8 * 6 * 10 * 4 / 3


def test_a_callback_is_asked_once_a_factor():
    """For the rule, for whether it splits anything, and in several searches of one trace."""
    asked = []

    def partition(mesh, arguments, result):
        asked.append(str(result.sharding.spec))
        return mesh, attend, result.sharding, tuple(each.sharding for each in arguments)

    function = partitioning(NAMED, partition, need_replication_factors=WHOLE)
    strategy = autoshard.search(lambda *x: function(*x), *arrays(), cluster="cpu:8")
    assert strategy.cost.flops and len(asked) == len(set(asked)) == 2
