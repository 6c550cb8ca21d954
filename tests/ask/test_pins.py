"""What is printed runs, and makes JAX do what the strategy says."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from problems import eager_cluster
from programs import PROGRAMS, abstract, mlp

import autoshard
from autoshard.ask.pins import INSIDE, _endings, _trimmed, _written
from autoshard.ir import Mesh, Placement
from autoshard.lower import jax_mesh
from autoshard.strategy import TensorRecord
from autoshard.verify import compare, explicit_collectives

MESH = {"data": 4, "model": 2}
ARGS = (abstract((256, 512)), abstract((512, 256)), abstract((64, 256)), abstract((64, 256)))


def step(w1, w2, x, y, constrain=lambda name, x: x):
    def loss(w1, w2):
        hidden = jax.nn.relu(x @ constrain("w1", w1))
        return ((hidden @ constrain("w2", w2) - y) ** 2).mean()

    g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
    return w1 - 0.1 * g1, w2 - 0.1 * g2


def plain(w1, w2, x, y):
    return step(w1, w2, x, y)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"data": 8}, MESH])
@pytest.mark.parametrize("searcher", ["data_parallel", "fully_sharded"])
def test_pasted_lines_make_the_strategys_collectives(searcher, mesh):
    """The printed set-up runs, and the function with the printed lines in it is partitioned as the strategy says."""
    strategy = autoshard.search(plain, *ARGS, cluster="cpu:8", searcher=searcher, mesh=mesh)
    pins = strategy.pins(plain, *ARGS)
    assert pins.exact
    lines: dict[str, list[str]] = {"w1": [], "w2": []}
    for line in str(pins).splitlines():
        if " = constrain" in line:
            lines[line.split(" = ")[0]].append(line)
    assert any(lines.values()) == (searcher == "fully_sharded")
    scope: dict = {}

    def pasted(name, x):
        local = {**scope, name: x}
        exec("\n".join(lines[name]), local)
        return local[name]

    def user(w1, w2, x, y):
        return step(w1, w2, x, y, pasted)

    scope |= dict(zip(("w1", "w2", "x", "y"), ARGS, strict=True)) | {"plain": user}
    exec(str(pins).split(INSIDE)[0], scope)
    rows = compare(strategy.cost.collectives, explicit_collectives(scope["step"].lower(*ARGS), Mesh.of(mesh)))
    assert rows and all(row.agrees for row in rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mlp", "convnet", "lstm"])
def test_printed_specs_are_the_strategys(name):
    """The printed table of endings gives every argument and result its own sharding."""
    fn, args = PROGRAMS[name]()
    strategy = autoshard.search(fn, *args, cluster="cpu:8", searcher="fully_sharded", mesh=MESH, donate_argnums=0)
    text = str(strategy.pins(fn, *args, budget_seconds=0.0))
    scope = {fn.__name__: fn, "state": args[0], "batch": args[1:]}
    exec(text.split(INSIDE)[0], scope)
    assert "donate_argnums=(0,)" in text

    def same(leaf, sharding, spec):
        assert sharding.is_equivalent_to(NamedSharding(scope["mesh"], spec), len(leaf.shape))

    jax.tree.map(same, args, scope["in_shardings"], strategy.in_specs)
    jax.tree.map(same, jax.eval_shape(fn, *args), scope["out_shardings"], strategy.out_specs)


def test_endings_tell_leaves_apart():
    """One ending speaks for all layers and moments; a leaf that differs, or is replicated, speaks for itself."""

    def tensor(spec):
        return TensorRecord("", (8, 8), "float32", spec)

    tensors = {
        "['state']['layers'][0]['w']": tensor(("x", None)),
        "['state']['layers'][1]['w']": tensor(("x", None)),
        "['state']['mu']['layers'][0]['w']": tensor(("x", None)),
        "['state']['b'][0]": tensor(("x", None)),
        "['state']['b'][1]": tensor((None, None)),
        "['y']": tensor((None, "x")),
        "['result']['y']": tensor((None, None)),
    }
    assert _endings(tensors) == {"['w']": ("x",), "['b'][0]": ("x",), "['y']": (None, "x"), "['result']['y']": ()}


@pytest.mark.parametrize(
    "source, name, written",
    [
        ('h = jax.nn.gelu(norm(x) @ p["up"] + p["up_bias"])', "state['params']['layers'][*]['up']", 'p["up"]'),
        ("return x @ layer.up.kernel", "a slice of model.layers.up.kernel", "layer.up.kernel"),
        ("for row in x @ w1:", "w1", "w1"),
        ("y = f(x,", "x", None),
        ('y = a["w"] @ b["w"]', "state['w']", None),
        ('y = x @ p["w"].T', "transpose of state['w']", None),
        ("y = x @ w", "the result of dot_general", None),
    ],
)
def test_a_tensor_is_called_what_its_line_calls_it(source, name, written):
    """A line that mentions one tensor of an argument's name calls it so; where several could be meant, none is."""
    assert _written(source, name) == written


def test_lines_name_the_expression_among_several():
    """What is pinned on a line of many operations is what stands there, or is told in a numbered comment; no other name is made up."""

    def step(w1, w2, x, y):
        def loss(w1, w2):
            hidden = jax.nn.relu(x @ w1) @ w2; return jnp.mean((jnp.tanh(hidden) * 2 - y) ** 2)  # fmt: skip # noqa: E702

        return jax.tree.map(lambda w, g: w - g, (w1, w2), jax.grad(loss, (0, 1))(w1, w2))

    strategy = autoshard.search(step, *ARGS, cluster="cpu:8", searcher="tensor_parallel", mesh={"data": 2, "model": 4})
    found = strategy.pins(step, *ARGS, budget_seconds=0.0)  # many lines
    source = inspect.getsource(step)
    seen = set()
    for line in str(found).split(INSIDE)[1].splitlines():
        if line.startswith("constrain"):
            written = re.search(r"# in place of (.+): (its|the|[wxy])", line)[1]
            assert written in source
            seen.add(written)
        elif line and not line.startswith("#"):
            assert line.split(" = ")[0] in ("w1", "w2", "x", "y", "hidden", "w", "g")
    assert seen == {"jax.nn.relu(x @ w1) @ w2"} and "w1 = constrain" in str(found)
    told = re.findall(r"^# (\d)\. constrain_\w+\((.*?), P\(", str(found), re.MULTILINE)
    assert found.exact and told == [("2", "..."), ("3", "..."), ("1", "w - g"), ("2", "w - g")]


def test_a_program_without_gradients_has_plain_constraints():
    """Where nothing is differentiated, a line is with_sharding_constraint and no more."""

    def forward(w1, w2, x):
        return jax.nn.relu(x @ w1) @ w2

    args = ARGS[:3]
    strategy = autoshard.search(forward, *args, cluster="cpu:8", searcher="manual", mesh=MESH, pins={"w1": jax.P(("data", "model"))})
    text = str(strategy.pins(forward, *args))
    assert "with_sharding_constraint" in text and "constrain_forward" not in text and "constrain_gradient" not in text


def test_pins_say_where_and_show_in_a_notebook():
    """Each line stands under its file, line and source text; HTML has all of it, escaped; JSON too."""
    strategy = autoshard.search(plain, *ARGS, cluster="cpu:8", searcher="fully_sharded", mesh={"data": 8})
    pins = strategy.pins(plain, *ARGS)
    text = str(pins)
    assert f"tests/ask/test_pins.py:{step.__code__.co_firstlineno + 2} in step.<locals>.loss" in text
    assert 'hidden = jax.nn.relu(x @ constrain("w1", w1))' in text
    assert "step.&lt;locals&gt;.loss" in pins._repr_html_()
    assert pins.to_json()["exact"] is True and pins.to_json()["python"] == text


def test_another_program_is_refused():
    """A strategy of one program gives no pins for another."""
    strategy = autoshard.search(plain, *ARGS, cluster="cpu:8", searcher="data_parallel", mesh=MESH)
    with pytest.raises(autoshard.StrategyError, match="program"):
        strategy.pins(lambda a, b, c, d: jnp.sin(a), *ARGS)


def test_an_unfinished_search_says_so():
    """Where the time was up, the text says that fewer may do, and still that it was verified."""
    fn, args = mlp(layers=1)
    text = str(autoshard.search(fn, *args, cluster="cpu:8", searcher="fully_sharded", mesh=MESH).pins(fn, *args, budget_seconds=0.0))
    assert "Fewer may do" in text and "Verified" in text


@pytest.mark.slow
def test_the_set_up_of_modules_places_them():
    """For Flax NNX arguments the printed text puts every leaf where its spec says, and the step runs on."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 8, rngs=rngs)

    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: (model.down(jax.nn.relu(model.up(x))) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return value

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    arguments = model, optimizer, jnp.ones((64, 64))
    strategy = autoshard.search(step, *arguments, cluster=eager_cluster(), mesh={"data": 4, "model": 2})
    names = {"model": model, "optimizer": optimizer, "x": arguments[2], "step": step}
    exec(str(strategy.pins(step, *arguments)).split(INSIDE)[0], names)
    wanted = {tensor.path: tensor.spec for tensor in strategy.record.arguments}
    found = {"model.up.kernel": model.up.kernel, "optimizer.opt_state[0].mu.down.kernel": optimizer.opt_state[0].mu["down"]["kernel"]}
    assert any(entry for path in found for entry in wanted[path])
    for path, leaf in found.items():
        assert _trimmed(leaf[...].sharding.spec) == _trimmed(wanted[path])
    assert names["step"](names["model"], names["optimizer"], names["x"]) > 0


def test_pasted_lines_place_the_mesh():
    """The mesh that the printed lines make has its devices where the strategy's placement says, and so does a saved strategy's."""
    mesh = Mesh((("data", 4), ("model", 2)), Placement((2, 4), (1, 0), (0, 1)))
    strategy = autoshard.search(plain, *ARGS, cluster="v5e:2x4", mesh=MESH)
    placed = autoshard.Strategy(replace(strategy.record, mesh=mesh))
    scope = {}
    exec(str(placed.pins(plain, *ARGS)).split("# By the ending")[0], scope)
    assert scope["mesh"].devices.tolist() == jax_mesh(mesh).devices.tolist() == np.array(jax.devices()).reshape(2, 4).T.tolist()


@pytest.mark.slow
def test_a_placed_strategy_computes_the_same():
    """Wherever the devices stand, the step's results are those of the plain function, and its collectives as predicted."""
    arguments = [jax.random.normal(jax.random.key(n), arg.shape, arg.dtype) for n, arg in enumerate(ARGS)]
    strategy = autoshard.search(plain, *ARGS, cluster="v5e:2x4", mesh=MESH)
    for dims in ((0, 1), (1, 0)):
        placement = Placement((2, 4), dims, (0, 1))
        placed = autoshard.Strategy(replace(strategy.record, mesh=replace(strategy.record.mesh, placement=placement)))
        results = placed.apply(plain)(*placed.shard(*arguments))
        for result, wanted in zip(results, plain(*arguments), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=2e-3, atol=1e-3)
        assert autoshard.verify(placed, plain, *ARGS, target="cpu").exact
