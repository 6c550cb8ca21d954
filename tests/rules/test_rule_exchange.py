"""What a rule says of the data that shards send each other: notation, and when a choice is legal."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from rule_examples import conv, normal, operation
from test_rule_law import run_sharded

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.halo_exchange import exchange_steps
from autoshard.errors import RuleError
from autoshard.ir import Factor, Mesh, Rule, Send, Value, exchanges, legal

HALO = (Send("collective_permute", 0, 2), Send("collective_permute", 0, 1))


@pytest.mark.parametrize(
    "factor, text",
    [
        (Factor(8, "permutation", sends=HALO), "permutation={i/collective_permute 2 of 0 + collective_permute 1 of 0}"),
        (Factor(8, "reduction", "max", (Send("all_gather", 1),)), "reduction={i:max/all_gather 1 of 1}"),
        (Factor(8, "reduction", "sum", (Send("collective_permute", 0, 0),)), "reduction={i/collective_permute all of 0}"),
        (Factor(8, "permutation"), "permutation={i}"),
    ],
)
def test_sends_are_part_of_the_notation(factor, text):
    """A factor's sends stand behind it, and are read back."""
    rule = Rule((factor,), (((0,),),), (((0,),),))
    assert str(rule) == f"([i])->([i]) {{i=8}} {text}"
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "make",
    [
        lambda: Factor(8, "pass_through", sends=HALO),
        lambda: Factor(8, "need_replication", sends=HALO),
        lambda: Send("all_to_all", 0),
        lambda: Send("all_gather", 0, -1),
    ],
)
def test_only_reductions_and_permutations_send_and_only_what_is_modelled(make):
    """Any other send, or sender, is refused with the rule it breaks."""
    with pytest.raises(RuleError, match="got"):
        make()


def test_a_permutation_that_sends_nothing_stays_whole():
    """Without a model of its exchange a factor is not split: Shardy's own permutations, read from its rules, are not."""
    (factor,) = Rule.parse("([i])->([i]) {i=8} permutation={i}").factors
    assert not factor.shardable


@pytest.mark.parametrize("shards, fits", [(2, True), (4, False), (8, False)])
def test_a_halo_reaches_into_the_neighbour_and_no_further(shards, fits):
    """Three elements from either side need shards of three at least."""
    rule = conv(normal(1, 1, 8, 1), normal(1, 1, 7, 1)).rule
    (space,) = (f for f, factor in enumerate(rule.factors) if factor.sends)
    assert legal(rule, ((space, -1),), (shards,)) == fits


@pytest.mark.parametrize("shards, fits", [(2, True), (4, True), (8, False)])
def test_each_shard_has_the_k_best_that_it_offers(shards, fits):
    """The two best of every shard are gathered, so that a shard has two elements."""
    rule = operation(lambda x: lax.top_k(x, 2), normal(3, 8)).rule
    (searched,) = (f for f, factor in enumerate(rule.factors) if factor.sends)
    assert legal(rule, ((searched, -1),), (shards,)) == fits


def test_axes_of_size_one_exchange_nothing():
    """A mesh axis with one device takes part in no exchange, alone or with others."""
    rule = operation(lambda x: lax.cumsum(x, 0), normal(8, 3)).rule
    choice = ((0, -1), (0, -1))
    assert exchanges(rule, choice, (1, 1)) == ()
    assert exchanges(rule, choice, (1, 4)) == ((0, (1,)),)
    assert exchanges(rule, choice, (2, 4)) == ((0, (0, 1)),)


def test_a_later_halo_contains_the_earlier_one():
    """Corners come by way of the neighbour: the second dimension's halo is as long as the first one's extended shard."""
    mesh = Mesh.of({"x": 2, "y": 4})
    rule = conv(normal(1, 2, 8, 16), normal(3, 2, 3, 5)).rule
    first, second = (f for f, factor in enumerate(rule.factors) if factor.sends)
    tensors = [Value((1, 2, 8, 16), "float32", 4), Value((3, 2, 3, 5), "float32", 4), Value((1, 3, 8, 16), "float32", 4)]
    communication = Communication(Cluster.parse("cpu:8").links(mesh))
    steps = exchange_steps(mesh, communication, rule, ((first, -1), (second, -1)), tensors, [True] * len(tensors))
    assert [(step.axes, step.nbytes / 4) for step in steps] == [
        ((0,), 2 * 1 * 4),
        ((0,), 2 * 1 * 4),
        ((1,), 2 * (1 + 4 + 1) * 2),
        ((1,), 2 * (1 + 4 + 1) * 2),
    ]


def test_ties_over_shards_go_to_the_lowest_index():
    """An all-equal vector's extreme is its first element, as it is unsharded, and NaN exceeds everything."""
    flat, spoilt = np.ones(16, np.float32), np.ones(16, np.float32)
    spoilt[[9, 13]] = np.nan
    for x, first in ((flat, 0), (spoilt, 9)):
        for function in (lax.argmax, lax.argmin):
            op = operation(lambda x, function=function: function(x, 0, np.int32), x)
            ((found,),) = run_sharded(op, op.rule, [((0, -1),)], (8,))
            assert jax.numpy.unique(found).tolist() == [first]
    op = operation(lambda x: lax.top_k(x, 2), flat)
    (searched,) = (f for f, factor in enumerate(op.rule.factors) if factor.sends)
    ((_, places),) = run_sharded(op, op.rule, [((searched, -1),)], (8,))
    assert np.unique(places, axis=0).tolist() == [[0, 1]]
