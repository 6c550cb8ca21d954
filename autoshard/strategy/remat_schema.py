"""The written form of what a strategy's program computes again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autoshard.ir.remat import CARRIED, Kept, LoopKept, Remat
from autoshard.strategy.reader import Node


def encode_remat(remat: Remat) -> dict[str, Any]:
    """The written form; without what is on hosts where nothing is, and the like."""
    return _written(asdict(remat))


def _written(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _filled(value) for name, value in fields.items() if not (name in ("hosted", "hosted_bytes", "replaces") and not value)}


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return _written(value)
    return [_filled(each) for each in value] if isinstance(value, list | tuple) else value


def decode_remat(node: Node) -> Remat:
    """What a file says is computed again, as `encode_remat` writes it."""
    part = node.fields("mode", "path", "kept", "loops", "kept_bytes", "plain_bytes", "seconds", optional=("hosted_bytes", "replaces"))
    return Remat(
        part["mode"].text(),
        tuple(one.integer(0) for one in part["path"].items()),
        _kept(part["kept"]),
        tuple(_loop(one) for one in part["loops"].items()),
        part["kept_bytes"].number(),
        part["plain_bytes"].number(),
        part["seconds"].number(),
        part["hosted_bytes"].number() if "hosted_bytes" in part else 0.0,
        "replaces" in part and _true(part["replaces"]),
    )


def _true(node: Node) -> bool:
    if node.value is not True:
        raise node.error("true, where it is written")
    return True


def _kept(node: Node) -> Kept:
    part = node.fields("turn", "places", "values", optional=("hosted",))
    places = tuple(one.integer(0) for one in part["places"].items())
    return Kept(part["turn"].integer(0), places, _numbers(part["values"]), _numbers(part["hosted"]) if "hosted" in part else ())


def _numbers(node: Node) -> tuple[tuple[int, int], ...]:
    pairs = (one.items(2) for one in node.items())
    return tuple((first.integer(CARRIED), second.integer(0)) for first, second in pairs)


def _loop(node: Node) -> LoopKept:
    part = node.fields("forward", "backward", "kept")
    return LoopKept(part["forward"].integer(0), part["backward"].integer(0), _kept(part["kept"]))
