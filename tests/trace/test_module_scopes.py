"""Operations are under the scope of the module that computes them."""

from __future__ import annotations

import equinox
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from autoshard.explanation.layers import layer_of
from autoshard.trace import trace


class Att(nnx.Module):
    def __init__(self, rngs):
        self.q, self.out = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.softmax(self.q(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.att, self.norm = Att(rngs), nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(x + self.att(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs, remat=False):
        self.blocks, self.head = nnx.List([Block(rngs) for _ in range(2)]), nnx.Linear(4, 2, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.remat else block(x)
        return self.head(x)


def layers_of(fn, *args):
    """By layer the primitives of a program."""
    found = {}
    for op in trace(fn, *args).graph.walk():
        found.setdefault(layer_of(op.origin), set()).add(op.primitive)
    return found


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_nnx_are_paths_of_modules(remat):
    """Forward and backward, with a star for numbers; of several linear layers the module that has them."""

    def step(model, x):
        return nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)

    found = layers_of(step, Model(nnx.Rngs(0), remat), jnp.ones((8, 4)))
    assert {"blocks[*]", "blocks[*].att", "blocks[*].norm", "head"} <= set(found)
    assert "sin" in found["blocks[*]"] and "cos" in found["blocks[*]"]
    assert "exp" in found["blocks[*].att"] and "dot_general" in found["head"]
    assert not any("blocks[*]/" in name for name in found), found


def test_layers_of_two_stacks_are_told_apart():
    """Blocks of one class, called by an encoder and by a decoder."""

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs)])

        def __call__(self, x):
            return self.blocks[0](x)

    class Encoder(Stack): ...

    class Decoder(Stack):
        def __call__(self, x):
            return 2 * self.blocks[0](x)

    class Both(nnx.Module):
        def __init__(self, rngs):
            self.encoder, self.decoder = Encoder(rngs), Decoder(rngs)

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    found = layers_of(lambda model, x: model(x), Both(nnx.Rngs(0)), jnp.ones((8, 4)))
    assert {"decoder.blocks[*].att", "decoder"} <= set(found), set(found)
    assert "decoder.blocks[*].att" in found and not any(name.startswith("encoder.") and "decoder" in name for name in found)


def test_layers_of_equinox_and_of_scans():
    """Equinox modules are pytrees; a loop's body is under scopes, and the loop is not."""

    class Layer(equinox.Module):
        weight: jax.Array

        def __call__(self, x):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ self.weight), None), x, None, length=3)[0]

    class Net(equinox.Module):
        layers: list

        def __call__(self, x):
            return self.layers[1](self.layers[0](x)) + 1

    found = layers_of(lambda net, x: net(x), Net([Layer(jnp.ones((4, 4))), Layer(jnp.ones((4, 4)))]), jnp.ones((8, 4)))
    assert {"dot_general", "tanh"} <= found["layers[*]"]


def test_without_modules_nothing_changes():
    """Layers are functions, as before."""

    def loss(params, x):
        return (x @ params["w"]).sum()

    assert set(layers_of(loss, {"w": jnp.ones((4, 4))}, jnp.ones((8, 4)))) == {"loss"}
