"""What XLA makes of the rules: compiled for shards, an operation has the collectives of its rule and no others."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from rule_examples import EXAMPLES, Operation, conv, example, normal, value
from test_rule_law import choices, mesh_of, spec

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.halo_exchange import exchange_steps
from autoshard.cost.reshard import reduction_steps
from autoshard.ir import Choice, Collective, Mesh, computed_layout, exchanges, operand_layout, reductions, result_layout
from autoshard.lower.shards import Sharded
from autoshard.rules import runs_per_shard
from autoshard.verify import collectives_of, compare


def abstract(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(tuple(zip("xy", sizes, strict=False)))


def collectives(op: Operation, choice: Choice, sizes: tuple[int, ...], per_shard: bool) -> tuple[Collective, ...]:
    """The collectives in the compiled operation, operands and results laid out as the rule says."""
    rule, mesh = op.rule, mesh_of(sizes)
    ins = tuple(spec(operand_layout(rule, choice, j), np.ndim(x)) for j, x in enumerate(op.operands))
    outs = tuple(spec(result_layout(rule, choice, j), len(v.shape)) for j, v in enumerate(op.results))

    def one_device(*shards):
        shapes = (tuple(np.shape(x) for x in op.operands), tuple(tuple(v.shape) for v in op.results))
        return tuple(Sharded(op.primitive.name, op.params, op.bind, rule, choice, abstract(sizes), *shapes).run(shards))

    run = jax.shard_map(one_device, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False) if per_shard else op.bind
    where = [tuple(NamedSharding(mesh, s) for s in specs) for specs in (ins, outs)]
    compiled = jax.jit(run, in_shardings=where[0], out_shardings=where[1]).lower(*op.operands).compile()
    return collectives_of(compiled.as_text(), abstract(sizes))


def predicted(op: Operation, choice: Choice, sizes: tuple[int, ...]) -> tuple[Collective, ...]:
    """What the rule makes of the choice: exchanges between shards, then partial results combined."""
    mesh, rule = abstract(sizes), op.rule
    communication = Communication(Cluster.parse(f"cpu:{mesh.size}").links(mesh))
    tensors = [value(x) for x in (*op.operands, *op.results)]
    steps = list(exchange_steps(mesh, communication, rule, choice, tensors, [True] * len(tensors)))
    for k, made in enumerate(map(value, op.results)):
        layout = computed_layout(rule, choice, k)
        steps += reduction_steps(mesh, communication, made.shape, made.itemsize, layout, reductions(rule, choice))
    return tuple(Collective(step.kind, tuple(mesh.names[axis] for axis in step.axes), step.nbytes) for step in steps)


def differences(op: Operation, choice: Choice, sizes: tuple[int, ...]) -> list:
    """Where the compiled collectives are not the predicted ones."""
    multiplied = any(operator == "prod" for _, operator, _ in reductions(op.rule, choice))  # which the partitioner all_reduces
    per_shard = runs_per_shard(op.primitive.name, op.params) or bool(exchanges(op.rule, choice, sizes)) or multiplied
    return [row for row in compare(predicted(op, choice, sizes), collectives(op, choice, sizes, per_shard)) if not row.agrees]


def quiet(op: Operation, sizes: tuple[int, ...]) -> list[Choice]:
    """The choices under which shards send each other nothing."""
    return [choice for choice in choices(op.rule, sizes) if not exchanges(op.rule, choice, sizes)]


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_partitioner_adds_no_collective(name):
    """The rule's exchange, one all_reduce for a sharded reduction, and nothing for anything else: in kind, axes and bytes."""
    op = example(name)
    for choice in choices(op.rule, (2,)):
        assert differences(op, choice, (2,)) == [], f"{op.rule} under {choice}"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    ["matmul", "embedding", "take_along_axis", "scatter_add", "scatter_add_paired", "conv", "cumsum_reverse", "argmax_ties", "rev_two",
     "conv_kernel_gradient", "select_and_scatter_overlapping"],
)  # fmt: skip
def test_two_axes_on_two_factors_stay_local_too(name):
    """A second axis on another factor adds its own exchange or reduction and nothing else."""
    op = example(name)
    for choice in choices(op.rule, (2, 2)):
        assert differences(op, choice, (2, 2)) == [], f"{op.rule} under {choice}"


SPLIT_AT_TIMES = {"conv_depthwise", "select_and_scatter_add", "select_and_scatter_overlapping"}
SPLIT_AT_TIMES |= {"triangular_solve", "triangular_solve_right", "tridiagonal_solve"}  # batches of systems are split
if jax.__version_info__ >= (0, 12):
    SPLIT_AT_TIMES |= {"fft"}  # batches of transforms are split
ABORTS = {"conv_cropped"}  # the process, with a failed check, if the partitioner is let to it

PER_SHARD = [name for name in EXAMPLES if runs_per_shard(example(name).primitive.name, example(name).params)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in PER_SHARD if name not in ABORTS])
def test_what_runs_per_shard_has_to(name):
    """Left to the partitioner these are gathered, or ask all shards at every trip; those of a kind that it splits at times are named."""
    op = example(name)
    found = [collectives(op, choice, (2,), False) for choice in quiet(op, (2,))]
    assert all(found) != (name in SPLIT_AT_TIMES)


def test_the_partitioner_still_gathers_grouped_convolutions():
    """A plain batch split of a grouped convolution is gathered, which is why it runs per shard."""
    op = conv(normal(4, 8, 6, 6), normal(8, 2, 3, 3), feature_group_count=4)
    (choice,) = quiet(op, (2,))
    assert [found.kind for found in collectives(op, choice, (2,), False)] == ["all_gather"]
    assert collectives(op, choice, (2,), True) == ()
