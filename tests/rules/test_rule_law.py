"""Every rule, executed: shard the operands as it says, run each shard alone, combine as it says, compare with the whole.

The shards run inside `jax.shard_map`, where no partitioner can repair a wrong rule, as the manual lowering runs them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from rule_examples import EXAMPLES, Operation, example

from autoshard.ir import (
    Choice,
    Factor,
    Mesh,
    Rule,
    Value,
    computed_layout,
    factor_names,
    layout_to_spec,
    legal,
    operand_layout,
    result_layout,
)
from autoshard.lower.shards import Sharded
from autoshard.rules import registry, rule_of

AXES = ("x", "y")

# Each device draws whole what it cannot draw by positions, and takes its part: no promise about these can be wrong.
DRAWN = {"random_bits", "random_split"}


def choices(rule: Rule, sizes: tuple[int, ...]) -> list[Choice]:
    """The legal choices that shard over all axes; of two that differ in the order of the axes, one."""
    found: dict[tuple[int, ...], Choice] = {}
    for factors in itertools.product(range(len(rule.factors)), repeat=len(sizes)):
        choice = tuple((f, -1) for f in factors)
        if legal(rule, choice, sizes):
            found.setdefault(tuple(sorted(factors)), choice)
    return list(found.values())


def spec(layout, rank: int) -> PartitionSpec:
    return PartitionSpec(*layout_to_spec(layout, AXES[: len(layout)], rank))


def mesh_of(sizes: tuple[int, ...]):
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def run_sharded(op: Operation, rule: Rule, under: Sequence[Choice], sizes: tuple[int, ...]) -> list[tuple]:
    """The results under each choice, shard by shard and combined as the rule says, with a dimension for each axis that they lack.

    What the rule leaves whole on several devices is thus what each of them has. All choices are compiled together, which is far quicker.
    """
    mesh = Mesh(tuple(zip(AXES, sizes, strict=False)))
    shapes = (tuple(np.shape(x) for x in op.operands), tuple(tuple(v.shape) for v in op.results))

    def mapped(choice: Choice):
        sharded = Sharded(op.primitive.name, op.params, op.bind, rule, choice, mesh, *shapes)
        made = [result_layout(rule, choice, j) for j in range(len(op.results))]
        unused = [[AXES[axis] for axis, dim in enumerate(layout) if dim < 0] for layout in made]

        def shard(*operands):
            return tuple(lax.expand_dims(y, range(len(lacking))) for y, lacking in zip(sharded.run(operands), unused, strict=True))

        in_specs = tuple(spec(layout, np.ndim(x)) for layout, x in zip(sharded.entering, op.operands, strict=True))
        out_specs = tuple(
            PartitionSpec(*lacking, *spec(layout, len(v.shape))) for lacking, layout, v in zip(unused, made, op.results, strict=True)
        )
        return jax.shard_map(shard, mesh=mesh_of(sizes), in_specs=in_specs, out_specs=out_specs, check_vma=False)

    every = [mapped(choice) for choice in under]
    return jax.jit(lambda *operands: [run(*operands) for run in every])(*op.operands)


def plain(x) -> np.ndarray:
    """An array as numpy compares it: typed keys as their words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def check_law(op: Operation, rule: Rule, under: Mapping[tuple[int, ...], Sequence[Choice]]) -> None:
    """Raises where the operation, run in shards on meshes of these sizes under these choices of the rule, is not the whole one."""
    expected = list(map(plain, op.bind(*op.operands)))
    for sizes, chosen in under.items():
        for choice, results in zip(chosen, run_sharded(op, rule, chosen, sizes), strict=True):
            for found, wanted in zip(map(plain, results), expected, strict=True):
                wanted = np.broadcast_to(wanted, (*found.shape[: found.ndim - wanted.ndim], *wanted.shape))
                np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{rule} under {choice}")


def pairs(rule: Rule) -> list[Choice]:
    """Choices of two axes: all that put both on a factor whose shards exchange data, and a sample of the others."""
    legal_ones = choices(rule, (2, 2))
    joint = [choice for choice in legal_ones if choice[0] == choice[1] and rule.factors[choice[0][0]].sends]
    others = [choice for choice in legal_ones if choice not in joint]
    return joint + random.Random(0).sample(others, min(len(others), 3))


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_sharded_operation_equals_the_whole_one(name):
    """Along every factor a rule offers, and pairs of them, the combined shards are the unsharded result."""
    op = example(name)
    check_law(op, op.rule, {(2,): choices(op.rule, (2,)), (2, 2): pairs(op.rule)})


OTHER = {"sum": "max", "max": "sum", "min": "sum", "prod": "sum", "and": "or", "or": "and"}


def mutants(rule: Rule) -> Iterator[tuple[str, set[int], Rule]]:
    """Rules that promise what is not so, with the factors on which it shows."""

    def changed(number: int, *factor) -> Rule:
        return replace(rule, factors=(*rule.factors[:number], Factor(*factor), *rule.factors[number + 1 :]))

    for number, (name, factor) in enumerate(zip(factor_names(rule), rule.factors, strict=True)):
        if factor.kind != "pass_through":
            yield f"{name} passes through", {number}, changed(number, factor.size)
        if factor.kind == "reduction":
            yield f"{name} is reduced by another operator", {number}, changed(number, factor.size, "reduction", OTHER[factor.operator])
        if factor.kind == "reduction" and factor.sends:
            yield f"{name} sends nothing", {number}, changed(number, factor.size, "reduction", factor.operator)
    for side in ("operands", "results"):
        tensors = getattr(rule, side)
        for t, dims in enumerate(tensors):
            for a, b in itertools.combinations(range(len(dims)), 2):
                sizes = [math.prod(rule.factors[f].size for f in dims[d]) for d in (a, b)]
                if sizes[0] == sizes[1] > 1 and dims[a] != dims[b]:
                    swapped = [dims[b] if d == a else dims[a] if d == b else dim for d, dim in enumerate(dims)]
                    yield (
                        f"dimensions {a} and {b} of {side} {t} change places",
                        {*dims[a], *dims[b]},
                        replace(rule, **{side: (*tensors[:t], tuple(map(tuple, swapped)), *tensors[t + 1 :])}),
                    )


def exposing(rule: Rule, factors: set[int]) -> tuple[tuple[int, ...], Choice] | None:
    """The smallest mesh and a choice that split one of the factors; None where no legal one does."""
    for sizes in ((2,), (3,), (2, 2), (3, 2), (2, 3)):
        for choice in choices(rule, sizes):
            if factors & {f for f, _ in choice}:
                return sizes, choice
    return None


def test_every_family_has_rules_to_break():
    """No family of rules goes without a mutant that the law can refuse."""
    families = set()
    for name in EXAMPLES:
        op = example(name)
        if op.primitive.name not in DRAWN and any(exposing(rule, factors) for _, factors, rule in mutants(op.rule)):
            families.add(registry._FUNCTIONS[op.primitive.name].__module__)
    without = {"attention", "declared", "partitioning", "ring"}  # of a library's kernel and of users' rules: no example of one's own to run
    known = {module for function in registry._FUNCTIONS.values() if (module := function.__module__).startswith("autoshard.")}
    assert families == known - {f"autoshard.rules.{name}" for name in without}


@pytest.mark.sample(16)
@pytest.mark.parametrize("at_most", [2, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if example(name).primitive.name not in DRAWN])
def test_a_wrong_rule_breaks_the_law(name, at_most):
    """Whatever the rule is made to promise beyond the truth, running it per shard shows."""
    op = example(name)
    wrong = list(mutants(op.rule))
    random.Random(name).shuffle(wrong)
    for words, factors, rule in wrong[:at_most]:
        under = exposing(rule, factors)
        if under is None:  # not split on so few devices
            continue
        with pytest.raises((AssertionError, KeyError, TypeError, ValueError)):
            check_law(op, rule, {under[0]: [under[1]]})
            pytest.fail(f"{words}: {rule} under {under}", pytrace=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("random_")])
def test_random_numbers_do_not_depend_on_the_sharding(name):
    """Under jit, keys and bits drawn in shards are those drawn whole."""
    op = example(name)
    expected = list(map(plain, op.bind(*op.operands)))
    for choice in choices(op.rule, (2,)):
        mesh = mesh_of((2,))
        shardings = tuple(NamedSharding(mesh, spec(computed_layout(op.rule, choice, j), len(v.shape))) for j, v in enumerate(op.results))
        for found, wanted in zip(jax.jit(op.bind, out_shardings=shardings)(*op.operands), expected, strict=True):
            np.testing.assert_array_equal(plain(found), wanted)


@st.composite
def reshapes(draw):
    """Two shapes of equal size."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), max_size=6))

    def shape():
        order = draw(st.permutations(primes))
        cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=4)))
        return tuple(math.prod(order[a:b]) for a, b in itertools.pairwise([0, *cuts, len(primes)]))

    return shape(), shape()


@given(reshapes(), st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3)]))
@settings(deadline=None, max_examples=300)
def test_a_reshape_of_shards_is_the_shard_of_the_reshape(shapes, sizes):
    """For any two shapes and any legal choice, cutting and reshaping commute."""
    before, after = shapes
    rule = rule_of("reshape", {"new_sizes": after}, [Value(before, "int32", 4)], [Value(after, "int32", 4)])
    x = np.arange(math.prod(before)).reshape(before)
    for choice in choices(rule, sizes):
        for device in itertools.product(*map(range, sizes)):
            operand = cut(x, operand_layout(rule, choice, 0), sizes, device)
            result = cut(x.reshape(after), computed_layout(rule, choice, 0), sizes, device)
            np.testing.assert_array_equal(operand.reshape(result.shape), result, err_msg=f"{rule} under {choice}")


def cut(x: np.ndarray, layout, sizes, device) -> np.ndarray:
    """The piece of an array that a device holds."""
    for axis, dim in enumerate(layout):
        if dim >= 0:  # axes in mesh order, so a later axis cuts the pieces of an earlier one
            x = np.split(x, sizes[axis], dim)[device[axis]]
    return x


@pytest.mark.parametrize(
    "before, after, factors", [((6, 4), (4, 6), 1), ((8, 6), (2, 4, 6), 3), ((2, 3, 5), (30,), 3), ((4, 9), (9, 4), 0)]
)
def test_a_reshape_offers_every_common_digit(before, after, factors):
    """The refinement keeps as many shardable factors as the shapes have in common."""
    rule = rule_of("reshape", {"new_sizes": after}, [Value(before, "int32", 4)], [Value(after, "int32", 4)])
    assert sum(factor.shardable for factor in rule.factors) == factors
