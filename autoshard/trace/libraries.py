"""Libraries of accelerators that JAX asks for while it traces, on machines that have none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

CUDNN = 91100
"""The release of cuDNN that is assumed where there is none, 9.11: the first with what JAX asks releases for."""

TPU = "TPU v5 lite"
"""The TPU that is assumed where there is none: Pallas kernels ask for its sublanes and lanes, which TPUs of all generations share."""


@contextmanager
def assumed() -> Iterator[None]:
    """What JAX asks of libraries and devices while it traces is answered on machines that have none."""
    with _cudnn(), _tpu():
        yield


@contextmanager
def _tpu() -> Iterator[None]:
    """`pltpu.get_tpu_info` knows a TPU, as `pltpu.emit_pipeline` needs; JAX 0.10 to 0.12 fails where the default device is none."""
    modules = "jax._src.pallas.mosaic.tpu_info", "jax._src.tpu_info"  # loaded where there are kernels for TPUs; the second by JAX 0.12
    asked: list[Any] = [sys.modules[name] for name in modules if hasattr(sys.modules.get(name), "get_tpu_info")]
    try:
        info = next(each for each in asked if hasattr(each, "_get_tpu_info_impl"))
        made = None if info.is_tpu_device() else info._get_tpu_info_impl(info.chip_version_from_device_kind(TPU), 1)
    except (StopIteration, AttributeError, TypeError):
        made = None
    with ExitStack() as stack:
        for each in asked if made is not None else ():
            stack.enter_context(mock.patch.object(each, "get_tpu_info", lambda: made))
        yield


@contextmanager
def _cudnn() -> Iterator[None]:
    """cuDNN counts as installed: `jax.nn.dot_product_attention(implementation="cudnn")` asks for its release, and traces without it.

    JAX 0.10 to 0.12 has no public way to say so; without the function that asks, nothing is assumed.
    """
    try:
        asking = import_module("jax._src.cudnn.fused_attention_stablehlo")
        missing = not _is_there(asking.check_cudnn_version)
    except (ImportError, AttributeError):
        missing = False
    if not missing:
        yield
        return
    with mock.patch.object(asking, "check_cudnn_version", lambda: CUDNN):
        yield


def _is_there(version: Callable[[], int]) -> bool:
    """Whether a library tells its release; JAX's plugin for GPUs may be installed without cuDNN."""
    try:
        version()
    except RuntimeError:
        return False
    return True
