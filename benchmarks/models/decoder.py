"""Decoder-only models as others ran them: GPT and Llama of any sizes, with the kernels, the recomputation and the types of a published run.

Frameworks without a compiler run one kernel after the other, each of which keeps its own operands for the backward pass: ``fuses=False``.
Products may be in float8: both operands are cast, in the backward pass the gradient too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.blocks import _norm, _tokens
from benchmarks.models.step import BF16, F32, Program, _train_step, leaf

FP8 = jnp.float8_e4m3fn
PRODUCTS = ("query", "key", "value", "context", "out", "gate", "up", "down")
"""Names of what a layer's products make, of which a run keeps some for its backward pass."""


def decoder(
    layers: int,
    width: int,
    heads: int,
    ffn: int,
    vocabulary: int,
    batch: int,
    length: int,
    kv_heads: int = 0,
    head: int = 0,
    gated: bool = False,
    tied: bool = False,
    keeps: tuple[str, ...] | None = None,
    fuses: bool = True,
    dropout: bool = False,
    products: Any = None,
    dtype: Any = BF16,
    params: Any = F32,
    scan: bool = True,
) -> Program:
    """A decoder's train step with AdamW.

    Args:
        kv_heads, head: heads of keys and values, by default all; the width of a head, by default that of the model over the heads.
        gated: whether the feed-forward network has three weights, as Llama's, or two, as GPT's.
        keeps: which of `PRODUCTS` are kept for the backward pass, which computes the rest of a layer again; None: everything is.
        fuses: whether a compiler fuses kernels.
        dropout: whether each sublayer's result and the weights of attention are dropped at random.
        products: the type of the operands of layers' products; None: ``dtype``.
    """
    kv_heads, head = kv_heads or heads, head or width // heads
    dot = partial(_dot, _float8 if products is FP8 else jnp.einsum)
    kernel = _fused if fuses else _kernel
    drop = kernel(_dropped) if dropout else lambda x: x
    norm, gelu, swiglu, add = kernel(_norm), kernel(jax.nn.gelu), kernel(_swiglu), kernel(jnp.add)

    def block(x: jax.Array, layer: Any) -> jax.Array:
        y = norm(x, layer["norm1"])
        query, key, value = (dot("bsd,dhk->bshk", y, layer[name], name) for name in ("query", "key", "value"))
        if gated:
            query, key = kernel(_rotated)(query), kernel(_rotated)(key)
        mixed = checkpoint_name(_attention(query, key, value, drop, kernel), "context")
        x = add(x, drop(dot("bshk,hkd->bsd", mixed, layer["out"], "out")))
        y = norm(x, layer["norm2"])
        up = dot("bsd,df->bsf", y, layer["up"], "up")
        inner = swiglu(dot("bsd,df->bsf", y, layer["gate"], "gate"), up) if gated else gelu(up)
        return add(x, drop(dot("bsf,fd->bsd", inner, layer["down"], "down")))

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return block(x, jax.tree.map(lambda weight: weight.astype(dtype), weights))

    if keeps is not None:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*keeps))

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = weights["embed"].astype(dtype)[tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, each: (layer(x, each), None), x, weights["layers"])
        for each in () if scan else weights["layers"]:
            x = layer(x, each)
        x = _norm(x, weights["norm"].astype(dtype))
        last = weights["embed"].astype(dtype).T if tied else weights["head"].astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels((x @ last).astype(jnp.float32), targets).mean()

    each = {"norm1": (width,), "query": (width, heads, head), "key": (width, kv_heads, head), "value": (width, kv_heads, head)}
    each |= {"out": (heads, head, width), "norm2": (width,), "up": (width, ffn), "down": (ffn, width)}
    each |= {"gate": (width, ffn)} if gated else {}
    stacked = {name: leaf(layers, *shape) for name, shape in each.items()}
    apart = [{name: leaf(*shape) for name, shape in each.items()} for _ in range(layers)]
    weights = {"embed": leaf(vocabulary, width), "layers": stacked if scan else apart, "norm": leaf(width)}
    weights |= {} if tied else {"head": leaf(width, vocabulary)}
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def _fused(function: Callable) -> Callable:
    return function


def _kernel(function: Callable) -> Callable:
    """A function that is a kernel of its own, and keeps its operands for its gradient, which is one, too."""

    def alone(*operands: jax.Array, **options: Any) -> jax.Array:
        inner = jax.checkpoint(partial(function, **options), prevent_cse=False)
        return jax.lax.optimization_barrier(inner(*(x if x.ndim < 2 else jax.lax.optimization_barrier(x) for x in operands)))

    return alone


def _dot(product: Callable, spec: str, x: jax.Array, weight: jax.Array, name: str) -> jax.Array:
    return checkpoint_name(product(spec, x, weight), name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _float8(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x.astype(FP8), weight.astype(FP8), preferred_element_type=x.dtype)


def _float8_forward(spec: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _float8(spec, x, weight), (x, weight)


def _float8_backward(spec: str, kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    left, right = spec.split("->")[0].split(",")
    made, narrow = spec.split("->")[1], gradient.astype(FP8)
    of_x = jnp.einsum(f"{made},{right}->{left}", narrow, weight.astype(FP8), preferred_element_type=x.dtype)
    return of_x, jnp.einsum(f"{left},{made}->{right}", x.astype(FP8), narrow, preferred_element_type=weight.dtype)


_float8.defvjp(_float8_forward, _float8_backward)


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, drop: Callable, kernel: Callable) -> jax.Array:
    """Causal attention, whose queries share keys in groups; a rewrite makes it a fused kernel where the run has one."""
    batch, length, heads, head = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], head)
    weights = kernel(_weights)(jnp.einsum("bqhgk,bshk->bhgqs", grouped, key))
    return jnp.einsum("bhgqs,bshk->bqhgk", drop(weights), value).reshape(query.shape)


def _weights(scores: jax.Array) -> jax.Array:
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    head = 128  # of any width: a constant factor takes no time
    return jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32) / head**0.5, -1e9), axis=-1).astype(scores.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    angles = jnp.arange(x.shape[1])[:, None] / 500_000 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _dropped(x: jax.Array) -> jax.Array:
    """What dropout takes; the mask is of the values themselves, since which are dropped takes no time."""
    return jnp.where(x > 0, x / 0.9, 0)
