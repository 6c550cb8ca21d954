"""Models of compilers: one class a target, and the engine of fusion, kernel orders and buffer assignment that they share."""

from collections.abc import Iterable

from autoshard.cluster import Cluster
from autoshard.compilers.base import Compiler
from autoshard.compilers.cpu import XlaCpu
from autoshard.compilers.gpu import XlaGpu
from autoshard.compilers.tpu import XlaTpu

TARGETS: dict[str, type[Compiler]] = {"tpu": XlaTpu, "gpu": XlaGpu, "cpu": XlaCpu}
"""The compiler of each kind of device."""

PLATFORMS = frozenset({*TARGETS, "cuda", "rocm"})
"""JAX's names of platforms, as `jax.lax.platform_dependent` takes them."""


_NAMED = {"gpu": ("cuda", "rocm")}  # JAX's names of a kind of device, where they are others


def lacking(collective: str, dtype: str) -> tuple[str, ...]:
    """JAX's names of the platforms whose compiler has no such collective for an element type.

    Args:
        collective: its kind, an all_reduce by its operator: ``sum``, ``max`` or ``min``.
        dtype: the name of the element type.

    >>> lacking("reduce_scatter", "complex64"), lacking("reduce_scatter", "float32")
    (('tpu',), ())
    """
    return _platforms(kind for kind, compiler in TARGETS.items() if dtype in compiler.lacks.get(collective, ()))


def dropping_nan(dtype: str) -> tuple[str, ...]:
    """JAX's names of the platforms that leave NaN out of the largest and the least of several devices' floats.

    >>> dropping_nan("float16"), dropping_nan("int32")
    (('cpu',), ())
    """
    return _platforms(kind for kind, compiler in TARGETS.items() if dtype in compiler.drops_nan)


def _platforms(kinds: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for kind in kinds for name in _NAMED.get(kind, (kind,)))


def compiler_of(cluster: Cluster) -> Compiler:
    """The compiler of a cluster's devices.

    >>> compiler_of(Cluster.parse("v5e:2x4")).asynchronous
    ('all_gather', 'collective_permute')
    """
    return TARGETS[cluster.device.kind](cluster.device, cluster.overlap, cluster.memory_limit_bytes)
