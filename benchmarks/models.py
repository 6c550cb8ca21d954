"""Train steps (AdamW) in plain JAX with abstract arguments: nothing is allocated.

Parameters and optimizer state are float32, activations bfloat16: each layer casts its weights where it uses them, so that gradients come
back as float32, and losses are float32. ``dtype`` is that of activations, ``params`` that of the state (`benchmarks.single_dtype` has both
alike). Language models are unrolled or scanned, with or without ``remat``; ``tied`` says whether the embedding also makes the logits,
``gathers`` whether the loss gathers the targets' logits or compares an iota with the targets.

Default sizes hold more than a gigabyte a device under data parallelism on eight devices, with few layers: they compile fast.
`MODELS` names them all, each with the tensor parallelism that experts write by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

BF16, F32 = jnp.bfloat16, jnp.float32

Program = tuple[Callable, tuple]
"""A train step and its arguments ``(state, *batch)``."""


@dataclass(frozen=True, slots=True)
class Model:
    """A train step's maker.

    Attributes:
        make: called with sizes, all of which have defaults, gives the program.
        tensor_parallel: `PartitionSpec` by pattern of argument paths on axes ``data`` and ``model``: contraction pairs are split
            over ``model`` (column, then row: Megatron-LM, arXiv 1909.08053), the batch over ``data``.
    """

    make: Callable[..., Program]
    tensor_parallel: Mapping[str, P]


def leaf(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """An array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cast(weights: Any, dtype: Any) -> Any:
    """Weights as a layer computes with them."""
    return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def _train_step(loss: Callable, weights: Any, *batch: jax.ShapeDtypeStruct, params: Any = None) -> Program:
    """The program of a loss: its weights are kept as ``params``, a dtype, or as they are."""
    if params is not None:
        weights = jax.tree.map(lambda weight: leaf(*weight.shape, dtype=params), weights)
    optimizer = optax.adamw(1e-3)
    state = {"params": weights, "optimizer": jax.eval_shape(optimizer.init, weights)}

    def train_step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], *batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    return train_step, (state, *batch)


# --- transformers ------------------------------------------------------------------------------------------------------


def gpt(
    layers: int,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_768,
    batch: int = 512,
    length: int = 1024,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """A decoder-only transformer.

    Args:
        gathers: whether its loss gathers the targets' logits; otherwise it compares with all of them.
        tied: whether the embedding makes the logits, too.
        scan: whether the layers are stacked and scanned instead of unrolled.
        remat: whether the backward pass computes each layer again.
        stream: where the residual stream is constrained to lie between sublayers, if anywhere.
    """

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        x = _through(partial(_block, stream=stream), x, weights["layers"], scan, remat)
        return _next_token(x, weights, targets, gathers)

    each = _attention_weights(width, heads) | _dense_weights(width)
    weights = _language(vocabulary, length, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def gpt_scan(
    layers: int = 8,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_768,
    batch: int = 64,
    length: int = 1024,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """The same transformer with its layers stacked and scanned."""
    return gpt(layers, width, heads, vocabulary, batch, length, dtype, params, gathers, tied, True, remat, stream)


def llama(
    layers: int = 2,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14_336,
    vocabulary: int = 128_256,
    batch: int = 64,
    length: int = 2048,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = False,
    scan: bool = False,
    remat: bool = True,
    stream: P | None = None,
) -> Program:
    """A Llama-3 decoder (arXiv 2407.21783; sizes of the 8B): grouped queries, rotary positions, gated feed-forward, untied head.

    Args: as of `gpt`.
    """
    head = width // heads

    def rotary(x: jax.Array) -> jax.Array:
        angles = jnp.arange(length)[:, None] / 500_000 ** (jnp.arange(0, head, 2) / head)
        cos, sin = (f(angles)[:, None, :].astype(dtype) for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def block(x: jax.Array, layer: Any) -> jax.Array:
        y = _norm(x, layer["norm1"])
        query = rotary(jnp.einsum("bsd,dhk->bshk", y, layer["query"]))
        key = rotary(jnp.einsum("bsd,dhk->bshk", y, layer["key"]))
        value = jnp.einsum("bsd,dhk->bshk", y, layer["value"])
        grouped = query.reshape(*query.shape[:2], kv_heads, heads // kv_heads, head)
        scores = jnp.einsum("bqhgk,bshk->bhgqs", grouped, key).astype(jnp.float32) / head**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(dtype)
        mixed = jnp.einsum("bhgqs,bshk->bqhgk", weights, value).reshape(query.shape)
        x = _lying(x + jnp.einsum("bshk,hkd->bsd", mixed, layer["out"]), stream)
        y = _norm(x, layer["norm2"])
        return _lying(x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"], stream)

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        return _next_token(_through(block, x, weights["layers"], scan, remat), weights, targets, gathers)

    each = {
        "norm1": leaf(width),
        "query": leaf(width, heads, head),
        "key": leaf(width, kv_heads, head),
        "value": leaf(width, kv_heads, head),
        "out": leaf(heads, head, width),
        "norm2": leaf(width),
        "gate": leaf(width, ffn),
        "up": leaf(width, ffn),
        "down": leaf(ffn, width),
    }
    weights = _language(vocabulary, None, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def moe(
    layers: int = 2,
    width: int = 1024,
    heads: int = 16,
    experts: int = 8,
    vocabulary: int = 32_768,
    batch: int = 64,
    length: int = 1024,
    room: float = 1.25,
    dtype: Any = BF16,
    params: Any = F32,
    sorts: bool = False,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """A transformer whose dense layers are mixtures of experts: one expert a token.

    Args:
        room: tokens that an expert takes of each sequence, in shares of an even split; those beyond are dropped.
        sorts: whether tokens are sorted by expert and gathered, rather than dispatched by one-hot products (GShard, arXiv 2006.16668).
        gathers, tied, scan, remat, stream: as of `gpt`.
    """
    capacity = math.ceil(room * length / experts)

    def experts_of(inputs: jax.Array, layer: Any) -> jax.Array:
        hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", inputs, layer["up"]))
        return jnp.einsum("becf,efd->becd", hidden, layer["down"])

    def sorted_mixture(x: jax.Array, layer: Any) -> jax.Array:
        gates = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
        chosen = jnp.argmax(gates, -1)
        counts = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).sum(1)
        places = jnp.arange(capacity) + (jnp.cumsum(counts, axis=1) - counts)[..., None]
        token = jnp.take_along_axis(jnp.argsort(chosen, axis=1), jnp.minimum(places, length - 1).reshape(batch, -1), axis=1)
        inputs = jnp.take_along_axis(x, token[..., None], axis=1).reshape(batch, experts, capacity, width)
        weights = jnp.take_along_axis(gates.max(-1), token, axis=1).reshape(places.shape) * (jnp.arange(capacity) < counts[..., None])
        outputs = experts_of(inputs, layer) * weights[..., None].astype(dtype)
        return jnp.zeros_like(x).at[jnp.arange(batch)[:, None], token].add(outputs.reshape(batch, -1, width))

    def dispatched_mixture(x: jax.Array, layer: Any) -> jax.Array:
        gates = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = ((jnp.cumsum(chosen, axis=1) - 1) * chosen).sum(-1).astype(jnp.int32)
        dispatch = (chosen[..., None] * jax.nn.one_hot(place, capacity)[..., None, :]).astype(dtype)
        outputs = experts_of(jnp.einsum("bsec,bsd->becd", dispatch, x), layer)
        return jnp.einsum("bsec,becd->bsd", dispatch * gates[..., None].astype(dtype), outputs)

    mixture = sorted_mixture if sorts else dispatched_mixture

    def block(x: jax.Array, layer: Any) -> jax.Array:
        x = _lying(_attention(x, layer), stream)
        return _lying(x + mixture(_norm(x, layer["norm2"]), layer), stream)

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        return _next_token(_through(block, x, weights["layers"], scan, remat), weights, targets, gathers)

    each = _attention_weights(width, heads) | {
        "norm2": leaf(width),
        "router": leaf(width, experts),
        "up": leaf(experts, width, 4 * width),
        "down": leaf(experts, 4 * width, width),
    }
    weights = _language(vocabulary, length, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def vit(
    layers: int = 3,
    width: int = 768,
    heads: int = 12,
    batch: int = 256,
    side: int = 224,
    patch: int = 16,
    dtype: Any = BF16,
    params: Any = F32,
    scan: bool = False,
    remat: bool = False,
) -> Program:
    """A vision transformer with a class token (arXiv 2010.11929)."""
    n = (side // patch) ** 2

    def block(x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x, p["norm1"])
        x = x + _read(y, y, p["attention"])
        return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]

    def loss(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        ends = cast({name: weights[name] for name in ("patch", "class", "position", "norm", "head")}, dtype)
        patches = jax.lax.conv_general_dilated(images, ends["patch"], (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        token = jnp.broadcast_to(ends["class"], (batch, 1, width))
        x = jnp.concatenate([token, patches.reshape(batch, n, width)], axis=1) + ends["position"]
        x = _through(block, x, weights["layers"], scan, remat)
        logits = (_norm(x[:, 0], ends["norm"]) @ ends["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    weights = {
        "patch": leaf(patch, patch, 3, width),
        "class": leaf(1, 1, width),
        "position": leaf(1, n + 1, width),
        "layers": _layers(_reader(width, heads) | {"bias": leaf(4 * width)}, layers, scan),
        "norm": leaf(width),
        "head": leaf(width, 1000),
    }
    return _train_step(loss, weights, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32), params=params)


def encoder_decoder(
    layers: int = 2,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_128,
    batch: int = 64,
    length: int = 512,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
) -> Program:
    """An encoder with relative positions and a decoder that reads it (T5, arXiv 1910.10683); one table embeds both.

    Args: as of `gpt`.
    """
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]

    def encoder(bias: jax.Array, x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x, p["norm1"])
        x = x + _read(y, y, p["attention"], bias)
        return x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def decoder(causal: jax.Array, memory: jax.Array, x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x, p["norm1"])
        x = x + _read(y, y, p["attention"], causal)
        x = x + _read(_norm(x, p["norm3"]), memory, p["reading"])
        return x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(weights: Any, source: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        bias = jnp.moveaxis(cast(weights["relative"], dtype)[jnp.clip(distance + 16, 0, 31)], -1, 0)[None]
        x = _through(partial(encoder, bias), _embedded(source, weights, dtype), weights["encoder"], scan, remat)
        memory = _norm(x, cast(weights["norm"], dtype))
        x = _embedded(tokens, weights, dtype)
        causal = jnp.where(distance > 0, -1e9, 0.0)[None, None]
        x = _through(partial(decoder, causal, memory), x, weights["decoder"], scan, remat)
        return _next_token(x, weights | {"norm": weights["last"]}, targets, gathers)

    reading = {"norm3": leaf(width), "reading": _read_weights(width, heads)}
    weights = {
        "embed": leaf(vocabulary, width),
        "relative": leaf(32, heads),
        "encoder": _layers(_reader(width, heads), layers, scan),
        "norm": leaf(width),
        "decoder": _layers(_reader(width, heads) | reading, layers, scan),
        "last": leaf(width),
    }
    weights |= {} if tied else {"head": leaf(width, vocabulary)}
    return _train_step(loss, weights, leaf(batch, length, dtype=jnp.int32), *_tokens(batch, length), params=params)


def _tokens(batch: int, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return leaf(batch, length, dtype=jnp.int32), leaf(batch, length, dtype=jnp.int32)


def _layers(each: Mapping[str, Any], layers: int, scan: bool) -> Any:
    """The weights of all layers: stacked to be scanned, or one after the other."""
    if scan:
        return jax.tree.map(lambda weight: leaf(layers, *weight.shape), dict(each))
    return [dict(each) for _ in range(layers)]


def _through(block: Callable, x: jax.Array, layers: Any, scan: bool, remat: bool) -> jax.Array:
    """The stream after all layers, each of which casts its own weights."""

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return block(x, cast(weights, x.dtype))

    layer = jax.checkpoint(layer) if remat else layer
    if scan:
        return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, layers)[0]
    for weights in layers:
        x = layer(x, weights)
    return x


def _language(vocabulary: int, length: int | None, width: int, layers: Any, tied: bool) -> dict[str, Any]:
    """A decoder's weights, without positions where no length is given."""
    positions = {} if length is None else {"position": leaf(length, width)}
    head = {} if tied else {"head": leaf(width, vocabulary)}
    return {"embed": leaf(vocabulary, width), **positions, "layers": layers, "norm": leaf(width), **head}


def _attention_weights(width: int, heads: int) -> dict[str, Any]:
    head = width // heads
    return {"norm1": leaf(width), "qkv": leaf(width, 3, heads, head), "out": leaf(heads, head, width)}


def _dense_weights(width: int) -> dict[str, Any]:
    return {"norm2": leaf(width), "up": leaf(width, 4 * width), "down": leaf(4 * width, width)}


def _read_weights(width: int, heads: int) -> dict[str, Any]:
    apart = {name: leaf(width, heads, width // heads) for name in ("query", "key", "value")}
    return apart | {"out": leaf(heads, width // heads, width)}


def _reader(width: int, heads: int) -> dict[str, Any]:
    """A layer's weights, with queries, keys and values apart."""
    return {"norm1": leaf(width), "attention": _read_weights(width, heads)} | _dense_weights(width)


def _embedded(tokens: jax.Array, weights: Any, dtype: Any) -> jax.Array:
    x = cast(weights["embed"], dtype)[tokens]
    return x + cast(weights["position"], dtype) if "position" in weights else x


def _next_token(x: jax.Array, weights: Any, targets: jax.Array, gathers: bool) -> jax.Array:
    x = _norm(x, cast(weights["norm"], x.dtype))
    head = cast(weights["head"], x.dtype) if "head" in weights else cast(weights["embed"], x.dtype).T
    logits = (x @ head).astype(jnp.float32)
    if gathers:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, logits.shape[-1])).mean()


def _lying(x: jax.Array, stream: P | None) -> jax.Array:
    return x if stream is None else jax.lax.with_sharding_constraint(x, stream)


def _block(x: jax.Array, layer: Any, stream: P | None) -> jax.Array:
    x = _lying(_attention(x, layer), stream)
    return _lying(x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"], stream)


def _attention(x: jax.Array, layer: Any) -> jax.Array:
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", _norm(x, layer["norm1"]), layer["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / query.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, value, layer["out"])


def _read(queries: jax.Array, read: jax.Array, p: Any, bias: jax.Array | float = 0.0) -> jax.Array:
    """Attention of one sequence to another, or to itself."""
    query = jnp.einsum("bsd,dhk->bshk", queries, p["query"])
    key, value = (jnp.einsum("bsd,dhk->bshk", read, p[name]) for name in ("key", "value"))
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5 + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, value), p["out"])


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


# --- dense networks ----------------------------------------------------------------------------------------------------


def mlp(layers: int = 4, width: int = 4096, hidden: int = 16_384, batch: int = 16_384, dtype: Any = BF16, params: Any = F32) -> Program:
    """A residual network of dense layers: regression on vectors."""

    def loss(weights: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for layer in weights:
            p = cast(layer, dtype)
            x = x + jax.nn.gelu(x @ p["up"] + p["inner"]) @ p["down"] + p["outer"]
        return ((x - targets).astype(jnp.float32) ** 2).mean()

    each = {"up": leaf(width, hidden), "inner": leaf(hidden), "down": leaf(hidden, width), "outer": leaf(width)}
    x = leaf(batch, width, dtype=dtype)
    return _train_step(loss, [dict(each) for _ in range(layers)], x, x, params=params)


def dlrm(tables: int = 6, rows: int = 200_000, width: int = 128, batch: int = 16_384, dtype: Any = BF16, params: Any = F32) -> Program:
    """A recommender (DLRM, arXiv 1906.00091): dense features and looked-up rows, their products, and a small network on top.

    Rows are cast once they are looked up: a cast of whole tables would be most of the step.
    """
    first, second = jnp.triu_indices(tables + 1, 1)

    def stack(x: jax.Array, layers: Any) -> jax.Array:
        for number, layer in enumerate(layers):
            p = cast(layer, dtype)
            x = x @ p["weight"] + p["bias"]
            x = jax.nn.relu(x) if number + 1 < len(layers) else x
        return x

    def loss(weights: Any, dense: jax.Array, rows: jax.Array, clicked: jax.Array) -> jax.Array:
        features = jax.nn.relu(stack(dense, weights["bottom"]))
        looked_up = (cast(table[rows[:, k]], dtype) for k, table in enumerate(weights["tables"]))
        every = jnp.stack([features, *looked_up], axis=1)
        products = jnp.einsum("bid,bjd->bij", every, every)[:, first, second]
        logits = stack(jnp.concatenate([features, products], axis=1), weights["top"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), clicked).mean()

    def layers(*widths: int) -> list[Any]:
        return [{"weight": leaf(before, after), "bias": leaf(after)} for before, after in pairwise(widths)]

    weights = {
        "tables": [leaf(rows, width) for _ in range(tables)],
        "bottom": layers(16, 512, 256, width),
        "top": layers(width + tables * (tables + 1) // 2, 1024, 1024, 512, 1),
    }
    looked_up = leaf(batch, tables, dtype=jnp.int32)
    return _train_step(loss, weights, leaf(batch, 16, dtype=dtype), looked_up, leaf(batch, dtype=jnp.float32), params=params)


# --- convolutions ------------------------------------------------------------------------------------------------------


def resnet(
    blocks: tuple[int, ...] = (1, 1, 1, 1),
    channels: int = 64,
    classes: int = 1024,
    batch: int = 1024,
    side: int = 224,
    groups: int = 0,
    dtype: Any = BF16,
    params: Any = F32,
) -> Program:
    """A residual network of bottlenecks (arXiv 1512.03385); norms are over the batch, or over so many groups of channels."""

    def block(x: jax.Array, p: Any, stride: int) -> jax.Array:
        y = jax.nn.relu(_channel_norm(_conv(x, p["reduce"]), p["norm1"], groups))
        y = jax.nn.relu(_channel_norm(_conv(y, p["spatial"], stride), p["norm2"], groups))
        y = _channel_norm(_conv(y, p["expand"]), p["norm3"], groups)
        return jax.nn.relu(y + (_conv(x, p["shortcut"], stride) if "shortcut" in p else x))

    def loss(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(_channel_norm(_conv(images, weights["stem"], 2), weights["norm"], groups))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for number, stage in enumerate(weights["stages"]):
            for index, p in enumerate(stage):
                x = block(x, p, 2 if number and not index else 1)
        logits = (x.mean((1, 2)) @ cast(weights["head"], dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def bottleneck(before: int, inside: int) -> dict[str, Any]:
        p = {
            "reduce": leaf(1, 1, before, inside),
            "spatial": leaf(3, 3, inside, inside),
            "expand": leaf(1, 1, inside, 4 * inside),
            "norm1": leaf(inside),
            "norm2": leaf(inside),
            "norm3": leaf(4 * inside),
        }
        return p if before == 4 * inside else p | {"shortcut": leaf(1, 1, before, 4 * inside)}

    stages, before = [], channels
    for number, depth in enumerate(blocks):
        inside = channels * 2**number
        stages.append([bottleneck(before if not index else 4 * inside, inside) for index in range(depth)])
        before = 4 * inside
    weights = {
        "stem": leaf(7, 7, 3, channels),
        "norm": leaf(channels),
        "stages": stages,
        "head": leaf(before, classes),
    }
    return _train_step(loss, weights, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32), params=params)


def unet(
    depth: int = 2,
    channels: int = 64,
    batch: int = 256,
    side: int = 128,
    groups: int = 8,
    resizes: bool = False,
    dtype: Any = BF16,
    params: Any = F32,
) -> Program:
    """A U-Net (arXiv 1505.04597): halved with strides, doubled with transposed convolutions or by resizing, skips concatenated."""

    def double(x: jax.Array, p: Any) -> jax.Array:
        x = jax.nn.silu(_channel_norm(_conv(x, p["first"]), p["norm1"], groups))
        return jax.nn.silu(_channel_norm(_conv(x, p["second"]), p["norm2"], groups))

    def upwards(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if resizes:
            n, height, width, c = x.shape
            return _conv(jax.image.resize(x, (n, 2 * height, 2 * width, c), "nearest"), kernel)
        return jax.lax.conv_transpose(x, cast(kernel, x.dtype), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(weights: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
        x, skips = images, []
        for level in weights["down"]:
            x = double(x, level)
            skips.append(x)
            x = _conv(x, level["halve"], 2)
        x = double(x, weights["middle"])
        for level, skip in zip(weights["up"], reversed(skips), strict=True):
            x = double(jnp.concatenate([upwards(x, level["twice"]), skip], axis=-1), level)
        return ((_conv(x, weights["head"]) - targets).astype(jnp.float32) ** 2).mean()

    def pair(before: int, after: int) -> dict[str, Any]:
        return {
            "first": leaf(3, 3, before, after),
            "second": leaf(3, 3, after, after),
            "norm1": leaf(after),
            "norm2": leaf(after),
        }

    widths = [channels * 2**level for level in range(depth + 1)]
    weights = {
        "down": [
            pair(3 if not level else widths[level - 1], widths[level]) | {"halve": leaf(3, 3, widths[level], widths[level])}
            for level in range(depth)
        ],
        "middle": pair(widths[depth - 1], widths[depth]),
        "up": [
            pair(2 * widths[level], widths[level]) | {"twice": leaf(3, 3, widths[level + 1], widths[level])}
            for level in reversed(range(depth))
        ],
        "head": leaf(1, 1, channels, 3),
    }
    images = leaf(batch, side, side, 3, dtype=dtype)
    return _train_step(loss, weights, images, images, params=params)


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, cast(kernel, x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _channel_norm(x: jax.Array, scale: jax.Array, groups: int) -> jax.Array:
    """Normalised over the batch and all pixels, or for each image over its pixels and each group of channels."""
    n, height, width, channels = x.shape
    grouped = x.reshape(n, height, width, groups or channels, -1).astype(jnp.float32)
    dims = (1, 2, 4) if groups else (0, 1, 2)
    centred = grouped - grouped.mean(dims, keepdims=True)
    centred = centred * jax.lax.rsqrt((centred**2).mean(dims, keepdims=True) + 1e-5)
    return centred.reshape(x.shape).astype(x.dtype) * (1 + cast(scale, x.dtype))


# --- recurrence --------------------------------------------------------------------------------------------------------


def lstm(
    layers: int = 2,
    width: int = 1024,
    vocabulary: int = 8192,
    batch: int = 512,
    length: int = 256,
    dtype: Any = BF16,
    params: Any = F32,
) -> Program:
    """A recurrent language model: each layer scans over time, time first."""

    def cell(p: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = carry
        gates = jnp.einsum("bd,dgw->bgw", x, p["input"]) + jnp.einsum("bd,dgw->bgw", hidden, p["hidden"]) + p["bias"]
        keep, take, give, new = (gates[:, k] for k in range(4))
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(memory)
        return (hidden, memory), hidden

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = cast(weights["embed"], dtype)[tokens]
        for layer in weights["layers"]:
            p = cast(layer, dtype)
            zero = jnp.zeros(x.shape[1:], dtype)
            _, x = jax.lax.scan(partial(cell, p), (zero, zero), x)
        logits = (x @ cast(weights["head"], dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    each = {
        "input": leaf(width, 4, width),
        "hidden": leaf(width, 4, width),
        "bias": leaf(4, width),
    }
    weights = {
        "embed": leaf(vocabulary, width),
        "layers": [dict(each) for _ in range(layers)],
        "head": leaf(width, vocabulary),
    }
    tokens = leaf(length, batch, dtype=jnp.int32)
    return _train_step(loss, weights, tokens, tokens, params=params)


# --- all of them -------------------------------------------------------------------------------------------------------

_TOKENS = {"batch*": P("data"), "state*['embed']": P("model")}
_HEAD = {"state*['head']": P(None, "model")}
_ATTENTION = {"state*['qkv']": P(None, None, "model"), "state*['out']": P("model")}
_READ = {f"state*['{name}']": P(None, "model") for name in ("query", "key", "value")} | {"state*['out']": P("model")}
_DENSE = {"state*['up']": P(None, "model"), "state*['down']": P("model")}

GPT = _ATTENTION | _DENSE
LLAMA = _READ | _DENSE | {"state*['gate']": P(None, "model")}
MOE = _ATTENTION | {"state*['up']": P("model"), "state*['down']": P("model")}
T5 = _READ | _DENSE
VIT = _READ | _DENSE | {"state*['bias']": P("model")}
UNET = {
    "batch*": P("data"),
    "state*['first']": P(None, None, None, "model"),
    "state*['norm1']": P("model"),
    "state*['second']": P(None, None, "model"),
}
RESNET = {
    "batch*": P("data"),
    "state*['spatial']": P(None, None, None, "model"),
    "state*['norm2']": P("model"),
    "state*['expand']": P(None, None, "model"),
    "state*['head']": P(None, "model"),
}


def stacked(layer: Mapping[str, P], scan: bool = True) -> dict[str, P]:
    """The specs of a layer's weights where layers are scanned, or not."""
    return {path: P(None, *spec) if scan else spec for path, spec in layer.items()}


def language(layer: Mapping[str, P], scan: bool = False, tied: bool = True) -> dict[str, P]:
    """The specs of a language model by those of a layer's weights (`GPT`, `LLAMA`, `MOE`, `T5`)."""
    return _TOKENS | stacked(layer, scan) | ({} if tied else _HEAD)


_LLAMA_SIZES: dict[str, Any] = {"width": 2048, "heads": 16, "kv_heads": 4, "ffn": 7168, "vocabulary": 32_768, "batch": 32}
_GPT_125M: dict[str, Any] = {"width": 768, "heads": 12, "vocabulary": 50_304, "batch": 32}
_GPT_1_3B: dict[str, Any] = {"width": 2048, "heads": 16, "vocabulary": 50_304, "batch": 32}

MODELS: dict[str, Model] = {
    "gpt": Model(partial(gpt, layers=2, batch=64), language(GPT)),
    "gpt_one_hot": Model(partial(gpt, layers=2, batch=64, gathers=False), language(GPT)),
    "gpt_untied": Model(partial(gpt, layers=2, batch=64, tied=False), language(GPT, tied=False)),
    "gpt_f32": Model(partial(gpt, layers=2, batch=32, dtype=F32), language(GPT)),
    "gpt_bf16": Model(partial(gpt, layers=2, batch=64, params=BF16), language(GPT)),
    "gpt_remat": Model(partial(gpt, layers=3, batch=64, remat=True), language(GPT)),
    "gpt_scan": Model(gpt_scan, language(GPT, scan=True)),
    "gpt_scan_one_hot": Model(partial(gpt_scan, gathers=False), language(GPT, scan=True)),
    "gpt_scan_remat": Model(partial(gpt_scan, remat=True), language(GPT, scan=True)),
    "gpt_125m": Model(partial(gpt, layers=2, **_GPT_125M), language(GPT)),
    "gpt_125m_scan": Model(partial(gpt_scan, layers=4, **_GPT_125M), language(GPT, scan=True)),
    "gpt_1_3b": Model(partial(gpt, layers=2, **_GPT_1_3B), language(GPT)),
    "gpt_1_3b_scan": Model(partial(gpt_scan, layers=4, **_GPT_1_3B), language(GPT, scan=True)),
    "llama": Model(partial(llama, **_LLAMA_SIZES), language(LLAMA, tied=False)),
    "llama_scan": Model(partial(llama, layers=4, **_LLAMA_SIZES, scan=True), language(LLAMA, scan=True, tied=False)),
    "moe": Model(moe, language(MOE)),
    "moe_sorted": Model(partial(moe, sorts=True), language(MOE)),
    "moe_scan": Model(partial(moe, layers=4, scan=True), language(MOE, scan=True)),
    "t5": Model(encoder_decoder, language(T5) | {"state*['relative']": P(None, "model")}),
    "vit": Model(partial(vit, layers=4, batch=512), {"batch*": P("data")} | VIT),
    "mlp": Model(mlp, {"batch*": P("data"), "state*['up']": P(None, "model"), "state*['inner']": P("model"), "state*['down']": P("model")}),
    "dlrm": Model(partial(dlrm, rows=1_000_000), {"batch*": P("data"), "state*['tables']*": P("model")}),
    "resnet": Model(resnet, RESNET),
    "resnet_50": Model(partial(resnet, blocks=(3, 4, 6, 3), batch=256), RESNET),
    "unet": Model(unet, UNET),
    "unet_resize": Model(partial(unet, resizes=True), UNET),
    "lstm": Model(
        lstm,
        {
            "batch*": P(None, "data"),
            "state*['input']": P(None, None, "model"),
            "state*['hidden']": P(None, None, "model"),
            "state*['bias']": P(None, "model"),
            "state*['embed']": P("model"),
            "state*['head']": P(None, "model"),
        },
    ),
}
"""By name; called without sizes each is of at least a gigabyte a device."""
