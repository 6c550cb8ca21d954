"""The constraints that are kept suffice, none of them can go, and they stand where a person would write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import abstract, control_flow, gpt, lstm, mlp, moe

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search import DataParallel, FullySharded, RecursiveProgramming, solve
from autoshard.trace import trace
from autoshard.verify import pins as module
from autoshard.verify.pins import fewest_pins

MESH = Mesh.of({"x": 4, "y": 2})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)


def found(fn, args, searcher, mesh=MESH, **options):
    """The fewest pins of a searcher's strategy."""
    traced = trace(fn, *args)
    graph, rules = traced.graph, rules_of(traced.graph)
    model = CostModel(Cluster.parse(f"cpu:{mesh.size}"), mesh)
    assignment = solve(searcher, Problem(program_facts(graph, rules, compiler_of(model.cluster)), model)).assignment
    return fewest_pins(traced.jaxpr, graph, rules, assignment, model.reshard_paths(graph.values), **options)


def step(w1, w2, x, y):
    def loss(w1, w2):
        hidden = jax.nn.relu(x @ w1)
        return ((hidden @ w2 - y) ** 2).mean()

    g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
    return w1 - 0.1 * g1, w2 - 0.1 * g2


STEP = (step, (abstract((256, 512)), abstract((512, 256)), abstract((64, 256)), abstract((64, 256))))


def scanned(ws, x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    gradient = jax.grad(lambda ws: (jax.lax.scan(layer, x, ws)[0] ** 2).mean())(ws)
    return ws - 0.1 * gradient


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", [DataParallel(), FullySharded(), RecursiveProgramming()], ids=lambda s: s.name)
@pytest.mark.parametrize("program", [mlp, moe, lstm, control_flow])
def test_the_pins_alone_make_the_same_program(program, searcher):
    """Lowered with the kept constraints alone, Shardy inserts the strategy's collectives; loops and branches included."""
    fewest = found(*program(), searcher)
    assert fewest.differing == () and fewest.minimal
    assert fewest.extra_compute <= module.SLACK
    assert sum(pin.count for pin in fewest.pins) < fewest.n_constraints / 2


def test_data_parallelism_needs_no_constraint():
    """The batch's spec says it all."""
    assert found(*mlp(), DataParallel()).pins == ()


def test_a_loop_is_pinned_in_its_body():
    """A weight gathered in a scan's checkpointed body, and again on the way back, is one pin at the line that reads it."""
    fewest = found(scanned, (abstract((4, 256, 256)), abstract((32, 256))), FullySharded(), Mesh.of({"x": 8}))
    assert fewest.differing == ()
    line = next(pin for pin in fewest.pins if pin.reader == "dot_general" and not pin.backward)
    assert line.name == "a slice of ws" and line.origin.line == scanned.__code__.co_firstlineno + 3 and line.count > 1


def test_no_pin_can_go(monkeypatch):
    """Without any one of the lines, Shardy makes another program."""
    sets = []
    compared = module._Outcome.equals

    def recorded(outcome, wanted):
        same = compared(outcome, wanted)
        sets.append(same)
        return same

    monkeypatch.setattr(module._Outcome, "equals", recorded)
    fewest = found(*STEP, FullySharded())
    n = len(fewest.pins)
    assert n and len(sets) == fewest.trials and sets[-n:] == [False] * n


def test_weights_gathered_at_use_are_named_by_path_and_line():
    """A fully sharded step's pins are its weights, and their gradients, at the lines of the products that read them whole."""
    fewest = found(*STEP, FullySharded(), Mesh.of({"x": 8}))
    line = step.__code__.co_firstlineno + 2
    assert [(pin.name, pin.origin.line, pin.spec, pin.reader) for pin in fewest.pins if not pin.backward] == [
        ("w1", line, (None, None), "dot_general"),
        ("w2", line + 1, (None, None), "dot_general"),
    ]
    assert {pin.origin.line for pin in fewest.pins if pin.backward} == {line, line + 1}


def test_when_the_time_is_up_what_is_left_is_still_the_same_program():
    """Without time for a trial all constraints are kept, and the answer says that fewer may do."""
    fewest = found(*mlp(layers=1), FullySharded(), budget_seconds=0.0)
    assert not fewest.minimal and fewest.differing == () and sum(pin.count for pin in fewest.pins) == fewest.n_constraints


@pytest.mark.slow
def test_layers_are_pinned_together():
    """Layers that one line makes are one pin, however many there are."""
    two, four = (found(*mlp(layers=n), FullySharded()) for n in (2, 4))
    assert [(pin.name, pin.spec) for pin in two.pins] == [(pin.name, pin.spec) for pin in four.pins]
    assert {pin.count for pin in four.pins} >= {4}


def test_the_users_own_constraints_are_no_pins():
    """What the program has written in it already is kept and not asked for again."""

    def constrained(x, w):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
            return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, jax.sharding.PartitionSpec("x", None)))

    fewest = found(constrained, (abstract((32, 64)), abstract((64, 64))), DataParallel())
    assert all("sharding_constraint" not in pin.name for pin in fewest.pins) and fewest.differing == ()


def test_what_no_constraint_expresses_is_listed():
    """An operation that the lowering runs per shard is named with its line; others are not."""
    fewest = found(lambda x: jnp.sort(jax.lax.top_k(x, 4)[0] * 2), (abstract((4096, 64)),), DataParallel())
    assert len(fewest.per_shard) == 1 and fewest.per_shard[0].startswith("top_k ") and "test_fewest_pins.py" in fewest.per_shard[0]


@pytest.mark.slow
def test_a_transformer_needs_a_handful():
    """Of a two-layer GPT's train step, no constraint for data parallelism, and fewer than twenty lines for a fully sharded state."""
    assert found(*gpt(), DataParallel()).pins == ()
    fewest = found(*gpt(), FullySharded(), budget_seconds=120)
    assert fewest.minimal and fewest.differing == () and len(fewest.pins) < 20
