"""Attribution in words: the value a collective moves, the op it serves and the reason. No other module words attribution."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.attribution import MovedValue, Reason, ServedOp, Split
from autoshard.ir.layout import Spec

_PARTIAL = {"sum": "partial sums", "prod": "partial products", "max": "partial maxima", "min": "partial minima"}


def value_name(value: MovedValue) -> str:
    """``state['params']['w']``, ``transpose of state['params']['w']``, ``a slice of xs``, ``the result of dot_general``.

    >>> value_name(MovedValue("argument", "xs", "float32", (8,), ("transpose", "scan")))
    'transpose of a slice of xs'
    """
    kinds = {
        "argument": value.name,
        "result": f"the result of {value.name}",
        "entering": f"what enters {value.name}",
        "constant": "a constant",
        "unknown": "a value",
    }
    moves = ("a slice of " if move == "scan" else f"{move} of " for move in value.moves)
    return "".join((*moves, kinds[value.kind]))


def value_words(value: MovedValue) -> str:
    """The name with dtype and shape: ``state['params']['w'] float32[8,16]``."""
    return f"{value_name(value)} {array_type(value.dtype, value.shape)}"


def op_words(op: ServedOp) -> str:
    """The primitive and its source line, ``dot_general gpt.py:41 (loss)``; the name where only that is known."""
    return f"{op.primitive} {op.origin}" if op.primitive else op.name


def reason_words(reason: Reason, op: ServedOp, axes: Sequence[str], rank: int) -> str:
    """``kept as P('data', None), read whole: dot_general splits i=16 over 'data'``.

    Args:
        reason: the reason.
        op: the op that the collective serves.
        axes: the collective's mesh axes.
        rank: of the value that moves.

    >>> combined = Reason("combined", splits=(Split("k", 64, "contracted"),), operator="sum")
    >>> reason_words(combined, ServedOp("dot_general"), ("data",), 2)
    "dot_general splits contracted k=64 over 'data': partial sums, combined on every device"
    """
    match reason.kind:
        case "circulated":
            return "blocks circulate while others are multiplied"
        case "accumulated":
            return "partial results are added and passed on while others are computed"
        case "combined":
            return f"{_splits(reason, op, axes)}: {_PARTIAL.get(reason.operator, 'partial results')}, {_left(reason.dims)}"
        case "exchanged":
            return f"{_splits(reason, op, axes)}, and needs data of other shards"
        case "written":
            return "written in the program, inside its shard_map"
        case "read":
            reader = _splits(reason, op, axes)
        case "unruled":
            reader = f"{op.primitive} has no sharding rule"
        case "held":
            reader = f"the body of {op.primitive} keeps it in that layout"
        case "replaced":
            reader = f"the new {reason.argument} takes the sharding of the old one"
        case _:
            reader = "scan gathers it a trip ahead"
    return f"kept {_sharded(reason.before, rank)}, read {_sharded(reason.after, rank)}: {reader}"


def array_type(dtype: str, shape: Sequence[int]) -> str:
    """The type of an array as JAX writes it.

    >>> array_type("float32", (8, 16))
    'float32[8,16]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def spec_words(spec: Spec) -> str:
    """A spec as JAX writes it.

    >>> spec_words(("data", None))
    "P('data', None)"
    """
    return f"P({', '.join(map(repr, spec))})"


def _splits(reason: Reason, op: ServedOp, axes: Sequence[str]) -> str:
    """``dot_general splits contracted k=64 over 'data' and nothing over 'model'``."""
    over: dict[Split | None, list[str]] = {}
    for split, axis in zip(reason.splits, axes, strict=True):
        over.setdefault(split, []).append(repr(axis))
    return f"{op.primitive} splits " + " and ".join(f"{_split(split)} over {', '.join(names)}" for split, names in over.items())


def _split(split: Split | None) -> str:
    return "nothing" if split is None else " ".join(filter(None, (split.role, f"{split.factor}={split.size}")))


def _left(dims: Sequence[int]) -> str:
    return f"each device keeps its slice of dim {', '.join(map(str, dims))}" if dims else "combined on every device"


def _sharded(spec: Spec, rank: int) -> str:
    return f"as {spec_words((*spec, *[None] * (rank - len(spec))))}" if spec else "whole"
