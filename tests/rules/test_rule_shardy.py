"""Our rules against Shardy's own registry, which every jaxlib carries."""

from __future__ import annotations

import re
from collections import defaultdict

import jax
import pytest
from jaxlib.mlir.passmanager import PassManager
from rule_examples import EXAMPLES, Operation, example

from autoshard.ir import Rule

RULE = re.compile(r"op_sharding_rule<(?P<rule>.*?)(?: blocked_propagation=\{[^}]*\})?>$")

# Lowered to several operations, or to one that Shardy's registry lacks (chlo, custom calls, iota).
NOT_ONE = set(
    [
        *(name for name in EXAMPLES if name.startswith("kernel_")),
        "add_scalar",
        "mul_size_one",
        "integer_pow",
        "logistic",
        "erf_inv",
        "igamma",
        "nextafter",
        "clamp_scalar",
        "optimization_barrier",
        "ragged_dot",
        "ragged_dot_batched",
        "argmax",
        "cumsum",
        "cumlogsumexp",
        "top_k",
        "approx_top_k",
        "split",
        "stack",
        "unstack",
        "tile",
        "argmax_ties",
        "argmin_ties",
        "cumsum_reverse",
        "cumprod",
        "cummax",
        "cummin",
        "top_k_ties",
        "select_and_scatter_overlapping",
        "embedding_fill",
        "iota",
        "random_bits",
        "random_bits_many_keys",
        "random_bits_rbg",
        "random_bits_rbg_many_keys",
        "random_split",
        "random_fold_in",
        "random_fold_in_unsafe_rbg",
        "rng_bit_generator",
        "cholesky",
        "qr",
        "eigh",
        "svd",
        "lu",
        "tridiagonal_solve",
        "select_and_scatter_add",
        "random_gamma",
        "reshape_reordered",
    ]
)

# Where the two differ, and why.
DIFFERENCES = {
    "conv_pointwise": "Shardy takes every spatial dimension for a permutation, also under a window of one element",
    "conv_strided_pointwise": "Shardy takes every spatial dimension for a permutation, also where windows do not overlap",
    "conv_cropped": "Shardy takes every spatial dimension for a permutation, also where windows do not overlap",
    "conv_strided": "Shardy splits the stride off as a reduction",
    "reduce_window_max": "Shardy takes every pooled dimension for a permutation, also where windows do not overlap",
    "reduce_window_apart": "Shardy takes every pooled dimension for a permutation, also where windows do not overlap",
    "select_and_gather_add": "lowered to one pooling of pairs, which has two results",
    "conv_contracts_batch": "Shardy sums over space where the window covers it",
    "conv_grouped": "XLA:CPU aborts on sharded groups",
    "conv_depthwise": "XLA:CPU aborts on sharded groups",
    "conv_batch_grouped": "XLA:CPU aborts on sharded groups",
    "pad_shifts": "Shardy splits the dimension, along which elements then move between neighbours",
    "pad_shifts_back": "Shardy splits the dimension, along which elements then move between neighbours",
    "reduce_xor": "XLA has no all_reduce by xor",
    "reduce_and_bits": "XLA has all_reduce by and for booleans alone",
    "reduce": "Shardy takes any function for one that an all_reduce could apply",
    "uneven_regroup": "Shardy offers minor factors of dimensions whose major ones do not meet; no device order makes them local",
    "dynamic_update_slice": "Shardy shards the dimension that is written in part; XLA gathers it",
    "random_wrap": "a typed key is its words in StableHLO",
    "random_unwrap": "a typed key is its words in StableHLO",
    "triangular_solve": "Shardy shards the unknowns of a system, which depend on each other",
    "triangular_solve_right": "Shardy shards the unknowns of a system, which depend on each other",
}
if jax.__version_info__ >= (0, 11):
    del DIFFERENCES["dynamic_update_slice"]
    DIFFERENCES["dynamic_update_one"] = "Shardy keeps whole what is written in part; one position is written by the shard that has it"
if jax.__version_info__ >= (0, 12):
    del DIFFERENCES["pad_shifts"], DIFFERENCES["pad_shifts_back"]


def shardy_rule(op: Operation) -> Rule | None:
    """The rule Shardy gives the one StableHLO operation that this lowers to; None where it is several, or has none."""
    module = jax.jit(op.bind).lower(*op.operands).compiler_ir("stablehlo")
    PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))", module.context).run(module.operation)
    main = next(f for f in module.body.operations if f.attributes["sym_name"].value == "main")
    scalars = {"stablehlo.constant", "stablehlo.broadcast_in_dim"}  # initial values of reductions
    found = [
        o
        for o in main.regions[0].blocks[0].operations
        if o.name != "func.return" and not (o.name in scalars and all(not r.type.shape for r in o.results))
    ]
    if len(found) != 1 or "sdy.sharding_rule" not in found[0].attributes:
        return None
    text = RULE.search(str(found[0].attributes["sdy.sharding_rule"]))["rule"]
    return Rule.parse(text if "{" in text else text + " {}")


def shardable(rule: Rule) -> dict[frozenset, str]:
    """The kind of each factor that the partitioner may shard, by where it stands: (tensor, dimension, factors to its right), scalars aside.

    Permutations are ours alone: Shardy names them, and has no collectives for them.
    """
    places = defaultdict(set)
    for t, tensor in enumerate(filter(None, (*rule.operands, *rule.results))):
        for d, dim in enumerate(tensor):
            for k, factor in enumerate(reversed([f for f in dim if rule.factors[f].size > 1])):
                places[factor].add((t, d, k))
    return {frozenset(where): rule.factors[f].kind for f, where in places.items() if rule.factors[f].kind in ("pass_through", "reduction")}


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NOT_ONE])
def test_shardy_agrees(name):
    """What may be sharded, and whether it passes through or reduces, is what Shardy says, or the table says why not."""
    ours, theirs = example(name).rule, shardy_rule(example(name))
    assert theirs is not None
    assert (shardable(ours) == shardable(theirs)) == (name not in DIFFERENCES), f"{ours} here, {theirs} there"
