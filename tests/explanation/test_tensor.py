"""Why a tensor is sharded as it is: costs of other layouts as the judge and searches have them, and what is not available."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import StrategyError
from autoshard.explanation.tensor_report import tensor_parts
from autoshard.explanation.text import format_spec
from autoshard.judge.evaluate import evaluate
from autoshard.problem import Problem
from autoshard.problem.cost_tables import CostTables
from autoshard.render import Paragraph


def train_step(state, x):
    def loss(params):
        hidden = checkpoint_name(jnp.tanh(x @ params["up"]), "hidden")
        return jnp.mean((hidden @ params["down"] + jnp.sum(jnp.cos(params["bias"]))) ** 2)

    grads = jax.grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}


def shapes():
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"params": {"up": leaf(512, 2048), "down": leaf(2048, 512), "bias": leaf(6)}}, leaf(256, 512)


@cache
def strategy(searcher="dynamic_programming", mesh=(("data", 8),)):
    return autoshard.search(train_step, *shapes(), cluster="v5e:2x4", mesh=dict(mesh), searcher=searcher, donate_argnums=0)


def by_spec(data):
    return {each.spec: each for each in data.alternatives}


def test_each_layout_has_its_cost_alone_and_at_best():
    """'Alone' is the judge's step with that layout and no other change; 'at best' is that of a search with the layout pinned."""
    found = by_spec(strategy().explain("up").data)
    judged, value = strategy()._judged, strategy()._traced.graph.argument_paths.index("state['params']['up']")
    assert len(found) == 3
    for dim, spec in enumerate([("data", None), (None, "data")]):
        layouts = {**judged.record.assignment.layouts, strategy()._traced.graph.arguments[value]: (dim,)}
        alone = evaluate(judged.facts, judged.model, replace(judged.record.assignment, layouts=layouts)).cost
        pinned = autoshard.search(
            train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, searcher="dynamic_programming", donate_argnums=0,
            pins={"*up*": P(*spec)},
        )  # fmt: skip
        if not found[spec].is_own:
            assert found[spec].fixed_seconds == pytest.approx(alone.makespan_seconds)
            assert found[spec].step_seconds == pytest.approx(pinned.cost.makespan_seconds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("searcher", ["data_parallel", "fully_sharded"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_weight_s_gradient_moves_too(searcher, microbatches):
    """What combines it is told beside what gathers the weight, of scanned layers, clipped gradients and microbatches too."""

    def scanned(state, x):
        def layer(h, w):
            return jnp.tanh(h @ w["up"]) @ w["down"], None

        grads = jax.grad(lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2))(state["params"])
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), state["params"], grads)}

    params = {"up": jax.ShapeDtypeStruct((4, 512, 2048), jnp.float32), "down": jax.ShapeDtypeStruct((4, 2048, 512), jnp.float32)}
    options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "donate_argnums": 0, "searcher": searcher, "microbatches": microbatches}
    found = autoshard.search(scanned, {"params": params}, jax.ShapeDtypeStruct((256, 512), jnp.float32), **options)
    combined = [each for each in found.cost.collectives if each.reason.kind == "combined" and each.value.name == "dot_general"]
    told = {name: found.explain(name).data.gradients for name in params}
    assert all(told.values()) and "its gradient" in str(found.explain("up"))
    assert sum(group.count for groups in told.values() for group in groups) == sum(each.count for each in combined)
    assert not found.explain("x").data.gradients
    assert bool(found.explain("up").data.moves) == (searcher == "fully_sharded")


def test_what_is_made_of_a_weight_alone_moves_it():
    """Its cast or its sum with a constant, gathered where it is read, and the gradient that comes back through a reshape."""

    def normed(state, x):
        def loss(params):
            return jnp.mean((x * (1 + params["scale"])[None, :]) ** 2)

        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], jax.grad(loss)(state["params"]))}

    args = {"params": {"scale": jax.ShapeDtypeStruct((1024,), jnp.float32)}}, jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    options = {"cluster": "v5e:2x4", "mesh": {"data": 8}}
    split, whole = (
        autoshard.evaluate(normed, *args, in_specs={"x": P("data"), "*scale*": spec}, **options).explain("scale").data
        for spec in (P("data"), P())
    )
    assert [each.kind for each in split.moves] == ["all_gather"] and not whole.moves
    assert [each.source.split(" ")[0] for each in whole.gradients] == ["reduce_sum"]


@pytest.mark.parametrize("options", [{}, {"stages": 2, "microbatches": 4, "schedule": "one_program"}])
def test_a_gradient_is_found_behind_constraints_and_barriers(options):
    """Those of the user, and those that stages of one program have."""

    def step(params, x):
        grads = jax.grad(lambda params: jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0] ** 2))(params)
        held = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(grads, P()))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, held)

    args = {"w": jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)}, jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    mesh = {"data": 8 // options.get("stages", 1)}
    found = autoshard.search(step, *args, cluster="v5e:2x4", mesh=mesh, searcher="dynamic_programming", **options)
    assert {each.kind for each in found.explain("w").data.gradients} & {"all_reduce", "reduce_scatter"}


def test_what_is_not_available_says_why():
    """A dimension that does not divide, and a pin, each have their words; a replicated tensor says that it is."""
    data = strategy().explain("bias").data
    assert "dim 0 has size 6, which 8 does not divide" in by_spec(data)[("data",)].obstacle
    assert data.next_best is None
    assert "replicated" in str(strategy().explain("bias")) and "no other layout is available" in str(strategy().explain("bias"))
    pinned = autoshard.search(
        train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, pins={"*up*": P()}, searcher="dynamic_programming"
    )
    obstacles = {each.spec: each.obstacle for each in pinned.explain("up").data.alternatives}
    assert obstacles[("data", None)] == "a pin fixes another layout" and "a pin fixes it" in str(pinned.explain("up"))


def test_a_better_layout_than_somebodys_is_said():
    """Of a sharding by hand the answer says that another layout would be faster, and by how much."""
    specs = {"x": P("data"), "*up*": P(), "*down*": P("data")}
    given = autoshard.evaluate(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs=specs)
    data = given.explain("down").data
    assert data.next_best.step_seconds < given.cost.makespan_seconds
    (first, *_) = (part for part in tensor_parts(data) if isinstance(part, Paragraph))
    assert "It is not the fastest" in first.text


def test_a_computed_value_is_explained_as_an_argument_is():
    """Its layouts cost what a search of the program costs that may choose no other; its own layout is that of the strategy."""
    data = strategy().explain("hidden").data
    found = by_spec(data)
    assert data.kind == "value" and len(found) == 3 and found[data.own.spec].step_seconds == strategy().cost.makespan_seconds
    assert all(each.fixed_seconds is None for each in data.alternatives)
    judged = strategy()._judged
    problem = Problem(judged.facts, judged.model)
    (op,) = (op for op in judged.facts.graph.walk() if op.primitive == "name")
    for dim, spec in enumerate([("data", None), (None, "data")]):
        restricted = problem.restricted({op.results[0]: (frozenset((dim,)),)})
        solution = autoshard.DynamicProgramming(tolerance=0.0).solve(restricted)
        assert solution.assignment.layout(op.results[0]) == (dim,)
        if not found[spec].is_own:
            assert found[spec].step_seconds == pytest.approx(solution.judgement.cost.makespan_seconds)


def test_why_not_is_answered_for_the_layout_that_is_asked():
    """One that is available says what it costs, and of what; its own says so; one that does not divide says that."""
    own = strategy().explain("up").data.own.spec
    others = [spec for spec in by_spec(strategy().explain("up").data) if spec != own]
    for spec in others:
        found = strategy().explain("up", spec=P(*spec))
        assert found.data.in_question.spec == spec and f"Why not {format_spec(spec)}: with it" in str(found).replace("\n", " ")
    assert "that is its layout" in str(strategy().explain("up", spec=P(*own)))
    assert "it is not available; dim 0 has size 6" in str(strategy().explain("bias", spec=P("data"))).replace("\n", " ")
    with pytest.raises(StrategyError, match="'model'"):
        strategy().explain("up", spec=P("model"))
    with pytest.raises(StrategyError, match="Pass both"):
        strategy().explain(spec=P("data"))


def test_of_large_programs_the_most_promising_layouts_are_searched(monkeypatch):
    """So many as its operations allow, the asked one among them, and the fastest of all; with details all of them."""
    everything = strategy(mesh=(("data", 2), ("model", 4))).explain("up").data
    monkeypatch.setattr("autoshard.explanation.tensor.SEARCHED_OPS", 0)
    few = strategy(mesh=(("data", 2), ("model", 4))).explain("up", spec=P("data", "model"))
    searched = [each for each in few.data.alternatives if each.step_seconds is not None and not each.is_own]
    assert len(searched) == 3 and few.data.in_question in searched and "What is empty was not searched" in str(few)
    assert few.data.next_best.spec == everything.next_best.spec
    assert len(strategy(mesh=(("data", 2), ("model", 4))).explain("up", details=True).data.alternatives) == len(everything.alternatives)
    assert all(each.step_seconds for each in strategy(mesh=(("data", 2), ("model", 4))).explain("up", details=True).data.alternatives)


def test_a_question_about_a_tensor_builds_no_tables_but_its_own(monkeypatch):
    """Those of the search serve; what is restricted are labels of one variable."""
    found = strategy()
    found.explain("up")
    monkeypatch.setattr("autoshard.problem.problem.decisions_of", None)
    made = []
    costed = CostTables._costed
    monkeypatch.setattr(CostTables, "_costed", lambda *args: made.append(args[1]) or costed(*args))
    found.explain("down")
    assert {one.label_type[1] for one in made} <= {(2048, 512)}
