"""The programs whose predictions are held against compilers: `benchmarks.models` in mixed precision, in every form, at middling sizes.

They are wide enough that sharding pays, and of few layers: most compile in seconds up to where memory is assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from benchmarks.models import BF16, F32, Program, dlrm, encoder_decoder, gpt, llama, lstm, mlp, moe, resnet, unet, vit

SCANNED: dict[str, Any] = {"layers": 4, "scan": True}
FORMS: dict[str, dict[str, Any]] = {"": {}, "_scan": SCANNED, "_scan_remat": SCANNED | {"remat": True}}
EMBEDDINGS = {"tied": {"tied": True}, "untied": {"tied": False}}
LOSSES = {"": {}, "_one_hot": {"gathers": False}}

GPT: dict[str, Any] = {"layers": 2, "width": 1024, "heads": 16, "vocabulary": 16_384, "batch": 64, "length": 512}
GPT_125M = GPT | {"width": 768, "heads": 12, "vocabulary": 50_304, "batch": 32, "length": 1024}
GPT_1_3B = GPT | {"width": 2048, "vocabulary": 50_304, "batch": 32}
LLAMA: dict[str, Any] = GPT | {"heads": 8, "kv_heads": 4, "ffn": 2816, "remat": False}
MOE: dict[str, Any] = GPT | {"width": 512, "heads": 8, "experts": 8, "length": 256}
T5: dict[str, Any] = GPT | {"width": 512, "heads": 8, "length": 256}
VIT: dict[str, Any] = {"layers": 2, "width": 768, "heads": 12, "batch": 256}
RESNET: dict[str, Any] = {"batch": 256, "side": 64}


def _forms(name: str, make: Callable[..., Program], sizes: dict[str, Any]) -> dict[str, Callable[..., Program]]:
    """A model unrolled, scanned, and scanned with its layers computed again."""
    return {f"{name}{form}": partial(make, **sizes | options) for form, options in FORMS.items()}


def _language(name: str, make: Callable[..., Program], sizes: dict[str, Any], *variants: str) -> dict[str, Callable[..., Program]]:
    """A language model in every form, with the embeddings and losses that are named."""
    every = {f"{e}{kind}": embedding | loss for (e, embedding), (kind, loss) in product(EMBEDDINGS.items(), LOSSES.items())}
    found = {}
    for variant in variants or tuple(every):
        found |= _forms(f"{name}_{variant}", make, sizes | every[variant])
    return found


PROGRAMS: dict[str, Callable[..., Program]] = {
    **_language("gpt", gpt, GPT),
    "gpt_remat": partial(gpt, **GPT, remat=True),
    "gpt_bf16": partial(gpt, **GPT, params=BF16),
    "gpt_f32": partial(gpt, **GPT | {"dtype": F32}),
    "gpt_125m": partial(gpt, **GPT_125M),
    "gpt_125m_scan": partial(gpt, **GPT_125M | SCANNED),
    "gpt_1_3b": partial(gpt, **GPT_1_3B),
    "gpt_1_3b_scan": partial(gpt, **GPT_1_3B | SCANNED),
    **_language("llama", llama, LLAMA, "untied", "tied_one_hot"),
    **_language("moe", moe, MOE, "tied", "untied_one_hot"),
    **_language("moe_sorted", partial(moe, sorts=True), MOE, "tied"),
    **_language("t5", encoder_decoder, T5, "tied", "untied_one_hot"),
    **_forms("vit", vit, VIT),
    "mlp": partial(mlp, width=2048, hidden=8192),
    "dlrm": dlrm,
    "resnet": partial(resnet, **RESNET),
    "resnet_groups": partial(resnet, **RESNET, groups=8),
    "unet": partial(unet, batch=128, side=64),
    "unet_resize": partial(unet, batch=128, side=64, resizes=True),
    "lstm": partial(lstm, width=512, batch=256, length=128),
}
"""By name; called with a ``dtype`` where a compiler computes in another."""

QUICK = (
    "gpt_tied",
    "gpt_tied_scan_remat",
    "gpt_untied_one_hot",
    "gpt_125m",
    "llama_untied_scan",
    "moe_tied",
    "moe_sorted_tied_scan",
    "t5_tied",
    "vit",
    "mlp",
    "dlrm",
    "lstm",
)
"""A dozen of them."""
