"""The models of `benchmarks.models` with parameters of the activations' dtype: bfloat16, or float32 of the recommender, unless given.

The sections of `benchmarks.cost_model` were designed and measured on these, and so were the figures that tests hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from benchmarks import models


def _single_dtype(make: Callable[..., models.Program], usual: Any = models.BF16) -> Callable[..., models.Program]:
    @wraps(make)
    def made(*sizes: Any, dtype: Any = usual, **options: Any) -> models.Program:
        return make(*sizes, dtype=dtype, params=dtype, **options)

    return made


gpt, gpt_scan, llama, moe, vit, encoder_decoder = map(
    _single_dtype, (models.gpt, models.gpt_scan, models.llama, models.moe, models.vit, models.encoder_decoder)
)
mlp, resnet, unet, lstm = map(_single_dtype, (models.mlp, models.resnet, models.unet, models.lstm))
dlrm = _single_dtype(models.dlrm, models.F32)
