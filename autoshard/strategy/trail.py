"""The forms of a step that a search compared, as a strategy records them, and their written form."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autoshard.strategy.reader import Node

FIGURES = ("estimated_seconds", "estimated_bytes", "seconds", "peak_bytes")


@dataclass(frozen=True, slots=True)
class Tried:
    """One form of a step: as it is, in microbatches, with recomputation, with arrays in the memory of hosts, or in stages.

    Attributes:
        form: in words.
        outcome: what became of it, in words: ``"taken"``, ``"slower"``, ``"does not fit"``, or why it was not searched.
        estimated_seconds, estimated_bytes: its step time and peak as they were estimated before a search; None where there is no estimate.
        seconds, peak_bytes: of the fastest strategy that was found; None: none was.
    """

    form: str
    outcome: str
    estimated_seconds: float | None = None
    estimated_bytes: float | None = None
    seconds: float | None = None
    peak_bytes: float | None = None


def encode_trail(trail: tuple[Tried, ...]) -> list[dict[str, Any]]:
    """The written form, without figures that are not known."""
    return [{name: value for name, value in asdict(each).items() if value is not None} for each in trail]


def decode_trail(node: Node) -> tuple[Tried, ...]:
    """The forms of a file, as `encode_trail` writes them."""
    return tuple(map(_tried, node.items()))


def _tried(node: Node) -> Tried:
    part = node.fields("form", "outcome", optional=FIGURES)
    figures = {name: part[name].number() for name in FIGURES if name in part}
    return Tried(part["form"].text(), part["outcome"].text(), **figures)
