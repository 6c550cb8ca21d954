"""Fourier transforms over several dimensions as transforms of single ones, each of which can be sharded along all other dimensions.

The call of these is found again by its name (`transform_of`), since a program in which none is sharded has one kernel for all dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.trace.structure import as_call, opened, subjaxprs

_NAME = "fft by dimension"  # no name of a Python function
_LAST = {lax.FftType.RFFT: lax.FftType.FFT, lax.FftType.IRFFT: lax.FftType.IFFT}
"""The transform of the other dimensions, where that of the last one is from or to real numbers."""


def by_dimension(eqn: JaxprEqn) -> JaxprEqn:
    """The call of the transforms of single dimensions that make up one of several; any other equation as it is.

    The last dimension is transformed first, or last where its result is real.
    """
    if eqn.primitive.name != "fft" or len(eqn.params["fft_lengths"]) < 2:
        return eqn
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]

    def transformed(x: Any) -> Any:
        first = x.ndim - len(lengths)
        order = [*range(x.ndim)]  # the dimension at each place

        def placed(x: Any, wanted: Sequence[int]) -> Any:
            places = [order.index(d) for d in wanted]
            order[:] = wanted
            return x if places == [*range(x.ndim)] else lax.transpose(x, places)

        others = [*range(first, x.ndim - 1)]
        for d in [*others, x.ndim - 1] if kind == lax.FftType.IRFFT else [x.ndim - 1, *reversed(others)]:
            x = placed(x, [*(other for other in order if other != d), d])
            x = lax.fft_p.bind(x, fft_type=kind if d == x.ndim - 1 else _LAST.get(kind, kind), fft_lengths=(lengths[d - first],))
        return placed(x, range(x.ndim))

    transformed.__name__ = _NAME
    return as_call(eqn, transformed, eqn.invars)


def transform_of(eqn: JaxprEqn) -> tuple[lax.FftType, tuple[int, ...]] | None:
    """The kind and lengths of the transform whose single dimensions this call transforms; None for any other equation."""
    if eqn.primitive.name != "jit" or eqn.params["name"] != _NAME:
        return None
    steps = [each.params for each in opened(subjaxprs(eqn)[0])[0].eqns if each.primitive.name == "fft"]
    lengths = tuple(math.prod(step["fft_lengths"]) for step in steps)
    if steps[-1]["fft_type"] == lax.FftType.IRFFT:
        return lax.FftType.IRFFT, lengths
    return steps[0]["fft_type"], lengths[::-1]
