"""What XLA makes of the rules: compiled for shards, an operation has the collectives of its rule and no others."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from rule_examples import EXAMPLES, Operation, conv, example, normal
from test_rule_law import choices, mesh_of, spec

from autoshard.ir import operand_layout, reductions, result_layout
from autoshard.rules import runs_per_shard

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(op: Operation, choice, sizes, per_shard: bool) -> list[str]:
    """The collectives in the compiled operation, operands and results laid out as the rule says."""
    rule, mesh = op.rule, mesh_of(sizes)
    ins = tuple(spec(operand_layout(rule, choice, j), np.ndim(x)) for j, x in enumerate(op.operands))
    outs = tuple(spec(result_layout(rule, choice, j), len(v.shape)) for j, v in enumerate(op.results))
    run = jax.shard_map(op.bind, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False) if per_shard else op.bind
    where = [tuple(NamedSharding(mesh, s) for s in specs) for specs in (ins, outs)]
    compiled = jax.jit(run, in_shardings=where[0], out_shardings=where[1]).lower(*op.operands).compile()
    return COLLECTIVE.findall(compiled.as_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_partitioner_adds_no_collective(name):
    """One all_reduce for a sharded reduction, nothing for anything else a rule offers."""
    op = example(name)
    for choice in choices(op.rule, (2,)):
        expected = ["all-reduce"] * bool(reductions(op.rule, choice))
        found = collectives(op, choice, (2,), runs_per_shard(op.primitive.name, op.params))
        assert found == expected, f"{op.rule} under {choice}"


@pytest.mark.parametrize("name", ["matmul", "embedding", "take_along_axis", "scatter_add", "scatter_add_paired", "conv"])
def test_two_axes_on_two_factors_stay_local_too(name):
    """A second axis on another factor adds its own reduction and nothing else."""
    op = example(name)
    for choice in choices(op.rule, (2, 2)):
        n_factors = len({f for f, _ in choice if op.rule.factors[f].kind == "reduction"})
        assert collectives(op, choice, (2, 2), False) == ["all-reduce"] * n_factors, f"{op.rule} under {choice}"


@pytest.mark.parametrize("name", [name for name in EXAMPLES if runs_per_shard(example(name).primitive.name, example(name).params)])
def test_what_runs_per_shard_has_to(name):
    """Left to the partitioner these are gathered, or ask all shards at every trip; depthwise convolutions it splits itself."""
    op = example(name)
    found = [collectives(op, choice, (2,), False) for choice in choices(op.rule, (2,))]
    assert all(found) or name == "conv_depthwise"


def test_the_partitioner_still_gathers_grouped_convolutions():
    """A plain batch split of a grouped convolution is gathered, which is why it runs per shard."""
    op = conv(normal(4, 8, 6, 6), normal(8, 2, 3, 3), feature_group_count=4)
    (choice,) = choices(op.rule, (2,))
    assert collectives(op, choice, (2,), False) == ["all-gather"]
    assert collectives(op, choice, (2,), True) == []
