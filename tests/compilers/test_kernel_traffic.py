"""What kernels move: against cycles that XLA:TPU scheduled for single kernels, and laws of what is charged where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace

BF16, F32 = jnp.bfloat16, jnp.float32
LARGE = (64, 1024, 1024)


def facts_of(fn, *args, cluster="v5e:2x4"):
    graph = trace(fn, *args).graph
    return program_facts(graph, rules_of(graph), compiler_of(Cluster.parse(cluster)))


def seconds_of(fn, *args, cluster="v5e:1x1"):
    """Seconds of compute on one device."""
    facts, mesh = facts_of(fn, *args), Mesh.of({"data": 1})
    return evaluate(facts, CostModel(Cluster.parse(cluster), mesh), Assignment(mesh, {}, {}, {})).cost.compute_seconds


def leaf(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def convolution(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def adam(parameter, gradient, state):
    optimizer = optax.adam(1e-3)
    updates, state = optimizer.update(gradient, state, parameter)
    return optax.apply_updates(parameter, updates), state


def adam_of(dtype):
    parameter = leaf(4096, 2048, dtype=dtype)
    return adam, parameter, parameter, jax.eval_shape(optax.adam(1e-3).init, parameter)


# What libtpu 0.0.42 estimates for one device of a v5e, at 1.5 GHz; each program compiles to one kernel.
SCHEDULED = {
    "the smallest": (1_957, jax.nn.relu, leaf(8, 1024, dtype=F32)),
    "bfloat16 to bfloat16": (1_209_152, lambda x: jax.nn.relu(x) * 2, leaf(*LARGE)),
    "float32 to float32": (1_254_624, lambda x: jax.nn.relu(x) * 2, leaf(*LARGE, dtype=F32)),
    "bfloat16 to float32": (937_803, lambda x: jax.nn.gelu(x.astype(F32)), leaf(*LARGE)),
    "float32 to bfloat16": (1_534_000, lambda x: jax.nn.gelu(x).astype(BF16), leaf(*LARGE, dtype=F32)),
    "three operands": (1_807_860, lambda x, y, z: x + y + z, leaf(*LARGE), leaf(*LARGE), leaf(*LARGE)),
    "a sum": (935_744, lambda x: x.astype(F32).sum(-1), leaf(*LARGE)),
    "a sum of exponentials of float32": (1_209_000, lambda x: jnp.exp(x).sum(-1), leaf(*LARGE, dtype=F32)),
    "a sum of products": (1_209_152, lambda x, y: (x.astype(F32) * y.astype(F32)).sum((0, 1)), leaf(*LARGE), leaf(*LARGE)),
    "adam in bfloat16": (343_500, *adam_of(BF16)),
    "adam in float32": (537_500, *adam_of(F32)),
    "a product of little depth": (898_778, jnp.matmul, leaf(65536, 256), leaf(256, 1024)),
    "a product of more": (1_355_330, jnp.matmul, leaf(65536, 1024), leaf(1024, 1024)),
    "a product of most": (1_083_068, jnp.matmul, leaf(4096, 4096), leaf(4096, 4096)),
    "the smallest product": (4_153, jnp.matmul, leaf(128, 128), leaf(128, 128)),
    "a convolution of points": (683_170, convolution, leaf(128, 28, 28, 128), leaf(1, 1, 128, 512)),
    "a convolution": (239_584, convolution, leaf(128, 14, 14, 256), leaf(3, 3, 256, 256)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SCHEDULED)
def test_single_kernels_take_what_the_compiler_schedules(name):
    """Within a fifth of the compiler's cycles: most within a tenth, products that are bound by both memory and arithmetic least so."""
    cycles, fn, *args = SCHEDULED[name]
    assert seconds_of(fn, *args) * 1.5e9 == pytest.approx(cycles, rel=0.2)


def test_each_pass_over_activations_is_charged_once():
    """A normalisation's mean and variance are a pass each, and its elementwise part another, however many ops they are made of."""

    def normalised(x):
        y = x.astype(F32)
        mean = y.mean((0, 1))
        variance = ((y - mean) ** 2).mean((0, 1))
        return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(BF16)

    whole = 2.0 * 64 * 1024 * 1024
    facts = facts_of(normalised, leaf(*LARGE))
    reads = [moved for one in facts.traffic for _, moved in one.tensors if moved == whole]
    assert len(reads) == 4  # three that read, one that writes
    passes = [moved for one in facts.traffic for _, moved in one.passes]
    assert sorted(moved for moved in passes if moved >= whole) == [2 * whole] * 3


def test_a_product_takes_along_one_sum_of_its_result():
    """A sum of what a product makes reads nothing; a second one of another kind reads it again."""

    def both(x, w):
        y = x @ w
        return y, y.astype(F32).sum(0), (y * y).sum(0)

    facts = facts_of(both, leaf(4096, 256), leaf(256, 1024))
    sums = [facts.traffic[op.index] for op in facts.graph.walk() if op.primitive == "reduce_sum"]
    assert sorted(one.starts for one in sums) == [0, 1]
    assert min(sum(moved for _, moved in (*one.tensors, *one.passes)) for one in sums) <= 4 * 1024


def test_what_loops_stack_backward_is_filled_with_zeros_first():
    """A scan that stacks costs more than one that does not by what its stack takes, and where it runs backward the zeros before that."""
    length, width = 64, 1 << 20

    def stacks(reverse):
        return lambda x: jax.lax.scan(lambda x, _: (x * 2, x * 3), x, None, length=length, reverse=reverse)

    def does_not(x):
        return jax.lax.scan(lambda x, _: (x * 2, None), x, None, length=length)

    forward, backward = (seconds_of(stacks(reverse), leaf(width)) for reverse in (False, True))
    written = length * width * 2 / Cluster.parse("v5e:1x1").device.memory_rate
    assert written < forward - seconds_of(does_not, leaf(width)) < 4 * written
    assert backward - forward == pytest.approx(1_748_544 / 1.5e9, rel=0.1)  # scheduled for 64 Mi bfloat16, backward alone


@pytest.mark.parametrize(("other", "filled"), [((64, 1 << 20), 2), ((32, 1 << 20), 1), ((64, 1 << 19), 1)])
def test_stacks_are_filled_with_those_of_their_shape(other, filled):
    """Equal zeros are one value: a stack written from the first trip on is filled where another of its length and shape has to be."""
    length, width = other

    def program(x, y):
        backward = jax.lax.scan(lambda x, _: (x * 2, x * 3), x, None, length=64, reverse=True)
        return backward, jax.lax.scan(lambda y, _: (y * 2, y * 3), y, None, length=length)

    apart = (
        seconds_of(lambda x, y: program(x, y)[0], leaf(1 << 20), leaf(width)),
        seconds_of(lambda x, y: program(x, y)[1], leaf(1 << 20), leaf(width)),
    )
    zeros = seconds_of(program, leaf(1 << 20), leaf(width)) - sum(apart)
    assert zeros == pytest.approx((filled - 1) * 1_748_544 / 1.5e9, rel=0.1, abs=1e-6)


def test_products_write_what_is_stacked_forward():
    """A product whose result is stacked from the first trip on writes it there; from the last trip on a kernel copies it."""

    def stacks(reverse):
        return lambda x, w: jax.lax.scan(lambda x, _: (x @ w, x @ w), x, None, length=16, reverse=reverse)

    forward, backward = (facts_of(stacks(reverse), leaf(8192, 1024), leaf(1024, 1024)) for reverse in (False, True))
    starts = [sum(one.starts for one in facts.traffic) for facts in (forward, backward)]
    assert starts[1] == starts[0] + 1


def test_processors_that_nobody_knows_the_kernels_of_are_charged_op_by_op():
    """Where kernels are not known an op moves what lies in memory, whatever is fused with it."""
    facts = facts_of(lambda x: jax.nn.relu(x) * 2, leaf(*LARGE), cluster="h100:8")
    assert sum(moved for one in facts.traffic for _, moved in one.tensors) == 4.0 * 64 * 1024 * 1024
    assert not any(one.passes for one in facts.traffic)


def test_state_is_replaced_by_a_kernel_of_its_own():
    """A gradient's product is followed by a kernel that reads the gradient and the state and writes the state, fused as they may be."""

    def step(w, x, y):
        return w - 0.1 * (x.T @ y)

    args = leaf(4096, 4096), leaf(64, 4096), leaf(64, 4096)
    graph = trace(step, *args, donate_argnums=0).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    charged = {op.primitive: facts.traffic[op.index] for op in graph.walk()}
    assert (charged["dot_general"].starts, charged["sub"].starts) == (2, 1)
    assert charged["sub"].passes == ((2, (2 + 4 + 2 * 2) * 4096.0 * 4096.0),)  # the gradient by way of float32, the state there and back


def test_sharded_state_is_updated_in_parts():
    """Where gradients are scattered each device updates its share: fully sharded steps compute less than data parallel ones."""

    def step(w, x, y):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - y).astype(F32) ** 2))(w)

    args = leaf(4096, 4096), leaf(64, 4096), leaf(64, 4096)
    common = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "donate_argnums": 0}
    whole, parts = (autoshard.search(step, *args, searcher=how, **common).cost for how in ("data_parallel", "fully_sharded"))
    update = (2 + 4 + 2 * 2) * 4096.0 * 4096.0 / Cluster.parse("v5e:2x4").device.memory_rate
    assert whole.compute_seconds - parts.compute_seconds > 0.7 * update


@pytest.mark.parametrize(("dtype", "nbytes"), [(BF16, 8), (F32, 8)])
def test_what_shards_send_is_stored_once(dtype, nbytes):
    """Where pixels are sharded an activation is written, once, for the convolutions that send its borders; where images are, it is not."""
    image, kernel = leaf(64, 64, 64, 128, dtype=dtype), leaf(3, 3, 128, 128, dtype=dtype)

    def program(x, k):
        y = jnp.sin(x)
        return convolution(y, k), convolution(y, k)

    facts, mesh = facts_of(program, image, kernel), Mesh.of({"data": 8})
    _, *convolutions = facts.graph.walk()
    model = CostModel(Cluster.parse("v5e:2x4"), mesh)

    def seconds(op, axis):
        return model.op_seconds(facts, op, ((facts.rules[op.index].operands[0][axis][0], -1),))

    first, second = (seconds(op, 1) - seconds(op, 0) for op in convolutions)
    written = nbytes * image.size / 8 / model.cluster.device.memory_rate
    assert first - second == pytest.approx(written)


def test_a_convolution_with_the_larger_kernel_has_it_reversed():
    """The gradient of a transposed convolution's kernel: 2,021,472 cycles for 64 features, which tiles pad to 128 (libtpu 0.0.42)."""

    def loss(k, x):
        y = jax.lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y * 2).astype(F32).sum()

    facts = facts_of(jax.grad(loss), leaf(3, 3, 128, 64), leaf(32, 64, 64, 128))
    before = {op.index: traffic.before for op, traffic in zip(facts.graph.walk(), facts.traffic, strict=True) if traffic.before}
    ((index, ((tensor, nbytes),)),) = before.items()
    reversed_value = facts.graph.values[facts.graph.walk()[index].operands[tensor]]
    assert reversed_value.shape == (32, 128, 128, 64)
    device = Cluster.parse("v5e:1x1").device
    assert 2 * nbytes / device.memory_rate == pytest.approx(2_021_472 / 1.5e9, rel=0.1)


def test_what_a_scatter_adds_to_is_filled_with_zeros_first():
    """The gradient of an embedding: 32,768 x 1024 bfloat16 are filled in 0.49 ms on a v5e (libtpu 0.0.42); what is there is not."""
    table, tokens = leaf(32_768, 1024), jax.ShapeDtypeStruct((512,), jnp.int32)
    rows = leaf(512, 1024)
    filled = seconds_of(lambda tokens, rows: jnp.zeros(table.shape, BF16).at[tokens].add(rows), tokens, rows)
    there = seconds_of(lambda table, tokens, rows: table.at[tokens].add(rows), table, tokens, rows)
    assert filled - there == pytest.approx(0.49e-3, rel=0.3)


def test_maxima_beside_what_is_looked_up_leave_the_exponentials_a_pass_of_their_own():
    """The product's kernel makes logits, what is looked up of them, and their maxima; no other sum of them (libtpu 0.0.52)."""

    def loss(x, w, rows):
        logits = 30 * jnp.tanh((x @ w).astype(F32) / 30)
        return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, rows, -1)[:, 0])

    facts = facts_of(loss, leaf(4096, 1024), leaf(1024, 32768), leaf(4096, 1, dtype=jnp.int32))
    (maxima,), (exponentials, *_) = (
        [op for op in facts.graph.walk() if op.primitive == name and facts.graph.values[op.operands[0]].rank > 1]
        for name in ("reduce_max", "reduce_sum")
    )
    passes = [sum(nbytes for _, nbytes in facts.traffic[op.index].passes) for op in (maxima, exponentials)]
    assert passes[0] == 0 < facts.graph.values[exponentials.operands[0]].nbytes <= passes[1]
