"""What files of schema 3 and older say of a program, as files of today say it."""

from __future__ import annotations

from autoshard.reader import Node


def with_rewrites(node: Node) -> Node:
    """A program whose rewrites have names of their own, with these as a list."""
    fields = dict(node.value) if isinstance(node.value, dict) else {}
    if not fields.keys() & {"microbatches", "remat", "offload", "stages", "rounds"}:
        return node
    rewrites = [*found] if isinstance(found := fields.pop("rewrites", []), list) else [found]
    if (remat := fields.pop("remat", None)) is not None:
        rewrites.append({"kind": "recompute", "remat": remat})
    microbatches, stages, rounds = (fields.pop(name, 1) for name in ("microbatches", "stages", "rounds"))
    if stages != 1:
        rewrites.append({"kind": "one_program", "stages": stages, "microbatches": microbatches, "rounds": rounds})
    elif microbatches != 1:
        rewrites.append({"kind": "microbatches", "microbatches": microbatches})
    if leaves := fields.pop("offload", []):
        rewrites.append({"kind": "offload", "leaves": leaves})
    return Node(fields | {"rewrites": rewrites}, node.where)
