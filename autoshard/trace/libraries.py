"""Libraries of accelerators that JAX asks for while it traces, on machines that have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

CUDNN = 91100
"""The release of cuDNN that is assumed where there is none, 9.11: the first with what JAX asks releases for."""


@contextmanager
def assumed() -> Iterator[None]:
    """cuDNN counts as installed: `jax.nn.dot_product_attention(implementation="cudnn")` asks for its release, and traces without it.

    JAX 0.10 to 0.12 has no public way to say so; without the function that asks, nothing is assumed.
    """
    try:
        asking = import_module("jax._src.cudnn.fused_attention_stablehlo")
        missing = asking.cuda_versions is None and callable(asking.check_cudnn_version)
    except (ImportError, AttributeError):
        missing = False
    if not missing:
        yield
        return
    with mock.patch.object(asking, "check_cudnn_version", lambda: CUDNN):
        yield
