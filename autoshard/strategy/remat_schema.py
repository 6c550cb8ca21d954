"""The written form of what a strategy's program computes again."""

from __future__ import annotations

from autoshard.ir.remat import CARRIED, Kept, LoopKept, Remat
from autoshard.strategy.reader import Node


def decode_remat(node: Node) -> Remat:
    """What a file says is computed again; `dataclasses.asdict` writes it."""
    part = node.fields("mode", "path", "kept", "loops", "kept_bytes", "plain_bytes", "seconds")
    return Remat(
        part["mode"].text(),
        tuple(one.integer(0) for one in part["path"].items()),
        _kept(part["kept"]),
        tuple(_loop(one) for one in part["loops"].items()),
        part["kept_bytes"].number(),
        part["plain_bytes"].number(),
        part["seconds"].number(),
    )


def _kept(node: Node) -> Kept:
    part = node.fields("turn", "places", "values")
    pairs = (one.items(2) for one in part["values"].items())
    values = tuple((first.integer(CARRIED), second.integer(0)) for first, second in pairs)
    return Kept(part["turn"].integer(0), tuple(one.integer(0) for one in part["places"].items()), values)


def _loop(node: Node) -> LoopKept:
    part = node.fields("forward", "backward", "kept")
    return LoopKept(part["forward"].integer(0), part["backward"].integer(0), _kept(part["kept"]))
