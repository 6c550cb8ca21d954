"""Loosely coupled slices against DiLoCo's plain definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.errors import ShardingError, StrategyError

INNER = optax.adam(1e-2)


def train_step(state, batch):
    def loss(params):
        return jnp.mean((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = INNER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"up": jax.random.normal(keys[0], (8, 16)), "down": jax.random.normal(keys[1], (16, 8))}
    return {"params": params, "optimizer": INNER.init(params)}


def batch_of(step):
    keys = jax.random.split(jax.random.key(step + 1), 2)
    return {name: jax.random.normal(key, (32, 8)) for name, key in zip("xy", keys, strict=True)}


def plain(every, outer, fragments, steps, n=2):
    """Definition: slices step on their own; a fragment's outer gradient is what all started from less the mean of what they have."""
    states = [start() for _ in range(n)]
    shared = start()["params"]
    outer_states = [outer.init({name: shared[name] for name in fragment}) for fragment in fragments]
    for t in range(1, steps + 1):
        parts = [{k: v.reshape(n, -1, 8)[i] for k, v in batch_of(t).items()} for i in range(n)]
        states = [train_step(state, part)[0] for state, part in zip(states, parts, strict=True)]
        for p, fragment in enumerate(fragments):
            if t % every == every * p // len(fragments):
                old = {name: shared[name] for name in fragment}
                gradient = {name: sum(shared[name] - state["params"][name] for state in states) / n for name in fragment}
                updates, outer_states[p] = outer.update(gradient, outer_states[p], old)
                shared |= optax.apply_updates(old, updates)
                for state in states:
                    state["params"] = state["params"] | {name: shared[name] for name in fragment}
    return states, shared


OUTERS = {
    "sgd": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "of all parameters": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, momentum=0.5)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("fragments", [[["up", "down"]], [["down"], ["up"]]], ids=["whole", "streaming"])
@pytest.mark.parametrize("optimizer", OUTERS)
def test_slices_train_as_in_the_definition(optimizer, fragments):
    """Their states, and the outer parameters, after two rounds and a step; an optimizer of the whole gradient sees all shards."""
    outer = autoshard.DiLoCo(every=3, optimizer=OUTERS[optimizer], fragments=len(fragments))
    step = autoshard.parallelize(train_step, cluster="2*cpu:4", mesh={"data": 2, "model": 2}, outer=outer, donate_argnums=0, progress=False)
    state = start()
    for t in range(1, 8):
        state, losses = step(state, batch_of(t))
        assert losses.shape == (2,)
    states, shared = plain(3, OUTERS[optimizer], fragments, 7)
    both = jax.tree.map(lambda *each: np.stack(each), *states)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), state.inner, both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), state.merged["params"], shared)


def parallelized(fn=train_step, cluster="2*cpu:4", every=2, slow_reduction=None, stages=None, **diloco):
    """A step that trains by itself on each of two slices."""
    options = {"searcher": "data_parallel", "progress": False, "confirm": False, "slow_reduction": slow_reduction, "stages": stages}
    return autoshard.parallelize(fn, cluster=cluster, outer=autoshard.DiLoCo(every=every, **diloco), **options)


def test_what_is_no_parameter_stays_in_its_slice():
    """Averages of weights and statistics, counts, and state in arguments of its own; a rate without a batch is every slice's."""

    def step(params, more, batch, rate):
        value, gradients = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["w"]) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        mean = 0.9 * more["mean"] + 0.1 * batch.mean(0)
        return value, params, {"n": more["n"] + 1, "average": 0.9 * more["average"] + 0.1 * params["w"], "mean": mean}

    x = jax.random.normal(jax.random.key(0), (16, 4))
    own = parallelized(step)
    params, more = {"w": jnp.eye(4)}, {"n": 0, "average": jnp.eye(4), "mean": jnp.zeros(4)}
    for _ in range(2):
        value, params, more = own(params, more, x, 0.5)
    assert len(params.parameters) == 1 and value.shape == (2,) and params.merged["w"].shape == (4, 4)
    assert more["n"].tolist() == [2, 2]
    same = {name: bool(jnp.allclose(x[0], x[1], atol=1e-7)) for name, x in [*more.items(), *params.inner.items()]}
    assert same == {"n": True, "average": False, "mean": False, "w": True}
    assert own.strategy.cost.collectives == () or all("slices" not in each.mesh_axes for each in own.strategy.cost.collectives)


def test_the_exchange_is_priced_per_step():
    """All parameters over the level between slices, divided by the steps in between; parameters and momentum are in the peak."""
    costs = [parallelized(every=every, fragments=n).search(start(), batch_of(1)).cost for every, n in ((2, 1), (4, 1), (4, 2))]
    half = {name: x[:16] for name, x in batch_of(1).items()}
    inner = autoshard.search(train_step, start(), half, cluster="cpu:4", searcher="data_parallel", confirm=False)
    more = [cost.makespan_seconds - inner.cost.makespan_seconds for cost in costs]
    exchange = autoshard.collective_seconds("all_reduce", 2 * 8 * 16 * 4, cluster="2*cpu:4", mesh={"slices": 2, "all": 4}, axes="slices")
    assert more[0] == pytest.approx(exchange / 2) and more[1] == pytest.approx(exchange / 4) and more[2] > more[1]
    shards = 2 * 8 * 16 * 4
    assert [cost.peak_bytes - inner.cost.peak_bytes for cost in costs] == [3 * shards, 3 * shards, 2.5 * shards]


def test_an_outer_state_goes_on_where_it_was():
    """From host arrays like it, as a checkpoint gives them."""
    step = parallelized()
    state = start()
    for t in range(1, 6):
        if t == 4:
            state = jax.tree.map(np.asarray, state)
        state, _ = step(state, batch_of(t))
    _, shared = plain(2, autoshard.DiLoCo().transformation, [["down", "up"]], 5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), state.merged["params"], shared)
    with pytest.raises(StrategyError, match="start"):
        parallelized()(state, batch_of(1))


def test_a_step_runs_inside_another_jitted_function():
    """Whose compiler options count, where its own are refused."""
    step = parallelized()
    state, batch = step.start(start(), batch_of(1))
    ours, _ = step(state, batch)
    theirs, _ = jax.jit(step)(step.start(start(), batch_of(1))[0], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours.inner, theirs.inner)


def test_slices_exchange_nothing_but_parameters():
    """In one program, lowered without arrays: one sum of all parameters, in a branch; the rest is within slices."""
    text = parallelized().lower(*jax.eval_shape(lambda: (start(), batch_of(1)))).compile().as_text()
    sums = [line for line in text.splitlines() if " all-reduce(" in line or " all-gather(" in line]
    within = [line for line in sums if "{{0,1,2,3},{4,5,6,7}}" in line]
    (exchange,) = [line for line in sums if line not in within]
    assert within and "(f32[16,8]{1,0}, f32[8,16]{1,0})" in exchange and " conditional(" in text


REFUSED = {
    "one slice": ({"cluster": "cpu:8"}, "is one slice"),
    "fragments": ({"fragments": 3, "every": 4}, "of which there are 2"),
    "parameters": ({"parameters": "state['optimizer'][0].count"}, "floats that the step returns"),
    "narrow sums": ({"slow_reduction": "int8"}, "nothing to do"),
    "stages": ({"stages": 2}, "one program"),
    "no such": ({"parameters": "state.weights"}, "matches none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    """In one paragraph."""
    options, words = REFUSED[case]
    with pytest.raises(ShardingError, match=words) as error:
        parallelized(**options).search(start(), batch_of(1))
    assert "\n" not in str(error.value)


def test_parameters_are_named_where_moments_may_be_some():
    """Moments that a loop updates look like what it reads."""

    def step(state, x):
        def one(state, x):
            gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
            moment = 0.9 * state["moments"]["w"] + gradient
            return {"w": state["w"] - 0.1 * moment, "moments": {"w": moment}}, None

        return jax.lax.scan(one, state, x.reshape(-1, 2, 4))[0]

    state = {"w": jnp.eye(4), "moments": {"w": jnp.zeros((4, 4))}}
    with pytest.raises(ShardingError, match="Name the parameters"):
        parallelized(step).search(state, jnp.ones((16, 4)))
    found = parallelized(step, parameters="state['w']")(state, jnp.ones((16, 4)))
    assert found.places == (-1, 0)
