"""The primitives of ordinary programs have rules, and looking them up is fast."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from rule_examples import equations, operation, value

from autoshard.errors import RuleError
from autoshard.ir import Factor, Graph, Op, Origin, Rule, Value
from autoshard.rules import registered, registry, rule, rule_of, rules_of

# Calls and control flow: inlined by the trace, or given layouts by their holders.
WITHOUT_RULE = {"jit", "custom_jvp_call", "custom_vjp_call", "scan", "while", "cond", "remat2", "checkpoint", "custom_linear_solve"}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def trained(loss, params, *batch):
    """A train step by AdamW with clipped gradients, as a jaxpr."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params, state, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.make_jaxpr(step)(params, jax.eval_shape(optimizer.init, params), *batch)


def cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def gpt():
    """An attention and feed-forward block between tied embeddings, with dropout."""

    def loss(p, tokens, seed):
        x = p["embed"][tokens] + p["position"]
        q, k, v = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, -1)
        split = lambda t: t.reshape(4, 16, 2, 8)  # noqa: E731
        scores = jnp.einsum("bqhd,bkhd->bhqk", split(q), split(k)) / 8**0.5
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -jnp.inf)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), split(v)).reshape(4, 16, 16) @ p["out"]
        h = jax.nn.gelu(x @ p["up"])
        h = jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.9, h.shape), h / 0.9, 0)
        return cross_entropy((x + h @ p["down"]) @ p["embed"].T, tokens)

    params = {"embed": f32(32, 16), "position": f32(16, 16), "qkv": f32(16, 48), "out": f32(16, 16), "up": f32(16, 64), "down": f32(64, 16)}
    return trained(loss, params, i32(4, 16), i32())


def lenet():
    """Convolutions, max and average pooling, dense layers."""

    def loss(p, x, y):
        for w in ("c1", "c2"):
            x = jax.nn.relu(lax.conv_general_dilated(x, p[w], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return cross_entropy(x.reshape(x.shape[0], -1) @ p["w"], y)

    return trained(loss, {"c1": f32(5, 5, 1, 4), "c2": f32(5, 5, 4, 8), "w": f32(8, 10)}, f32(8, 8, 8, 1), i32(8))


def lstm():
    """A scan over time with gates, and its gradient."""

    def loss(p, x, y):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], 8))
        (h, _), _ = lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
        return cross_entropy(h @ p["out"], y)

    return trained(loss, {"x": f32(6, 32), "h": f32(8, 32), "out": f32(8, 10)}, f32(4, 12, 6), i32(4))


def moe():
    """Top-2 routing to experts of limited capacity, by one-hot dispatch and by sorting."""

    def loss(p, x, y):
        gates, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        chosen = jax.nn.one_hot(experts, 4, dtype=int)
        place = jnp.cumsum(chosen.reshape(-1, 4), 0).reshape(chosen.shape) * chosen - 1
        dispatch = jnp.einsum("tke,tkec->tec", chosen, jax.nn.one_hot(place, 8))
        h = jax.nn.silu(jnp.einsum("tec,td,edf->ecf", dispatch, x, p["up"]))
        out = jnp.einsum("tec,ecf,efd,tk->td", dispatch, h, p["down"], gates)
        order = jnp.argsort(experts[:, 0])
        balance = jnp.bincount(experts.reshape(-1), length=4).var()
        return cross_entropy((out + x[order])[jnp.argsort(order)] @ p["head"], y) + 1e-2 * balance

    params = {"router": f32(8, 4), "up": f32(4, 8, 16), "down": f32(4, 16, 8), "head": f32(8, 10)}
    return trained(loss, params, f32(16, 8), i32(16))


def losses():
    """Losses and metrics that reach for logsumexp, argmax, top-k and fancy indexing."""

    def metrics(logits, y):
        smooth = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(y, 10), 0.1)).mean()
        margin = logits[jnp.arange(16), y] - jax.nn.logsumexp(logits, -1)
        accuracy = (jnp.argmax(logits, -1) == y).mean()
        ranked = jnp.sort(logits, -1)[:, ::-1]
        kept = jnp.zeros((10,)).at[y].add(1.0).at[:5].set(0.0)
        huber = optax.huber_loss(ranked[:, 0]).sum() + jnp.var(jnp.pad(kept, 2)) + jnp.linalg.norm(logits)
        return smooth + margin.sum() + accuracy + huber

    return jax.make_jaxpr(jax.value_and_grad(metrics))(f32(16, 10), i32(16))


@pytest.mark.parametrize("program", [gpt, lenet, lstm, moe, losses])
def test_every_primitive_of_a_program_has_a_rule(program):
    """Whatever an ordinary train step computes, no operand has to stay replicated for want of a rule."""
    for eqn in equations(program().jaxpr):
        if eqn.primitive.name not in WITHOUT_RULE:
            operands, results = ([value(v.aval) for v in side] for side in (eqn.invars, eqn.outvars))
            assert rule_of(eqn.primitive.name, eqn.params, operands, results) is not None, eqn


def test_jax_own_examples_of_its_primitives_have_rules():
    """Thousands of equations with parameters of every kind: each has a rule that fits."""
    from jax._src.internal_test_util.test_harnesses import all_harnesses  # the yardstick has no public home

    without = set()
    for harness in all_harnesses:
        try:
            closed = jax.make_jaxpr(harness.dyn_fun)(*harness.dyn_args_maker(np.random.RandomState(0)))
        except TypeError:  # a harness made for another backend
            continue
        for eqn in equations(closed.jaxpr):
            operands, results = ([value(v.aval) for v in side] for side in (eqn.invars, eqn.outvars))
            if rule_of(eqn.primitive.name, eqn.params, operands, results) is None:
                without.add(eqn.primitive.name)
    assert without <= WITHOUT_RULE


def test_control_flow_and_unknown_primitives_have_no_rule():
    """A missing rule is None, never a guess."""
    x = Value((4,), "float32", 4)
    assert not registered() & (WITHOUT_RULE | {"shard_map", "pure_callback"})
    assert rule_of("scan", {}, [x], [x]) is None
    assert rule_of("never_heard_of", {}, [x], [x]) is None


def test_a_primitive_has_one_rule():
    """A second rule for a primitive is refused, naming it."""
    with pytest.raises(RuleError, match="'add' has two"):
        rule("add")(lambda *_, **__: None)


def test_a_rule_that_does_not_fit_its_operation_is_refused(monkeypatch):
    """Factors must multiply to the dimensions they stand for."""
    monkeypatch.setitem(registry._FUNCTIONS, "add", lambda x, y, *, results: Rule((Factor(3),), (((0,),), ((0,),)), (((0,),),)))
    x = Value((4,), "float32", 4)
    with pytest.raises(RuleError, match=r"'add' has \(4,\), its rule \(3,\)"):
        rule_of("add", {}, [x, x], [x])


def graph_of(n: int) -> Graph:
    """A chain of n dot products and as many lookups and scatters, each with parameters of its own."""
    dot = operation(lambda x, y: x @ y, np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))
    look = operation(lambda x, i: lax.sort((x, i), dimension=0, num_keys=1), np.ones((8, 8), np.float32), np.ones((8, 8), np.int32))
    values = (Value((8, 8), "float32", 4), Value((8, 8), "int32", 4))
    kinds = (("dot_general", dot.params, (0, 0), (0,)), ("sort", look.params, (0, 1), (0, 1)), ("scan", {}, (0,), (0,)))
    ops = tuple(
        Op(i, name, operands, results, dict(params), Origin(), (i,))
        for i, (name, params, operands, results) in enumerate(kinds[i % 3] for i in range(n))
    )
    return Graph("chain", values, ops, (0, 1), ("x", "i"), (0,), ("",))


def test_rules_of_a_graph_are_those_of_its_ops_and_shared():
    """By op index; equal operations share one rule object, control flow has none."""
    found = rules_of(graph_of(9))
    assert [str(r) for r in found[:3]] == [
        "([i, k], [k, j])->([i, j]) {i=8, j=8, k=8} reduction={k}",
        "([i, j], [i, j])->([i, j], [i, j]) {i=8, j=8} need_replication={i}",
        "None",
    ]
    assert found[3] is found[0] and found[4] is found[1]


def test_a_parameter_that_cannot_be_hashed_only_costs_the_cache():
    """An unhashable parameter still gives the rule."""
    values = (Value((8, 4), "float32", 4), Value((8,), "float32", 4))
    op = Op(0, "reduce_sum", (0,), (1,), {"axes": [1], "out_sharding": None}, Origin(), (0,))
    (found,) = rules_of(Graph("f", values, (op,), (0,), ("x",), (1,), ("",)))
    assert str(found) == "([i, j])->([i]) {i=8, j=4} reduction={j}"


def test_rules_of_a_deep_program_take_less_than_a_second():
    """37,000 ops, about 96 layers of a transformer."""
    graph = graph_of(37_000)
    start = time.process_time()
    rules_of(graph)
    assert time.process_time() - start < 1.0
