"""The rule of last resort: composed from Shardy's, for primitives that have none here."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from problems import eager_cluster
from rule_examples import EXAMPLES, example
from test_rule_law import choices, mesh_of, spec
from test_rule_shardy import shardable

from autoshard import search
from autoshard.ir import Mesh, Rule, operand_layout, reductions, result_layout
from autoshard.rules import lookup, rules_of
from autoshard.rules.shardy import lowered_rule
from autoshard.trace import trace
from autoshard.verify import collectives_of


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def primitive_of(function, *args) -> core.Primitive:
    """A primitive of somebody's own, which lowers to what a function does, and has no implementation that could be traced."""
    primitive = core.Primitive(f"my_{function.__name__}")
    many = isinstance(jax.eval_shape(function, *args), tuple)
    primitive.multiple_results = many

    def types(*avals, **_):
        shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        found = [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]
        return found if many else found[0]

    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=many))
    return primitive


def composed(function, *args) -> Rule | None:
    """The rule composed for a function, as if it were one primitive."""
    return lowered_rule(jax.make_jaxpr(primitive_of(function, *args).bind)(*args).eqns[0])


def loop(x, y):
    return lax.while_loop(lambda c: c[2] < 3, lambda c: (c[0] + c[1], c[1], c[2] + 1), (x, y, 0))[0]


CASES = {
    "a_product": (lambda x, y: x @ y, (f32(8, 4), f32(4, 2)), "([i, k], [k, j])->([i, j]) {i=8, j=2, k=4} reduction={k}"),
    "a_read_sum": (
        lambda x, y: jnp.tanh(x @ y),
        (f32(8, 4), f32(4, 2)),
        "([i, k], [l, j])->([i, j]) {i=8, j=2, k=4, l=4} need_replication={k, l}",
    ),
    "a_sum_of_all": (lambda x: lax.reduce_max(jnp.exp(x), (0, 1)), (f32(8, 4),), "([i, j])->([]) {i=8, j=4} reduction={i:max, j:max}"),
    "an_initial_value": (lambda x: lax.reduce(x, 1.0, lax.add, (1,)), (f32(8, 4),), "([i, j])->([i]) {i=8, j=4} need_replication={j}"),
    "any": (lambda x: lax.reduce_or(x > 0, (1,)), (f32(8, 4),), "([i, j])->([i]) {i=8, j=4} reduction={j:or}"),
    "logsumexp": (lambda x: jnp.log(jnp.exp(x).sum(1)), (f32(8, 4),), "([i, j])->([i]) {i=8, j=4} need_replication={j}"),
    "one_sum_of_two": (lambda x: (x.sum(0), x * 2), (f32(8, 4),), "([k, i])->([i], [j, i]) {i=4, j=8, k=8} need_replication={j, k}"),
    "a_factor_twice": (
        lambda x: x + jnp.swapaxes(x, 1, 2),
        (f32(4, 8, 8),),
        "([i, l, m])->([i, j, k]) {i=4, j=8, k=8, l=8, m=8} need_replication={j, k, l, m}",
    ),
    "a_sum_that_feeds_another": (lambda x: (x.sum(), (x * x.sum()).sum()), (f32(8),), None),
    "a_merge": (lambda x: jnp.sin(x.reshape(32)), (f32(8, 4),), "([i, j])->([ij]) {i=8, j=4}"),
    "there_and_back": (
        lambda x: jnp.sin(x.reshape(32)).reshape(8, 4),
        (f32(8, 4),),
        "([i, k])->([i, j]) {i=8, j=4, k=4} need_replication={j, k}",
    ),
    "a_split_of_a_split": (lambda x: (x.reshape(2, 16) + 1).reshape(2, 4, 4), (f32(32),), "([ijk])->([i, j, k]) {i=2, j=4, k=4}"),
    "digits_that_interleave": (lambda x: x.reshape(2, 3), (f32(3, 2),), None),
    "one_constant_twice": (
        lambda x, y: x + (one := jnp.ones((4, 4))) + (one + y).T.sum(),
        (f32(4, 4), f32(4, 4)),
        "([i, j], [k, l])->([i, j]) {i=4, j=4, k=4, l=4} need_replication={k, l}",
    ),
    "a_call_twice": (
        lambda x, y: jax.jit(jnp.sin)(x) * jax.jit(jnp.sin)(y).sum(),
        (f32(4), f32(4)),
        "([i], [j])->([i]) {i=4, j=4} need_replication={j}",
    ),
    "iota": (lambda x: x + jnp.arange(8.0)[:, None], (f32(8, 4),), "([i, j])->([i, j]) {i=8, j=4}"),
    "chlo": (lambda x: lax.erf_inv(x) + lax.lgamma(x), (f32(8, 4),), "([i, j])->([i, j]) {i=8, j=4}"),
    "top_k": (lambda x: lax.top_k(x, 2)[0] + 1, (f32(8, 4),), None),
    "a_slice": (lambda x: x[:, 1:3] * 2, (f32(8, 4),), "([i, k])->([i, j]) {i=8, j=2, k=4} need_replication={j, k}"),
    "a_transform": (lambda x: jnp.fft.rfft(x).real, (f32(8, 4),), None),
    "a_batch_of_matrices": (
        lambda x: jnp.linalg.cholesky(x) * 2,
        (f32(8, 4, 4),),
        "([i, l, m])->([i, j, k]) {i=8, j=4, k=4, l=4, m=4} need_replication={j, k, l, m}",
    ),
    "a_loop": (loop, (f32(8, 4), f32(8, 4)), "([i, j], [i, j])->([i, j]) {i=8, j=4}"),
    "a_loop_until": (lambda x: lax.while_loop(lambda c: jnp.any(c < 5), lambda c: c + 1, x), (f32(8, 4),), None),
    "a_branch": (
        lambda p, x, y: lax.cond(p[0] > 0, lambda x, y: x + y, lambda x, y: y * 2, x, y),
        (f32(2), f32(8, 4), f32(8, 4)),
        "([k], [i, j], [i, j])->([i, j]) {i=8, j=4, k=2} need_replication={k}",
    ),
    "an_unused_operand": (lambda x, y: x * 2, (f32(8), f32(4)), "([i], [j])->([i]) {i=8, j=4}"),
    "a_lookup": (
        lambda x, i: x.at[i].get(mode="clip"),
        (f32(8, 4), jax.ShapeDtypeStruct((6,), np.int32)),
        "([k, j], [i])->([i, j]) {i=6, j=4, k=8} reduction={k}",
    ),
    "no_elements": (lambda x: x * 2, (f32(8, 0),), "([i, _])->([i, _]) {i=8}"),
    "scalars": (lambda x: x * 2, (f32(),), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_of_what_a_primitive_lowers_to_become_one(name):
    """What several operations share is one factor; what would need a collective in between stays whole."""
    function, args, expected = CASES[name]
    found = composed(function, *args)
    assert (None if found is None else str(found)) == expected


def test_the_words_of_a_typed_key_stay_whole():
    """In StableHLO a key is an array of words, which the program sees as one element."""
    keys = jax.random.split(jax.random.key(0), 8)
    assert str(composed(lambda keys: jax.vmap(jax.random.bits)(keys), keys)) == "([i])->([i]) {i=8}"
    assert str(composed(lambda keys: jax.random.key_data(keys), keys)) == "([i])->([i, j]) {i=8, j=2} need_replication={j}"


def test_what_cannot_be_lowered_or_has_effects_stays_as_it_is():
    """A primitive without a lowering, a callback and a failing lowering have no rule, and nothing is raised."""
    unknown = core.Primitive("not_for_this_platform")
    unknown.def_abstract_eval(lambda x: x)
    shape = f32(8)
    for function in (
        unknown.bind,
        lambda x: jax.pure_callback(np.sin, shape, x),
        lambda x: jax.experimental.io_callback(np.sin, shape, x),
    ):
        assert lowered_rule(jax.make_jaxpr(function)(shape).eqns[0]) is None


# A rule composed of several offers less where one of ours knows more; never more, but for these.
MASKED = "on the CPU it is a masked product; on other platforms one operation, whose groups may lie anywhere"
MORE = {"ragged_dot": MASKED, "ragged_dot_batched": MASKED}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_composed_rule_never_offers_more_than_ours(name):
    """As if our rule did not exist: whatever may be sharded by the composed one may be by ours, in the same kind."""
    op = example(name)
    found = lowered_rule(jax.make_jaxpr(lambda *args: op.primitive.bind(*args, **op.params))(*op.operands).eqns[0])
    offered = {} if found is None else shardable(found)
    assert (offered.items() <= shardable(op.rule).items()) == (name not in MORE), f"{op.rule} here, {found} there"


def adds_no_collective(name: str) -> None:
    """Asserts that XLA compiles the operation, sharded by its composed rule, with that rule's collectives and no others."""
    op = example(name)
    rule = lowered_rule(jax.make_jaxpr(lambda *args: op.primitive.bind(*args, **op.params))(*op.operands).eqns[0])
    for choice in [] if rule is None else choices(rule, (2,)):
        mesh = mesh_of((2,))
        where = [
            tuple(NamedSharding(mesh, spec(layout(rule, choice, j), np.ndim(x))) for j, x in enumerate(values))
            for layout, values in ((operand_layout, op.operands), (result_layout, op.results))
        ]
        compiled = jax.jit(op.bind, in_shardings=where[0], out_shardings=where[1]).lower(*op.operands).compile()
        found = [c.kind for c in collectives_of(compiled.as_text(), Mesh.of({"x": 2}))]
        assert found == ["all_reduce"] * bool(reductions(rule, choice)), f"{rule} under {choice}"


SAMPLE = sorted(random.Random(0).sample(sorted(EXAMPLES), 24))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_partitioner_follows_composed_rules(name):
    """What a composed rule promises holds in compiled code."""
    adds_no_collective(name)


@pytest.mark.slow(minutes=5)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in SAMPLE])
def test_the_partitioner_follows_all_composed_rules(name):
    """What a composed rule promises holds in compiled code, for every example that we have."""
    adds_no_collective(name)


def softcap(x, w):
    return jnp.tanh(x @ w), w * 2


def test_a_primitive_of_somebody_s_own_is_sharded(monkeypatch):
    """A program with a primitive that nobody here has heard of is searched, lowered and equal, its equation lowered once."""
    asked = []
    monkeypatch.setattr(lookup, "lowered_rule", lambda eqn: asked.append(eqn) or lowered_rule(eqn))
    x, w = np.ones((16, 8), np.float32), np.full((8, 8), 0.1, np.float32)
    primitive = primitive_of(softcap, x, w)

    def program(x, w):
        for _ in range(3):
            x, w = primitive.bind(x, w)
        return x

    graph = trace(program, x, w).graph
    asked.clear()
    rules = rules_of(graph)
    assert len(asked) == 1 and rules[0] is rules[2] and rules[0] is not None
    strategy = search(program, x, w, cluster=eager_cluster("cpu:8"), mesh={"x": 8}, searcher="recursive_programming")
    assert strategy.in_specs[0] == PartitionSpec("x", None)
    np.testing.assert_allclose(strategy.apply(program)(x, w), jax.jit(program)(x, w), rtol=1e-5)
