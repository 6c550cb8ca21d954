"""The schema of a predicted cost in strategy files: figures, collectives, and the reasons of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from autoshard.cost.record import Cost, Recomputation
from autoshard.ir import Collective, Mesh, MovedValue, Origin, Reason, ServedOp, Spec, Split
from autoshard.ir.attribution import REASONS, ROLES, VALUES
from autoshard.ir.collective import KINDS
from autoshard.reader import Node

MAX_RANK = 64
"""More dimensions than numpy has for an array."""

_OPTIONAL = ("recomputation", "kernel_flops", "transform_flops", "skipped_flops", "low_share", "high_share", "late_share")

_MADE = ("kind", "mesh_axes", "bytes", "count")  # fields of a compiled collective

T = TypeVar("T")


def encode_cost(cost: Cost) -> dict[str, Any]:
    """A cost, without a recomputation that is None, and kernels and transforms that it has not; collectives share lists of source lines and
    reasons."""
    parts = {field.name: getattr(cost, field.name) for field in fields(cost)}
    recomputation, origins, reasons = parts.pop("recomputation"), dict[Origin, int](), dict[Reason, int]()
    collectives = [_encode_collective(each, origins, reasons) for each in parts.pop("collectives")]
    return {
        **{name: float(value) for name, value in parts.items() if value or name not in _OPTIONAL},
        "origins": [(origin.file, origin.line, origin.function) for origin in origins],
        "reasons": [_encode_reason(reason) for reason in reasons],
        "collectives": collectives,
        **({} if recomputation is None else {"recomputation": asdict(recomputation)}),
    }


def decode_cost(node: Node, mesh: Mesh, worded: bool) -> Cost:
    """A cost; ``worded`` is for schema 1, in which the attribution of collectives is text."""
    names = [field.name for field in fields(Cost) if field.name not in _OPTIONAL]
    part = node.fields(*names, *(() if worded else ("origins", "reasons")), optional=_OPTIONAL)
    if worded:
        collectives = tuple(_worded_collective(child, mesh) for child in part.pop("collectives").items())
    else:
        origins = [_origin(child) for child in part.pop("origins").items()]
        reasons = [_reason(child, mesh) for child in part.pop("reasons").items()]
        collectives = tuple(_collective(child, mesh, origins, reasons) for child in part.pop("collectives").items())
    recomputation = part.pop("recomputation").record(Recomputation) if "recomputation" in part else None
    return Cost(**{name: child.number() for name, child in part.items()}, collectives=collectives, recomputation=recomputation)


def _encode_collective(collective: Collective, origins: dict[Origin, int], reasons: dict[Reason, int]) -> dict[str, Any]:
    """A collective, without unknown fields, and without its exposed time where all of it is exposed."""
    optional = {
        "exposed_seconds": None if collective.exposed_seconds == collective.seconds else collective.exposed_seconds,
        "value": collective.value and _encode_value(collective.value),
        "op": collective.op and _encode_op(collective.op, origins),
        "reason": collective.reason and reasons.setdefault(collective.reason, len(reasons)),
        "compiled": None if collective.compiled is None else [_made(each) for each in collective.compiled],
    }
    return {**_made(collective), "seconds": collective.seconds, **{name: part for name, part in optional.items() if part is not None}}


def _made(collective: Collective) -> dict[str, Any]:
    return {name: getattr(collective, name) for name in _MADE}


def _collective(node: Node, mesh: Mesh, origins: Sequence[Origin], reasons: Sequence[Reason]) -> Collective:
    part = node.fields(*_MADE, "seconds", optional=("exposed_seconds", "value", "op", "reason", "compiled"))
    reason = _one(part["reason"], reasons) if "reason" in part else None
    found = _costed(part, mesh)
    if reason is not None and "splits" in REASONS[reason.kind] and len(reason.splits) != len(found.mesh_axes):
        raise part["reason"].error(f"a reason with {len(found.mesh_axes)} splits, one a mesh axis")
    return replace(
        found,
        value=_value(part["value"]) if "value" in part else None,
        op=_op(part["op"], origins) if "op" in part else None,
        reason=reason,
    )


def _worded_collective(node: Node, mesh: Mesh) -> Collective:
    """A collective of schema 1; of its texts only the source is kept, as the name of its op."""
    part = node.fields(*_MADE, "seconds", "source", "tensor", "cause", optional=("exposed_seconds", "compiled"))
    return replace(_costed(part, mesh), op=ServedOp(name=part["source"].text(empty=True)))


def _costed(part: Mapping[str, Node], mesh: Mesh) -> Collective:
    """A collective without attribution: its transfer, its seconds, and its compiled form."""
    exposed = part["exposed_seconds" if "exposed_seconds" in part else "seconds"].number()
    made = tuple(_planned(each.fields(*_MADE), mesh) for each in part["compiled"].items()) if "compiled" in part else None
    return replace(_planned(part, mesh), seconds=part["seconds"].number(), exposed_seconds=exposed, compiled=made)


def _planned(part: Mapping[str, Node], mesh: Mesh) -> Collective:
    kind = part["kind"].text()
    if kind not in KINDS:
        raise part["kind"].error(f"one of {', '.join(KINDS)}")
    axes = tuple(mesh_axis(child, mesh) for child in part["mesh_axes"].items())
    return Collective(kind, axes, part["bytes"].number(), part["count"].integer(0))


def _encode_value(value: MovedValue) -> dict[str, Any]:
    moves = {"moves": value.moves} if value.moves else {}
    return {value.kind: value.name, **moves, "dtype": value.dtype, "shape": value.shape}


def _value(node: Node) -> MovedValue:
    kind = next((name for name, _ in node.members() if name in VALUES), VALUES[0])
    part = node.fields(kind, "dtype", "shape", optional=("moves",))
    moves = tuple(move.text() for move in part["moves"].items()) if "moves" in part else ()
    shape = tuple(dim.integer(0) for dim in part["shape"].items())
    return MovedValue(kind, part[kind].text(empty=True), part["dtype"].text(), shape, moves)


def _encode_op(op: ServedOp, origins: dict[Origin, int]) -> str | tuple[int, str, int]:
    """An op's number, its primitive, and the number of its source line; only its name where the op is unknown."""
    return (op.index, op.primitive, origins.setdefault(op.origin, len(origins))) if op.primitive else op.name


def _op(node: Node, origins: Sequence[Origin]) -> ServedOp:
    if isinstance(node.value, str):
        return ServedOp(name=node.text(empty=True))
    index, primitive, origin = node.items(3)
    return ServedOp(primitive.text(), index.integer(0), _one(origin, origins))


def _origin(node: Node) -> Origin:
    file, line, function = node.items(3)
    return Origin(file.text(empty=True), line.integer(0), function.text(empty=True))


def _encode_reason(reason: Reason) -> dict[str, Any]:
    """The kind and its attributes; a split is a list of its parts."""
    parts = {name: getattr(reason, name) for name in REASONS[reason.kind]}
    splits = [split and (split.factor, split.size, split.role) for split in reason.splits]
    return {"kind": reason.kind, **parts, **({"splits": splits} if "splits" in parts else {})}


def _reason(node: Node, mesh: Mesh) -> Reason:
    kind = dict(node.members()).get("kind", node).one_of(REASONS)
    part = node.fields("kind", *REASONS[kind])

    def spec(node: Node) -> Spec:
        return tuple(spec_entry(entry, mesh) for entry in node.items())

    readers: dict[str, Callable[[Node], Any]] = {
        "before": spec,
        "after": spec,
        "splits": lambda node: tuple(map(_split, node.items())),
        "operator": Node.text,
        "dims": lambda node: tuple(dim.integer(0, MAX_RANK) for dim in node.items()),
        "argument": lambda node: node.text(empty=True),
    }
    return Reason(kind, **{name: readers[name](part[name]) for name in REASONS[kind]})


def _split(node: Node) -> Split | None:
    if node.value is None:
        return None
    factor, size, role = node.items(3)
    return Split(factor.text(), size.integer(0), role.one_of(ROLES))


def spec_entry(node: Node, mesh: Mesh) -> str | tuple[str, ...] | None:
    if node.value is None:
        return None
    return tuple(mesh_axis(axis, mesh) for axis in node.items()) if isinstance(node.value, list) else mesh_axis(node, mesh)


def mesh_axis(node: Node, mesh: Mesh) -> str:
    if node.value not in mesh.all_names:
        raise node.error(f"a mesh axis, one of {', '.join(mesh.all_names)}")
    return node.value


def _one(node: Node, known: Sequence[T]) -> T:
    """The entry that a number refers to."""
    return known[node.integer(0, len(known) - 1)]
