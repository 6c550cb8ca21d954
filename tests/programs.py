"""Small and large JAX programs for tests: each function returns ``(fn, args)`` with abstract arguments,
but `two_products`, which returns those of `two_products_step`.

`concrete` turns the arguments into real arrays: floats are small normal numbers, integers lie below the bound given.
Parameters are plain dictionaries, optimizers are optax's, so a program's argument paths read ``state['params']['embed']``.
A program that is made twice is one function, which JAX traces and compiles once.
"""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

F32 = jnp.float32


def abstract(shape, dtype=F32):
    """A `jax.ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def concrete(args, seed: int = 0, below: int = 16, scale: float = 0.1):
    """Real arrays of the same structure: floats from N(0, scale), counts as zeros, other integers in [0, below), keys from the seed.

    NumPy makes them: `jax.random.normal` is compiled anew for each shape, which takes longer than most tests.
    """
    generator = np.random.default_rng(seed)

    def make(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), leaf.shape) if leaf.shape else jax.random.key(seed)
        if leaf.dtype == jnp.bool_:
            return jnp.asarray(generator.random(leaf.shape) < 0.5)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.zeros((), leaf.dtype) if not leaf.shape else jnp.asarray(generator.integers(0, below, leaf.shape), leaf.dtype)
        return jnp.asarray(generator.normal(0, scale, leaf.shape), leaf.dtype)

    def make_state(path, leaf):
        second_moment = any(getattr(key, "name", None) == "nu" for key in path)  # AdamW takes its square root
        return abs(make(leaf)) if second_moment else make(leaf)

    return jax.tree_util.tree_map_with_path(make_state, args)


def train_step_of(loss, params, *batch, optimizer=None):
    """``(train_step, (state, *batch))`` of a loss: ``state`` is ``{"params", "optimizer"}``, the step returns it with the loss."""
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}

    def train_step(state, *batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], *batch)
        updates, opt_state = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}, value

    return train_step, (state, *batch)


# --- transformers ----------------------------------------------------------------------------------------------------


def _gpt_params(n_layers, d_model, heads, ffn, vocab, seq):
    head = d_model // heads
    layer = {
        "norm1": abstract((d_model,)),
        "qkv": abstract((d_model, 3, heads, head)),
        "out": abstract((heads, head, d_model)),
        "norm2": abstract((d_model,)),
        "up": abstract((d_model, ffn)),
        "up_bias": abstract((ffn,)),
        "down": abstract((ffn, d_model)),
        "down_bias": abstract((d_model,)),
    }
    return {
        "embed": abstract((vocab, d_model)),
        "position": abstract((seq, d_model)),
        "layers": [dict(layer) for _ in range(n_layers)],
        "norm": abstract((d_model,)),
    }


def _norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def _block(x, p):
    """One pre-norm decoder block on ``(batch, seq, d_model)``."""
    h = _norm(x, p["norm1"])
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", h, p["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], dim) for dim in (0, 1))
    weights = jax.nn.softmax(jnp.where(rows >= columns, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, v), p["out"])
    h = jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"]


def _cross_entropy(logits, targets):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


@cache
def gpt(n_layers=2, d_model=32, heads=4, ffn=64, vocab=64, batch=8, seq=16, remat=False):
    """An unrolled decoder-only transformer's AdamW step; with ``remat`` each block is a `jax.checkpoint`."""
    block = jax.checkpoint(_block) if remat else _block

    def loss(params, tokens, targets):
        x = params["embed"][tokens] + params["position"]
        for layer in params["layers"]:
            x = block(x, layer)
        return _cross_entropy(_norm(x, params["norm"]) @ params["embed"].T, targets)

    tokens = abstract((batch, seq), jnp.int32)
    return train_step_of(loss, _gpt_params(n_layers, d_model, heads, ffn, vocab, seq), tokens, tokens)


@cache
def gpt_scan(n_layers=4, d_model=32, heads=4, ffn=64, vocab=64, batch=8, seq=16, remat=True):
    """The same transformer with its layers stacked and scanned."""
    block = jax.checkpoint(_block) if remat else _block

    def loss(params, tokens, targets):
        x = params["embed"][tokens] + params["position"]
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
        return _cross_entropy(_norm(x, params["norm"]) @ params["embed"].T, targets)

    params = _gpt_params(1, d_model, heads, ffn, vocab, seq)
    params["layers"] = {name: abstract((n_layers, *leaf.shape)) for name, leaf in params["layers"][0].items()}
    tokens = abstract((batch, seq), jnp.int32)
    return train_step_of(loss, params, tokens, tokens)


@cache
def gpt_forward(n_layers=2, d_model=32, heads=4, ffn=64, vocab=64, batch=8, seq=16):
    """Inference: logits of a batch of tokens."""

    def logits(params, tokens):
        x = params["embed"][tokens] + params["position"]
        for layer in params["layers"]:
            x = _block(x, layer)
        return _norm(x, params["norm"]) @ params["embed"].T

    return logits, (_gpt_params(n_layers, d_model, heads, ffn, vocab, seq), abstract((batch, seq), jnp.int32))


@cache
def moe(d_model=32, ffn=64, experts=8, capacity=8, batch=32, remat=False):
    """A top-1 mixture of experts with one-hot dispatch (GShard), trained with AdamW."""

    def layer(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = (jnp.cumsum(chosen, axis=0) - 1.0) * chosen
        dispatch = chosen[..., None] * jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)[:, None, :]
        inputs = jnp.einsum("tec,td->ecd", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        return x + jnp.einsum("tec,ecd->td", dispatch * gates[..., None], outputs)

    apply = jax.checkpoint(layer) if remat else layer

    def loss(params, x, y):
        return ((apply(params, x) - y) ** 2).mean()

    params = {
        "router": abstract((d_model, experts)),
        "up": abstract((experts, d_model, ffn)),
        "down": abstract((experts, ffn, d_model)),
    }
    x = abstract((batch, d_model))
    return train_step_of(loss, params, x, x)


# --- other families --------------------------------------------------------------------------------------------------


@cache
def mlp(layers=3, width=64, batch=32, remat=False, optimizer=None):
    """A relu network's regression step, AdamW unless told otherwise; with ``remat`` each layer is a `jax.checkpoint`."""

    def layer(x, p):
        return jax.nn.relu(x @ p["w"] + p["b"])

    apply = jax.checkpoint(layer) if remat else layer

    def loss(params, x, y):
        for p in params:
            x = apply(x, p)
        return ((x - y) ** 2).mean()

    params = [{"w": abstract((width, width)), "b": abstract((width,))} for _ in range(layers)]
    x = abstract((batch, width))
    return train_step_of(loss, params, x, x, optimizer=optimizer)


@cache
def convnet(channels=8, classes=16, batch=16, side=16):
    """A LeNet-like network's classification step with momentum: two convolutions, max pooling, two dense layers."""

    def loss(params, images, labels):
        x = images
        for kernel in params["kernels"]:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(x.reshape(batch, -1) @ params["hidden"])
        return _cross_entropy(x @ params["head"], labels)

    flat = (side // 4) ** 2 * 2 * channels
    params = {
        "kernels": [abstract((3, 3, 1, channels)), abstract((3, 3, channels, 2 * channels))],
        "hidden": abstract((flat, 32)),
        "head": abstract((32, classes)),
    }
    labels = abstract((batch,), jnp.int32)
    return train_step_of(loss, params, abstract((batch, side, side, 1)), labels, optimizer=optax.sgd(1e-2, momentum=0.9))


@cache
def lstm(width=32, batch=16, steps=12):
    """A recurrent network scanned over time, with its gradient and plain descent."""

    def loss(params, sequence, target):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["input"] + h @ params["hidden"] + params["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((sequence.shape[1], width))
        _, outputs = jax.lax.scan(cell, (zero, zero), sequence)
        return ((outputs - target) ** 2).mean()

    params = {"input": abstract((width, 4 * width)), "hidden": abstract((width, 4 * width)), "bias": abstract((4 * width,))}
    x = abstract((steps, batch, width))
    return train_step_of(loss, params, x, x, optimizer=optax.sgd(1e-2))


@cache
def control_flow(width=16, batch=8):
    """A `while`, a `cond` and a `fori_loop` with an argument as its bound, forward only."""

    def program(w, x, n, flag):
        x = jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)
        x = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]
        return jax.lax.cond(flag, lambda x: x @ w, lambda x: x + 1.0, x)

    return program, (abstract((width, width)), abstract((batch, width)), abstract((), jnp.int32), abstract((), jnp.bool_))


def tied_step(weights, tokens, targets):
    """A train step of a table that embeds and unembeds tokens, and a layer between: loss and updated weights."""

    def loss(weights):
        x = jax.nn.gelu(weights["embed"][tokens] @ weights["up"]) @ weights["down"]
        logits = x @ weights["embed"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def two_products_step(state, x):
    """A step of gradient descent for two products with a tanh between them."""

    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def two_products(batch=256):
    """The arguments of `two_products_step`."""
    return {"params": {"up": abstract((512, 2048)), "down": abstract((2048, 512))}}, abstract((batch, 512))


PROGRAMS = {
    "mlp": mlp,
    "mlp_remat": lambda: mlp(remat=True),
    "convnet": convnet,
    "lstm": lstm,
    "moe": moe,
    "moe_remat": lambda: moe(remat=True),
    "gpt": gpt,
    "gpt_remat": lambda: gpt(remat=True),
    "gpt_scan": gpt_scan,
    "gpt_forward": gpt_forward,
    "control_flow": control_flow,
}
