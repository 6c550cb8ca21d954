"""Train steps (AdamW) in plain JAX with abstract arguments: nothing is allocated.

Parameters and optimizer state are float32, activations bfloat16: each layer casts its weights where it uses them, so that gradients come
back as float32, and losses are float32. ``dtype`` is that of activations, ``params`` that of the state (`benchmarks.single_dtype` has both
alike). Language models are unrolled or scanned, with or without ``remat``; ``tied`` says whether the embedding also makes the logits,
``gathers`` whether the loss gathers the targets' logits or compares an iota with the targets.

Default sizes hold more than a gigabyte a device under data parallelism on eight devices, with few layers: they compile fast.
`MODELS` names them all, each with the tensor parallelism that experts write by hand; `benchmarks.models.published` has models of published
sizes by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec as P

from benchmarks.models.convolutions import resnet, unet
from benchmarks.models.dense import dlrm, mlp
from benchmarks.models.encoders import bert, encoder_decoder, vit
from benchmarks.models.language import gpt, gpt_scan, llama, moe
from benchmarks.models.recurrence import lstm
from benchmarks.models.step import BF16, F32, Model, Program, cast, leaf

__all__ = ["BF16", "F32", "MODELS", "Model", "Program", "cast", "leaf"]
__all__ += ["bert", "dlrm", "encoder_decoder", "gpt", "gpt_scan", "llama", "lstm", "mlp", "moe", "resnet", "unet", "vit"]

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
