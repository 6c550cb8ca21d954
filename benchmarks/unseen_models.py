"""Train steps that nothing was designed on: the cost model meets them only where it is measured.

A vision transformer (arXiv 2010.11929), an encoder and decoder with a shared bias and tied embeddings (T5, arXiv 1910.10683), a
recommender with embedding tables (DLRM, arXiv 1906.00091), a generative adversarial network (DCGAN, arXiv 1511.06434), and forms of Llama
and GPT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import BF16, Program, leaf
from benchmarks.models.convolutions import _conv
from benchmarks.models.step import _train_step
from benchmarks.single_dtype import dlrm, encoder_decoder, gpt, gpt_scan, llama, vit


def gan(channels: int = 64, noise: int = 128, batch: int = 512, dtype: Any = BF16) -> Program:
    """A generator of transposed convolutions and a critic of strided ones, trained in one step."""
    widths = [8 * channels, 4 * channels, 2 * channels, channels, 3]

    def made(params: Any, z: jax.Array) -> jax.Array:
        x = jax.nn.relu(z @ params["seed"]).reshape(batch, 4, 4, widths[0])
        for number, kernel in enumerate(params["generator"]):
            x = jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.tanh(x) if number + 1 == len(params["generator"]) else jax.nn.relu(x)
        return x

    def judged(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params["critic"]:
            x = jax.nn.leaky_relu(_conv(x, kernel, 2), 0.2)
        return (x.reshape(batch, -1) @ params["verdict"]).astype(jnp.float32)[:, 0]

    def loss(params: Any, z: jax.Array, real: jax.Array) -> jax.Array:
        return jax.nn.softplus(-judged(params, made(params, z))).mean() + jax.nn.softplus(judged(params, real)).mean()

    params = {
        "seed": leaf(noise, 16 * widths[0], dtype=dtype),
        "generator": [leaf(4, 4, before, after, dtype=dtype) for before, after in pairwise(widths)],
        "critic": [leaf(4, 4, before, after, dtype=dtype) for before, after in pairwise(widths[::-1])],
        "verdict": leaf(16 * widths[0], 1, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, noise, dtype=dtype), leaf(batch, 64, 64, 3, dtype=dtype))


UNSEEN: dict[str, Callable[[], Program]] = {
    "vit": vit,
    "vit, float32": partial(vit, dtype=jnp.float32),
    "encoder-decoder": encoder_decoder,
    "encoder-decoder, float32": partial(encoder_decoder, dtype=jnp.float32),
    "dlrm, float32": dlrm,
    "gan": gan,
    "llama": partial(llama, 2, 2048, 16, 4, 7168, 32_768, batch=32),
    "gpt, float32": partial(gpt, 2, batch=32, dtype=jnp.float32),
    "gpt scanned, float32": partial(gpt_scan, batch=32, dtype=jnp.float32),
}
