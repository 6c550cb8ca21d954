"""Train steps (AdamW) in plain JAX with abstract arguments: nothing is allocated.

Default sizes hold more than a gigabyte a device under data parallelism on eight devices, with few layers: they compile fast.
`MODELS` names them all, each with the tensor parallelism that experts write by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

BF16 = jnp.bfloat16

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


def _train_step(loss: Callable, params: Any, *batch: jax.ShapeDtypeStruct) -> Program:
    optimizer = optax.adamw(1e-3)
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}

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
    gathers: bool = True,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """A decoder-only transformer, unrolled; its loss gathers the targets' logits unless it compares with all of them.

    Args:
        stream: where the residual stream is constrained to lie between sublayers, if anywhere.
    """
    block = partial(_block, stream=stream)
    block = jax.checkpoint(block) if remat else block

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(params["embed"][tokens] + params["position"], stream)
        for layer in params["layers"]:
            x = block(x, layer)
        return _next_token(x, params, targets, gathers)

    each = _attention_params(width, heads, dtype) | _dense_params(width, dtype)
    params = _language(vocabulary, length, width, [dict(each) for _ in range(layers)], dtype)
    return _train_step(loss, params, *_tokens(batch, length))


def gpt_scan(
    layers: int = 8,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_768,
    batch: int = 64,
    length: int = 1024,
    dtype: Any = BF16,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """The same transformer with its layers stacked and scanned; with ``remat`` the backward pass computes each again."""
    block = partial(_block, stream=stream)
    block = jax.checkpoint(block) if remat else block

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(params["embed"][tokens] + params["position"], stream)
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
        return _next_token(x, params, targets)

    each = _attention_params(width, heads, dtype) | _dense_params(width, dtype)
    stacked = {name: leaf(layers, *one.shape, dtype=dtype) for name, one in each.items()}
    return _train_step(loss, _language(vocabulary, length, width, stacked, dtype), *_tokens(batch, length))


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
    scan: bool = False,
    remat: bool = True,
    stream: P | None = None,
) -> Program:
    """A Llama-3 decoder (arXiv 2407.21783; sizes of the 8B): grouped queries, rotary positions, gated feed-forward, untied head.

    Args:
        scan: whether the layers are stacked and scanned instead of unrolled.
        remat: whether the backward pass computes each layer again.
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

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(params["embed"][tokens], stream)
        once = jax.checkpoint(block) if remat else block
        if scan:
            x, _ = jax.lax.scan(lambda x, layer: (once(x, layer), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = once(x, layer)
        logits = (_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    each = {
        "norm1": (width,),
        "query": (width, heads, head),
        "key": (width, kv_heads, head),
        "value": (width, kv_heads, head),
        "out": (heads, head, width),
        "norm2": (width,),
        "gate": (width, ffn),
        "up": (width, ffn),
        "down": (ffn, width),
    }
    if scan:
        stack: Any = {name: leaf(layers, *shape, dtype=dtype) for name, shape in each.items()}
    else:
        stack = [{name: leaf(*shape, dtype=dtype) for name, shape in each.items()} for _ in range(layers)]
    params = {
        "embed": leaf(vocabulary, width, dtype=dtype),
        "layers": stack,
        "norm": leaf(width, dtype=dtype),
        "head": leaf(width, vocabulary, dtype=dtype),
    }
    return _train_step(loss, params, *_tokens(batch, length))


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
    sorts: bool = False,
    stream: P | None = None,
) -> Program:
    """A transformer whose dense layers are mixtures of experts: one expert a token.

    Args:
        room: tokens that an expert takes of each sequence, in shares of an even split; those beyond are dropped.
        sorts: whether tokens are sorted by expert and gathered, rather than dispatched by one-hot products (GShard, arXiv 2006.16668).
        stream: as of `gpt`.
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

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(params["embed"][tokens] + params["position"], stream)
        for layer in params["layers"]:
            x = _lying(_attention(x, layer), stream)
            x = _lying(x + mixture(_norm(x, layer["norm2"]), layer), stream)
        return _next_token(x, params, targets)

    each = _attention_params(width, heads, dtype) | {
        "norm2": leaf(width, dtype=dtype),
        "router": leaf(width, experts, dtype=dtype),
        "up": leaf(experts, width, 4 * width, dtype=dtype),
        "down": leaf(experts, 4 * width, width, dtype=dtype),
    }
    params = _language(vocabulary, length, width, [dict(each) for _ in range(layers)], dtype)
    return _train_step(loss, params, *_tokens(batch, length))


def _tokens(batch: int, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return leaf(batch, length, dtype=jnp.int32), leaf(batch, length, dtype=jnp.int32)


def _language(vocabulary: int, length: int, width: int, layers: Any, dtype: Any) -> dict[str, Any]:
    return {
        "embed": leaf(vocabulary, width, dtype=dtype),
        "position": leaf(length, width, dtype=dtype),
        "layers": layers,
        "norm": leaf(width, dtype=dtype),
    }


def _attention_params(width: int, heads: int, dtype: Any) -> dict[str, Any]:
    head = width // heads
    return {
        "norm1": leaf(width, dtype=dtype),
        "qkv": leaf(width, 3, heads, head, dtype=dtype),
        "out": leaf(heads, head, width, dtype=dtype),
    }


def _dense_params(width: int, dtype: Any) -> dict[str, Any]:
    return {
        "norm2": leaf(width, dtype=dtype),
        "up": leaf(width, 4 * width, dtype=dtype),
        "down": leaf(4 * width, width, dtype=dtype),
    }


def _next_token(x: jax.Array, params: Any, targets: jax.Array, gathers: bool = True) -> jax.Array:
    logits = (_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
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


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def mlp(layers: int = 4, width: int = 4096, hidden: int = 16_384, batch: int = 16_384, dtype: Any = BF16) -> Program:
    """A residual network of dense layers: regression on vectors."""

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for p in params:
            x = x + jax.nn.gelu(x @ p["up"] + p["inner"]) @ p["down"] + p["outer"]
        return ((x - targets).astype(jnp.float32) ** 2).mean()

    each = {
        "up": leaf(width, hidden, dtype=dtype),
        "inner": leaf(hidden, dtype=dtype),
        "down": leaf(hidden, width, dtype=dtype),
        "outer": leaf(width, dtype=dtype),
    }
    return _train_step(loss, [dict(each) for _ in range(layers)], leaf(batch, width, dtype=dtype), leaf(batch, width, dtype=dtype))


# --- convolutions ------------------------------------------------------------------------------------------------------


def resnet(
    blocks: tuple[int, ...] = (1, 1, 1, 1),
    channels: int = 64,
    classes: int = 1024,
    batch: int = 1024,
    side: int = 224,
    groups: int = 0,
    dtype: Any = BF16,
) -> Program:
    """A residual network of bottlenecks (arXiv 1512.03385); norms are over the batch, or over so many groups of channels."""

    def block(x: jax.Array, p: Any, stride: int) -> jax.Array:
        y = jax.nn.relu(_channel_norm(_conv(x, p["reduce"]), p["norm1"], groups))
        y = jax.nn.relu(_channel_norm(_conv(y, p["spatial"], stride), p["norm2"], groups))
        y = _channel_norm(_conv(y, p["expand"]), p["norm3"], groups)
        return jax.nn.relu(y + (_conv(x, p["shortcut"], stride) if "shortcut" in p else x))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(_channel_norm(_conv(images, params["stem"], 2), params["norm"], groups))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for number, stage in enumerate(params["stages"]):
            for index, p in enumerate(stage):
                x = block(x, p, 2 if number and not index else 1)
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def bottleneck(before: int, inside: int) -> dict[str, Any]:
        p = {
            "reduce": leaf(1, 1, before, inside, dtype=dtype),
            "spatial": leaf(3, 3, inside, inside, dtype=dtype),
            "expand": leaf(1, 1, inside, 4 * inside, dtype=dtype),
            "norm1": leaf(inside, dtype=dtype),
            "norm2": leaf(inside, dtype=dtype),
            "norm3": leaf(4 * inside, dtype=dtype),
        }
        return p if before == 4 * inside else p | {"shortcut": leaf(1, 1, before, 4 * inside, dtype=dtype)}

    stages, before = [], channels
    for number, depth in enumerate(blocks):
        inside = channels * 2**number
        stages.append([bottleneck(before if not index else 4 * inside, inside) for index in range(depth)])
        before = 4 * inside
    params = {
        "stem": leaf(7, 7, 3, channels, dtype=dtype),
        "norm": leaf(channels, dtype=dtype),
        "stages": stages,
        "head": leaf(before, classes, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32))


def unet(
    depth: int = 2, channels: int = 64, batch: int = 256, side: int = 128, groups: int = 8, resizes: bool = False, dtype: Any = BF16
) -> Program:
    """A U-Net (arXiv 1505.04597): halved with strides, doubled with transposed convolutions or by resizing, skips concatenated."""

    def double(x: jax.Array, p: Any) -> jax.Array:
        x = jax.nn.silu(_channel_norm(_conv(x, p["first"]), p["norm1"], groups))
        return jax.nn.silu(_channel_norm(_conv(x, p["second"]), p["norm2"], groups))

    def upwards(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if resizes:
            n, height, width, c = x.shape
            return _conv(jax.image.resize(x, (n, 2 * height, 2 * width, c), "nearest"), kernel)
        return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
        x, skips = images, []
        for level in params["down"]:
            x = double(x, level)
            skips.append(x)
            x = _conv(x, level["halve"], 2)
        x = double(x, params["middle"])
        for level, skip in zip(params["up"], reversed(skips), strict=True):
            x = double(jnp.concatenate([upwards(x, level["twice"]), skip], axis=-1), level)
        return ((_conv(x, params["head"]) - targets).astype(jnp.float32) ** 2).mean()

    def pair(before: int, after: int) -> dict[str, Any]:
        return {
            "first": leaf(3, 3, before, after, dtype=dtype),
            "second": leaf(3, 3, after, after, dtype=dtype),
            "norm1": leaf(after, dtype=dtype),
            "norm2": leaf(after, dtype=dtype),
        }

    widths = [channels * 2**level for level in range(depth + 1)]
    params = {
        "down": [
            pair(3 if not level else widths[level - 1], widths[level]) | {"halve": leaf(3, 3, widths[level], widths[level], dtype=dtype)}
            for level in range(depth)
        ],
        "middle": pair(widths[depth - 1], widths[depth]),
        "up": [
            pair(2 * widths[level], widths[level]) | {"twice": leaf(3, 3, widths[level + 1], widths[level], dtype=dtype)}
            for level in reversed(range(depth))
        ],
        "head": leaf(1, 1, channels, 3, dtype=dtype),
    }
    images = leaf(batch, side, side, 3, dtype=dtype)
    return _train_step(loss, params, images, images)


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _channel_norm(x: jax.Array, scale: jax.Array, groups: int) -> jax.Array:
    """Normalised over the batch and all pixels, or for each image over its pixels and each group of channels."""
    n, height, width, channels = x.shape
    grouped = x.reshape(n, height, width, groups or channels, -1).astype(jnp.float32)
    dims = (1, 2, 4) if groups else (0, 1, 2)
    centred = grouped - grouped.mean(dims, keepdims=True)
    centred = centred * jax.lax.rsqrt((centred**2).mean(dims, keepdims=True) + 1e-5)
    return centred.reshape(x.shape).astype(x.dtype) * (1 + scale)


# --- recurrence --------------------------------------------------------------------------------------------------------


def lstm(layers: int = 2, width: int = 1024, vocabulary: int = 8192, batch: int = 512, length: int = 256, dtype: Any = BF16) -> Program:
    """A recurrent language model: each layer scans over time, time first."""

    def cell(p: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = carry
        gates = jnp.einsum("bd,dgw->bgw", x, p["input"]) + jnp.einsum("bd,dgw->bgw", hidden, p["hidden"]) + p["bias"]
        keep, take, give, new = (gates[:, k] for k in range(4))
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(memory)
        return (hidden, memory), hidden

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for p in params["layers"]:
            zero = jnp.zeros(x.shape[1:], dtype)
            _, x = jax.lax.scan(partial(cell, p), (zero, zero), x)
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    each = {
        "input": leaf(width, 4, width, dtype=dtype),
        "hidden": leaf(width, 4, width, dtype=dtype),
        "bias": leaf(4, width, dtype=dtype),
    }
    params = {
        "embed": leaf(vocabulary, width, dtype=dtype),
        "layers": [dict(each) for _ in range(layers)],
        "head": leaf(width, vocabulary, dtype=dtype),
    }
    tokens = leaf(length, batch, dtype=jnp.int32)
    return _train_step(loss, params, tokens, tokens)


# --- all of them -------------------------------------------------------------------------------------------------------

_ATTENTION = {"state*['qkv']": P(None, None, "model"), "state*['out']": P("model")}
_DENSE = {"state*['up']": P(None, "model"), "state*['down']": P("model")}
_TOKENS = {"batch*": P("data"), "state*['embed']": P("model")}


def _stacked(specs: Mapping[str, P]) -> dict[str, P]:
    return {path: P(None, *spec) for path, spec in specs.items()}


_LLAMA_HEAD = {"state*['head']": P(None, "model")}
_LLAMA_LAYER = {
    "state*['query']": P(None, "model"),
    "state*['key']": P(None, "model"),
    "state*['value']": P(None, "model"),
    "state*['out']": P("model"),
    "state*['gate']": P(None, "model"),
    "state*['up']": P(None, "model"),
    "state*['down']": P("model"),
}

_LLAMA = _LLAMA_LAYER | _LLAMA_HEAD
_GPT = _TOKENS | _ATTENTION | _DENSE
_GPT_SCAN = _TOKENS | _stacked(_ATTENTION | _DENSE)
_MOE = _TOKENS | _ATTENTION | {"state*['up']": P("model"), "state*['down']": P("model")}

MODELS: dict[str, Model] = {
    "gpt": Model(partial(gpt, 2, batch=64), _GPT),
    "gpt_one_hot": Model(partial(gpt, 2, batch=64, gathers=False), _GPT),
    "gpt_f32": Model(partial(gpt, 2, batch=32, dtype=jnp.float32), _GPT),
    "gpt_remat": Model(partial(gpt, 3, batch=64, remat=True), _GPT),
    "gpt_scan": Model(gpt_scan, _GPT_SCAN),
    "gpt_scan_remat": Model(partial(gpt_scan, remat=True), _GPT_SCAN),
    "llama": Model(partial(llama, 2, 2048, 16, 4, 7168, 32_768, batch=32), _TOKENS | _LLAMA),
    "llama_scan": Model(partial(llama, 4, 2048, 16, 4, 7168, 32_768, batch=32, scan=True), _TOKENS | _stacked(_LLAMA_LAYER) | _LLAMA_HEAD),
    "moe": Model(moe, _MOE),
    "moe_sorted": Model(partial(moe, sorts=True), _MOE),
    "mlp": Model(
        mlp, {"batch*": P("data"), "state*['up']": P(None, "model"), "state*['inner']": P("model"), "state*['down']": P("model")}
    ),
    "resnet": Model(
        resnet,
        {
            "batch*": P("data"),
            "state*['spatial']": P(None, None, None, "model"),
            "state*['norm2']": P("model"),
            "state*['expand']": P(None, None, "model"),
            "state*['head']": P(None, "model"),
        },
    ),
    "unet": Model(
        unet,
        {
            "batch*": P("data"),
            "state*['first']": P(None, None, None, "model"),
            "state*['norm1']": P("model"),
            "state*['second']": P(None, None, "model"),
        },
    ),
    "unet_resize": Model(
        partial(unet, resizes=True),
        {
            "batch*": P("data"),
            "state*['first']": P(None, None, None, "model"),
            "state*['norm1']": P("model"),
            "state*['second']": P(None, None, "model"),
        },
    ),
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
