"""Files of a program's graph, plan and compiled text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from jax import monitoring

import autoshard
from autoshard.cli import main
from autoshard.verify import collectives_of


def step(weights, xs):
    """Two layers, the first of them scanned."""

    def loss(weights):
        def body(carried, x):
            return jnp.tanh(x @ weights["w"]) + carried, None

        summed, _ = jax.lax.scan(body, jnp.zeros((64, 128)), xs)
        return jnp.mean((summed @ weights["v"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments():
    """What it is called with."""
    return {"w": jnp.full((128, 128), 0.1), "v": jnp.full((128, 256), 0.1)}, jnp.ones((4, 64, 128))


@pytest.fixture
def compiled():
    """How many programs were compiled, in a list of one."""
    count = [0]

    def count_one(event, _seconds, **_):
        count[0] += event.endswith("backend_compile_duration")

    monitoring.register_event_duration_secs_listener(count_one)
    yield count
    monitoring.unregister_event_duration_listener(count_one)


def test_a_called_step_leaves_its_graph_plan_and_compiled_text(tmp_path, compiled):
    """The files agree with the program, each call has the results of the unsharded step, and nothing is compiled twice."""
    args = arguments()
    expected = jax.jit(step)(*args)
    options = {"cluster": "cpu:8", "mesh": {"data": 2, "model": 4}}
    autoshard.parallelize(step, **options)(*args)
    decorated, compiled[0] = autoshard.parallelize(step, **options, save_graphs=tmp_path / "graphs"), 0
    for _ in range(2):
        for wanted, found in zip(jax.tree.leaves(expected), jax.tree.leaves(decorated(*args)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert compiled[0] == 1
    (folder,) = (tmp_path / "graphs").iterdir()
    record = decorated.strategy.record
    assert folder.name == f"step-{record.program.fingerprint[:8]}"
    assert sorted(file.name for file in folder.iterdir()) == ["compiled.txt", "graph.graphml", "lowered.mlir", "plan.txt"]

    graph = nx.read_graphml(folder / "graph.graphml")
    traced = decorated.strategy._traced.graph
    assert (len(graph.nodes), len(graph.edges)) == (len(traced.to_networkx().nodes), len(traced.to_networkx().edges))
    labels = nx.get_node_attributes(graph, "label")
    assert labels["argument 0"] == "weights['v']" and "scan" in labels.values()
    spec = record.arguments[0].spec
    assert graph.nodes["argument 0"]["makes"] == f"%0 float32[128,256] as P({', '.join(map(repr, spec))})"
    assert all(data["read"].startswith("P(") for *_, data in graph.edges(data=True))

    plan = (folder / "plan.txt").read_text()
    assert plan.startswith("step on mesh data=2 x model=4: ")
    for op in traced.walk():
        assert f" = {op.primitive}(" in plan
    planned = [one.kind for one in record.cost.collectives]
    assert "body, 4 times in one run" in plan and plan.count("\n  all_reduce") == planned.count("all_reduce")
    assert "stablehlo.while" in (folder / "lowered.mlir").read_text()
    found = collectives_of((folder / "compiled.txt").read_text(), record.mesh)
    assert sorted({one.kind for one in found}) == sorted({one.kind for one in record.cost.collectives})


def test_what_differs_from_where_it_is_stored_is_in_the_plan(tmp_path):
    """An operand that is gathered before its product is shown with the layout in which the product reads it."""

    def product(w, x):
        return x @ w

    P = jax.sharding.PartitionSpec
    args = jnp.ones((64, 64)), jnp.ones((512, 64))
    pins = {"w": P("data"), "x": P("data")}
    strategy = autoshard.search(product, *args, cluster="cpu:8", mesh={"data": 8}, searcher="manual", pins=pins)
    strategy.apply(product, save_graphs=tmp_path).lower(*args)
    (folder,) = tmp_path.iterdir()
    plan = (folder / "plan.txt").read_text()
    assert "dot_general(%1, %0 as P(None, None)) splits i=512 over data" in plan
    assert "all_gather over data of 16.4 kB: w float32[64,64], for dot_general" in plan
    assert not (folder / "compiled.txt").exists()


@pytest.mark.parametrize("path", ["", 3, True])
def test_what_is_no_path_is_refused(path):
    """Before anything is compiled; an empty one is not the current folder."""
    strategy = autoshard.search(jnp.tanh, jnp.ones(8), cluster="cpu:8")
    with pytest.raises(autoshard.StrategyError, match=r"save_graphs is the path of a folder .* Name one"):
        strategy.apply(jnp.tanh, save_graphs=path)


def test_the_command_line_saves_them(tmp_path, monkeypatch, capsys):
    """`autoshard verify --save-graphs` writes what the target compiled; a file in the folder's place is refused."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "import jax.numpy as jnp\ndef f(w, x):\n    return x @ w\nargs = jnp.ones((8, 8)), jnp.ones((64, 8))\n"
    (tmp_path / "saved_program.py").write_text(source)
    run = ["saved_program:f", "--args", "saved_program:args"]
    assert main(["search", *run, "--cluster", "cpu:8", "--save", str(tmp_path / "s.json")]) == 0
    verify = ["verify", *run, "--strategy", str(tmp_path / "s.json"), "--target", "cpu", "--save-graphs"]
    assert main([*verify, str(tmp_path / "graphs")]) == 0
    (folder,) = (tmp_path / "graphs").iterdir()
    assert "HloModule" in (folder / "compiled.txt").read_text()
    assert main([*verify, str(tmp_path / "s.json")]) == 2
    assert "save_graphs is a folder to write to" in capsys.readouterr().err
