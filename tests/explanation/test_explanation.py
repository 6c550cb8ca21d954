"""An explanation's parts add up to the judged figures, and say of any program what its record and its origins say."""

import doctest
import json
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from strategy_records import EXAMPLE, PIPELINED

import autoshard
from autoshard.errors import StrategyError
from autoshard.explanation import explanation_of, groups, layers
from autoshard.explanation.layers import layer_of, pass_of
from autoshard.explanation.sentences import sentences
from autoshard.explanation.text import body
from autoshard.ir import Origin
from autoshard.render import Report
from autoshard.strategy import TensorRecord


def train_step(state, x, y):
    def loss(params):
        h = x
        with jax.named_scope("encoder"):
            for n, w in enumerate(params["layers"]):
                with jax.named_scope(f"block_{n}"):
                    h = jnp.tanh(h @ w)
        return jnp.mean((head(h, params["out"]) - y) ** 2)

    grads = jax.grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"]["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "optimizer": {"mu": moments}}


def head(h, w):
    return h @ w


def shapes(batch=64, width=256):
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"layers": [leaf(width, width)] * 3, "out": leaf(width, 64)}
    return {"params": params, "optimizer": {"mu": params}}, leaf(batch, width), leaf(batch, 64)


@cache
def strategy():
    specs = {"x": P("data"), "y": P("data"), "*out*": P(None, "model")}
    return autoshard.evaluate(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 4, "model": 2}, in_specs=specs, donate_argnums=0)


def test_the_places_of_a_step_add_up_to_it():
    """Compute and exposed collectives by layer, and by line, are those of the whole step; so are FLOPs and collectives by group."""
    cost, found = strategy().cost, strategy().explain().data
    for places in (found.layers, found.lines):
        assert sum(place.compute_seconds for place in places) == pytest.approx(cost.compute_seconds)
        assert sum(place.exposed_seconds for place in places) == pytest.approx(cost.exposed_communication_seconds)
        assert sum(place.flops for place in places) == pytest.approx(cost.flops)
        assert all(place.product_seconds <= place.compute_seconds for place in places)
    assert sum(group.seconds for group in found.collectives) == pytest.approx(cost.communication_seconds)


def test_memory_groups_add_up_to_the_peak():
    """Every byte of the fullest moment is in a group of what it is."""
    found = strategy().explain().data
    assert sum(group.bytes for group in found.memory) == pytest.approx(found.peak_bytes) == pytest.approx(strategy().cost.peak_bytes)
    assert {"state", "inputs"} <= {group.kind for group in found.memory}


def test_layers_are_scopes_with_stars_or_functions():
    """Numbered scopes of a stack are one layer, forward and backward; what has no scope of its own is in its function's."""
    names = {place.name for place in strategy().explain().data.layers}
    assert {"encoder/block_*", "head", "train_step"} <= names
    assert {pass_of(op) for op in strategy()._traced.graph.walk()} == {"forward", "backward", "update"}
    assert layer_of(Origin("a.py", 3, "Model.<locals>.f", "while/body/closed_call/jvp(Net)/mlp_12")) == "Net/mlp_*"


def test_arguments_are_grouped_with_what_mirrors_them():
    """Equal layers are one group, and the moments of parameters are counted with these; the whole bytes are those of all of them."""
    found = {group.name: group for group in strategy().explain().data.arguments}
    layer = found["state['params']['layers'][*]"]
    assert (layer.n, layer.alike, layer.whole_bytes) == (3, 3, 6 * 4 * 256**2)
    assert found["state['params']['out']"].bytes == 2 * 4 * 256 * 64 / 2


def test_axes_say_what_they_split():
    """An axis of the batch splits inputs and no state; one that splits one weight splits its share of the state."""
    data, model = strategy().explain().data.mesh
    assert (data.splits_inputs, data.state_share, model.splits_inputs) == (True, 0.0, False)
    assert model.state_share == pytest.approx(256 * 64 / (256 * 64 + 3 * 256**2))
    assert data.communication_seconds > 0


def test_repeated_work_is_found_where_an_axis_splits_nothing():
    """An axis that splits one of many products repeats the others; one that splits the batch repeats the update of whole weights alone."""
    data, model = strategy().explain().data.repeated
    assert (data.axis, model.axis, model.size) == ("data", "model", 2) and model.layers[0][0] == "encoder/block_*"
    assert model.saved_seconds == pytest.approx(model.seconds / 2) and model.uneven_seconds < model.seconds / 2
    assert data.layers[0][0] == "train_step" and data.seconds < model.seconds


def test_the_three_sentences_say_split_bound_and_change():
    """They name the axes with what they split, the step's time with what bounds it, and what to change."""
    split, bound, change = strategy().explain().data.sentences
    assert "data (4) splits the inputs" in split and "model (2) splits 7.7 % of the state" in split
    assert bound.startswith("A step takes") and "bound by" in bound
    assert change.startswith("To change:")
    text = str(strategy().explain())
    assert text.splitlines()[2].startswith("train_step runs on 8 devices")


def test_axes_that_split_computed_values_alone_say_so():
    """Where the batch is whole and constraints split what is computed of it, these activations are named; a table has no share of 0 %."""

    def loss(params, x):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ params), P("data"))
        return jnp.mean((jnp.sin(h) @ params) ** 2)

    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    report = autoshard.evaluate(jax.grad(loss), *args, cluster="v5e:2x4", mesh={"data": 8}, in_specs=P()).explain()
    (axis,) = report.data.mesh
    assert not axis.splits_inputs and not axis.state_share and 0.5 < axis.activation_share <= 1
    assert "of the activations" in report.data.sentences[0] or "splits the activations" in report.data.sentences[0]
    assert not re.search(r"  0 %", str(report).split("Mesh\n")[1].split("Arguments\n")[0])


def test_bytes_that_are_sent_narrower_are_told():
    """XLA:TPU gathers float32 weights of products as bfloat16: a note has what is sent; where nothing is narrowed there is none."""

    def found(cluster):
        args = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
        specs = (P("data"), P("data"))
        return autoshard.evaluate(lambda w, x: jnp.sum(jnp.tanh(x @ w)), *args, cluster=cluster, mesh={"data": 8}, in_specs=specs).explain()

    narrow, wide = found("v5e:2x4"), found("cpu:8")
    gathered = sum(group.bytes for group in narrow.data.collectives if group.kind == "all_gather")
    assert gathered == 4 * 2**20 and narrow.data.sent_bytes - narrow.data.compiled_bytes == gathered / 2
    assert "Compiled, 2.10 MB are sent in a step instead of 4.19 MB" in str(narrow).replace("\n", " ")
    assert wide.data.sent_bytes == wide.data.compiled_bytes and "Compiled, " not in str(wide)


def test_what_takes_next_to_nothing_is_not_told():
    """A layer of a fraction of a nanosecond is neither named beside a longer one nor a row."""
    found = strategy().explain().data
    first = found.layers[0]
    layers = (
        first,
        replace(first, name="tiny", compute_seconds=1.6e-13, product_seconds=0.0, communication_seconds=0.0, exposed_seconds=0.0),
    )
    text = Report("", tuple(body(replace(found, layers=layers), ()))).__str__() + sentences(replace(found, layers=layers))[1]
    assert first.name in text and "tiny" not in text


@pytest.mark.parametrize("record", [EXAMPLE, PIPELINED])
def test_a_record_alone_is_explained_as_far_as_it_goes(record):
    """Without the program there are sentences, arguments and collectives by layer, and what else there would be is said."""
    found = explanation_of(record)
    assert not found.has_program and len(found.sentences) == 3 and found.arguments and not found.memory
    if record is EXAMPLE:
        assert [(place.name, place.exposed_seconds) for place in found.layers] == [("loss", 0.5e-6)]


def test_solver_words_are_in_the_details_only():
    """A plain report has no word of the search but its searcher's name; the details have them all."""
    plain, details = str(strategy().explain()).lower(), str(strategy().explain(details=True)).lower()
    for word in ("sweeps", "induced", "elimination", "objective", "fingerprint", "optimality"):
        assert word not in plain, word
    assert "fingerprint" in details and "optimality" in details and "which device holds what" in details


def test_the_json_has_the_numbers_of_the_data():
    """It is the tree of dataclasses, field by field."""
    report = strategy().explain()
    found = json.loads(report.to_json())
    assert found["peak_bytes"] == report.data.peak_bytes and found["layers"][0]["name"] == report.data.layers[0].name
    assert "<table" in report._repr_html_()


def test_a_loaded_strategy_takes_its_program(tmp_path):
    """With it, or with what its file keeps, the explanation is that of the search; another program is refused."""
    assert not autoshard.Strategy(strategy().record).explain().data.has_program
    strategy().save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded.explain().data == strategy().explain().data
    assert loaded.with_program(train_step, *shapes()).explain().data == strategy().explain().data
    with pytest.raises(StrategyError):
        loaded.with_program(train_step, *shapes(batch=128))


def test_a_group_that_is_no_mirror_stands_alone():
    """A tensor of another shape or spec is not counted with a path that it ends like."""
    tensors = [TensorRecord("p['w']", (8, 8), "float32", (None, None)), TensorRecord("o[0]['w']", (8, 8), "float32", ("data", None))]
    assert [group.alike for group in groups.argument_groups(tensors, replace(EXAMPLE).mesh)] == [0, 0]


def test_examples_in_the_docstrings_hold():
    """Those of layers and groups."""
    assert doctest.testmod(layers).failed == 0 and doctest.testmod(groups).failed == 0
