"""Element types, and the collectives of each with what NumPy makes of the shards."""

from __future__ import annotations

import numpy as np

from autoshard.lower import element_types as et

N = 4
# Two-bit integers, which XLA:CPU mishandles on one device (jaxlib 0.10.2), apart.
TYPES = [
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64", "float4_e2m1fn"),
    *(f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]
MOVES = {
    "all_gather": (lambda x: et.all_gather(x, ("x",), 0), lambda each: np.broadcast_to(each.reshape(-1, 8), (N, N * 8, 8))),
    "all_to_all": (
        lambda x: et.all_to_all(x, ("x",), 0, 1),
        lambda each: np.stack([np.concatenate(parts, 1) for parts in each.reshape(N, N, 2, 8).transpose(1, 0, 2, 3)]),
    ),
    "permute": (
        lambda x: et.permute(x, ("x",), [(k, k + 1) for k in range(N - 1)]),
        lambda each: np.concatenate([np.zeros_like(each[:1]), each[:-1]]),
    ),
}
REDUCTIONS = {
    "reduce_scatter": (lambda x: et.reduce_scatter(x, ("x",), 0), lambda each: each.sum(0).reshape(N, 2, 8)),
    "sum": (lambda x: et.all_reduce(x, ("x",), "sum"), lambda each: np.broadcast_to(each.sum(0), each.shape)),
    "prod": (lambda x: et.all_reduce(x, ("x",), "prod"), lambda each: np.broadcast_to(each.prod(0), each.shape)),
    "max": (lambda x: et.all_reduce(x, ("x",), "max"), lambda each: np.broadcast_to(each.max(0), each.shape)),
    "min": (lambda x: et.all_reduce(x, ("x",), "min"), lambda each: np.broadcast_to(each.min(0), each.shape)),
}
COLLECTIVES = MOVES | REDUCTIONS


def collectives_of(name):
    """The collectives that a type has: booleans are not added up, complex numbers have no order, and powers of two no sums."""
    ordered = {"max", "min"}
    missing = {"bool": {"reduce_scatter"}, "complex64": ordered, "complex128": ordered, "float8_e8m0fnu": {"reduce_scatter", "sum"}}
    return {one: how for one, how in COLLECTIVES.items() if one not in missing.get(name, ())}
