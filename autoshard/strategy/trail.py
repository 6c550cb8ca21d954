"""The forms of a step that a search compared, as a strategy records them."""

from __future__ import annotations

from dataclasses import dataclass


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
