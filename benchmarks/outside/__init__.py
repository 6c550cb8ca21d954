"""Train steps of kinds that no other model here has: what users' programs do with heads, frozen weights, states, filters and tables.

They show what compilers store beside large matrix products: ``python -m benchmarks.exactness --compile --outside`` holds their peaks
against compilers. Each is a gigabyte or more on a device and compiles in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from benchmarks.models import Program
from benchmarks.outside.filters import autoencoder, depthwise_images, depthwise_sequences, video
from benchmarks.outside.frozen import frozen_encoder, lora
from benchmarks.outside.heads import _capped, _cross_entropy, _head, _masked, _narrow_capped, _smoothed, _with_z, distilled, preferred
from benchmarks.outside.others import attention_to_neighbours, field, latents, paired, tables
from benchmarks.outside.states import linear_attention, linear_recurrence, policy

OUTSIDE: dict[str, Callable[[], Program]] = {
    "head_wide": partial(_head, _cross_entropy, wide=True),
    "head_capped": partial(_head, _capped),
    "head_capped_wide": partial(_head, _capped, wide=True),
    "head_capped_narrow": partial(_head, _narrow_capped),
    "head_z": partial(_head, _with_z),
    "head_smoothed": partial(_head, _smoothed),
    "head_masked": partial(_head, _masked),
    "distilled": distilled,
    "preferred": preferred,
    "lora": lora,
    "lora_plain": partial(lora, layers=8, remat=False),
    "lora_unrolled": partial(lora, layers=3, scan=False),
    "lora_int8": partial(lora, stored=jnp.int8),
    "frozen_encoder": frozen_encoder,
    "linear_recurrence": linear_recurrence,
    "linear_attention": linear_attention,
    "policy": policy,
    "depthwise_images": depthwise_images,
    "depthwise_sequences": depthwise_sequences,
    "video": video,
    "autoencoder": autoencoder,
    "tables": tables,
    "attention_to_neighbours": attention_to_neighbours,
    "paired": paired,
    "latents": latents,
    "field": field,
}
"""By name; called without arguments."""
