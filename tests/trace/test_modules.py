"""NNX modules and optimizers as arguments: traced whole, updated in place, their lost mutations refused."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from programs import abstract

from autoshard.errors import TraceError
from autoshard.trace import trace

x = jnp.linspace(0, 1, 32).reshape(8, 4)


class Net(nnx.Module):
    """A layer used twice, dropout, and batch statistics."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.tied = self.layers[0]
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.norm(self.dropout(self.tied(x)))


def made():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


def called(traced, *args):
    """What the traced program gives on these arguments; modules are updated."""
    run = jax.jit(lambda *pure: traced.pack(jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(pure))))
    return traced.merge(args, run(*traced.split(args)))


def leaves(*nodes):
    keys = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    return list(map(keys, jax.tree.leaves(nnx.state(nodes))))


def test_optimizer_updates_are_in_the_graph():
    """The backward pass and AdamW's square roots are there; each shared module is one argument."""
    model, optimizer = made()
    graph = trace(train_step, model, optimizer, x).graph
    names = [op.primitive for op in graph.walk()]
    assert names.count("dot_general") == 8 and names.count("sqrt") == 6  # three forward, five backward; six parameters
    assert len(graph.arguments) == len(leaves(model, optimizer)) + 1
    assert not any("tied" in path for path in graph.argument_paths)


def test_paths_read_as_attributes():
    """A leaf is called as in Python, a written-back one as its argument, which it replaces."""
    graph = trace(train_step, *made(), x).graph
    assert {"model.layers[0].kernel", "optimizer.opt_state[0].mu.layers[1].bias", "optimizer.step", "x"} <= set(graph.argument_paths)
    assert len(set(graph.argument_paths)) == len(graph.argument_paths)
    assert graph.result_paths[0] == "result" and len(graph.aliases) == len(graph.results) - 1
    assert all(graph.result_paths[r] == graph.argument_paths[a] for r, a in graph.aliases)


def test_nested_modules_keep_their_outer_path():
    """A module inside a plain pytree is found at any depth."""
    model, _ = made()
    graph = trace(lambda state, x: state["nets"][0](x), {"nets": [model], "n": 1.0}, x).graph
    assert "state['nets'][0].layers[0].kernel" in graph.argument_paths and "state['n']" in graph.argument_paths


@pytest.mark.parametrize("donate_argnums", [(), (0, 1)])
def test_mutations_are_written_back_as_nnx_jit_does(donate_argnums):
    """Three steps give the losses and the state of `nnx.jit`: parameters, moments, statistics and random counters."""
    ours, theirs = made(), made()
    traced = trace(train_step, *ours, x, donate_argnums=donate_argnums)
    step = nnx.jit(train_step)
    for _ in range(3):
        np.testing.assert_allclose(called(traced, *ours, x), step(*theirs, x), rtol=1e-5)
    for got, expected in zip(leaves(*ours), leaves(*theirs), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_only_what_changes_is_returned():
    """Inference returns statistics and random counters, not the parameters; a donated module comes back whole."""
    model, _ = made()
    forward = lambda model, x: model(x)  # noqa: E731
    assert set(trace(forward, model, x).graph.result_paths) == {"result", "model.norm.mean", "model.norm.var", "model.dropout.rngs.count"}
    assert len(trace(forward, model, x, donate_argnums=0).graph.results) == len(leaves(model)) + 1


def test_abstract_modules_are_traced():
    """A module made by `nnx.eval_shape` will do."""
    abstract_model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    traced = trace(lambda model, x: model(x), abstract_model, abstract((8, 4)))
    assert traced.graph.fingerprint == trace(lambda model, x: model(x), made()[0], x).graph.fingerprint


def test_a_state_is_a_plain_pytree():
    """An `nnx.State` that the user split off is data like any other."""
    structure, state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    traced = trace(lambda state, x: nnx.merge(structure, state)(x), state, x)
    assert traced.modules is None and len(traced.graph.arguments) == 3


def test_returned_modules_come_back_as_modules():
    """An argument, or a part of one, comes back as the same object, a new module as a new one."""
    model, _ = made()
    args = model, x
    traced = trace(lambda model, x: (model.layers[1], nnx.Linear(4, 2, rngs=nnx.Rngs(1)), model, x), *args)
    part, new, same, _ = called(traced, *args)
    assert part is model.layers[1] and same is model and new.kernel.shape == (4, 2)


def test_a_module_of_another_structure_is_refused():
    """A traced step says so when it is called with another mode or other layers."""
    model, _ = made()
    traced = trace(lambda model, x: model(x), model, x)
    model.eval()
    with pytest.raises(TraceError, match="train and eval mode"):
        traced.split((model, x))


def adds_a_variable(model, x):
    model.extra = nnx.Param(x)
    return x


def changes_its_mode(model, x):
    model.eval()
    return model(x)


def shares_with_an_argument(model, x):
    fresh = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    fresh.kernel = model.layers[0].kernel
    return fresh


@pytest.mark.parametrize(
    "fn, says",
    [(adds_a_variable, "not its structure"), (changes_its_mode, "static attribute"), (shares_with_an_argument, "shares variables")],
)
def test_what_cannot_be_written_back_is_an_error(fn, says):
    """A change of structure or mode, or sharing that would break, is not lost silently."""
    with pytest.raises(TraceError, match=says):
        trace(fn, made()[0], x)


def test_a_captured_module_may_not_be_mutated():
    """A mutation of a module that is not an argument would be lost: in a whole train step, or by one assignment."""
    model, optimizer = made()
    count = nnx.Variable(jnp.zeros(()))

    def assigns(x):
        count.value = x.sum()
        return x

    for fn in (lambda x: train_step(model, optimizer, x), assigns):
        with pytest.raises(TraceError, match=r"captures.*Pass the module as an argument"):
            trace(fn, x)


def test_flax_is_not_imported_for_plain_functions():
    """Tracing a plain function leaves Flax alone."""
    code = "import sys, jax.numpy as jnp; from autoshard.trace import trace; trace(jnp.sin, 1.0); sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
