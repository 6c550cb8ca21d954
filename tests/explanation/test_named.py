"""Names of tensors: paths, patterns and ends of arguments and results; names, lines, layers and operations of computed values."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from strategy_records import EXAMPLE

import autoshard
from autoshard.errors import StrategyError
from autoshard.explanation.groups import argument_groups
from autoshard.explanation.named import _of_name, named
from autoshard.strategy import TensorRecord


def step(state, x):
    def loss(layers):
        out = x
        for number, layer in enumerate(layers):
            with jax.named_scope(f"block_{number}"):
                hidden = checkpoint_name(jnp.tanh(out @ layer["up"]), "hidden")
                out = hidden @ layer["down"]
        return jnp.mean(out**2), out[:, :32]

    grads, out = jax.grad(loss, has_aux=True)(state["layers"])
    return {"layers": jax.tree.map(lambda p, g: p - 0.1 * g, state["layers"], grads)}, out


LINE = f"test_named.py:{step.__code__.co_firstlineno + 5}"


@cache
def judged():
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    layers = [{"up": leaf(64, 256), "down": leaf(256, 64)} for _ in range(2)]
    options = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0}
    return autoshard.search(step, {"layers": layers}, leaf(32, 64), **options)._judged


@pytest.mark.parametrize(
    ("name", "kind", "group", "n"),
    [
        ("up", "argument", "state['layers'][*]['up']", 2),
        ("[0]['layers'][1]['up']", "argument", "state['layers'][*]['up']", 2),
        ("layers/1", "argument", "state['layers'][*]['down']", 2),
        ("result[1]", "result", "result[1]", 1),
        ("hidden", "value", f"hidden at {LINE} (step.loss)", 2),
        (LINE, "value", f"dot_general at {LINE} (step.loss)", 2),
        (f"/home/me/{LINE}", "value", f"dot_general at {LINE} (step.loss)", 2),
        (f"{LINE} (step.loss)", "value", f"dot_general at {LINE} (step.loss)", 2),
        ("block_*", "value", f"dot_general at {LINE} (step.loss)", 2),
    ],
)
def test_tensors_are_named_as_reports_show_them(name, kind, group, n):
    """By path, by module, by checkpoint_name, by line, by layer; a result that replaces an argument is that argument."""
    found = named(judged(), name)
    assert (found.kind, found.group.name, found.group.n, len(found.values)) == (kind, group, n, n)


def test_an_operation_is_named_by_its_number():
    """What a name leaves out is listed with the numbers of its operations, and these name it."""
    found = named(judged(), LINE)
    assert "op " in found.remark
    number = int(found.remark.split("op ")[1].split(",")[0])
    other = named(judged(), f"op {number}")
    assert other.values == tuple(judged().facts.graph.walk()[number].results) and other.group.name in found.remark


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("state['params']['layers'][*]['up']", "state['params']['layers'][*]['up']"),
        ("state['params']['layers'][0]['up']", "state['params']['layers'][*]['up']"),
        ("layers/*/up", "state['params']['layers'][*]['up']"),
        ("params.layers.1.up", "state['params']['layers'][*]['up']"),
        ("norm", "state['params']['norm']"),
        ("mu/norm", "state['params']['norm']"),
        ("b?tch", "batch"),
    ],
)
def test_names_are_paths_patterns_and_ends(name, group):
    """A parameter comes before the moments that mirror it, and these name its group too."""
    assert group_of(name).name == group


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("upp", "Near ones: state['layers'][*]['up']"),
        ("kernel", "is named 'kernel'. There are "),
        ("layers/*/*", "names 2 groups"),
        ("", "is named ''"),
        ("op 99999", "is named"),
        (f"test_named.py:{int(LINE.split(':')[1]) - 1}", f"The nearest lines that do: {LINE}, "),
        ("other.py:7", "Its values are computed in test_named.py."),
    ],
)
def test_other_names_get_near_ones(name, words):
    """What is misspelt gets the nearest names, and what is ambiguous the groups."""
    with pytest.raises(StrategyError, match=re.escape(words)):
        named(judged(), name)


def group_of(name):
    found = model()
    (group,) = _of_name(argument_groups(found.arguments, found.mesh), name)
    return group


def model():
    def tensor(path, *shape):
        return TensorRecord(path, shape, "float32", (None,) * len(shape))

    params = [("layers'][0]['up", 64, 32), ("layers'][1]['up", 64, 32), ("layers'][0]['down", 32, 64), ("norm", 64)]
    own = [tensor(f"state['params']['{name}']", *shape) for name, *shape in params]
    moments = [tensor(f"state['optimizer'][0].mu['{name}']", *shape) for name, *shape in params]
    own += [tensor("state['params']['layers'][1]['down']", 32, 64)]
    return replace(EXAMPLE, arguments=tuple([*own, *moments, tensor("batch", 16, 64)]))


def test_a_parameter_comes_before_moments_that_are_sharded_otherwise():
    """The end of their paths names the one that the program reads most; the answer names the others."""

    def momentum(state, x):
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w.T))(state["w"]["up"])
        moment = 0.9 * state["a"]["up"] + grads
        return {"w": {"up": state["w"]["up"] - moment}, "a": {"up": moment}}

    leaf = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    specs = {"x": jax.P("data"), "*a*": jax.P("data"), "*w*": jax.P()}
    found = autoshard.evaluate(momentum, {"w": {"up": leaf}, "a": {"up": leaf}}, leaf, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    tensors = named(found._judged, "up")
    assert tensors.group.name == "state['w']['up']" and "state['a']['up'], sharded as P('data', None)" in tensors.remark
