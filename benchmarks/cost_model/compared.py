"""What is predicted of a strategy next to what a compiler made of its program: collectives, flops and peak memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import autoshard
from autoshard.ask.verification import expected
from autoshard.ir import Collective
from autoshard.verify import Ahead, Flops, Row, collectives_of, compare, dot_flops

_FRAMED = re.compile(r'op_name="([^"]*)"([^}]*?)stack_frame_id=(\d+)')
_HIDDEN = (str(Path(autoshard.__file__).parent), "site-packages")  # of a stack's files: what carries the user's function out
_LOWERS = str(Path("autoshard", "run", "step.py"))  # beyond it stands who lowers the program


@dataclass(frozen=True, slots=True)
class Compared:
    """Predictions next to the compiled program; bytes and flops of one step on one device.

    Attributes:
        rows: collectives by kind and mesh axes.
        unmatched: collectives that only one side has, as pairs: those predicted, and those compiled.
        predicted_flops, flops: of products; the compiled ones with what XLA computes again to save memory apart.
        predicted_peak_bytes, peak_bytes: of a device; None where the compiler does not say.
    """

    rows: tuple[Row, ...]
    unmatched: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    predicted_flops: float
    flops: Flops
    predicted_peak_bytes: float
    peak_bytes: float | None

    @property
    def predicted_bytes(self) -> float:
        """Bytes of all collectives."""
        return sum(row.predicted_bytes for row in self.rows)

    @property
    def compiled_bytes(self) -> float:
        return sum(row.actual_bytes for row in self.rows)

    @property
    def compiled_flops(self) -> float:
        """Without what XLA computes again."""
        return self.flops.total - self.flops.rematerialised

    @property
    def bytes_error(self) -> float:
        return error(self.predicted_bytes, self.compiled_bytes)

    @property
    def flops_error(self) -> float:
        return error(self.predicted_flops, self.compiled_flops)

    @property
    def peak_error(self) -> float | None:
        return None if self.peak_bytes is None else error(self.predicted_peak_bytes, self.peak_bytes)


def error(predicted: float, actual: float) -> float:
    """By which share of the actual value the prediction is above it; 0 where both are none.

    >>> error(110.0, 100.0) < 0.1001, error(0.0, 0.0), error(1.0, 0.0)
    (True, 0.0, inf)
    """
    return predicted / actual - 1 if actual else 0.0 if not predicted else float("inf")


def compared(strategy: autoshard.Strategy, ahead: Ahead) -> Compared:
    """A strategy's predictions next to its program as the compiler of its own cluster left it."""
    record = strategy.record
    kind = record.cluster["device"]["kind"]
    predicted = expected(record, kind)
    actual = collectives_of(with_source_lines(ahead.hlo), record.mesh)
    peak = record.cost.compiled_peak_bytes if kind == "tpu" else record.cost.peak_bytes
    return Compared(
        compare(predicted, actual),
        (_without(predicted, actual), _without(actual, predicted)),
        record.cost.flops,
        dot_flops(ahead.hlo),
        peak,
        ahead.peak_bytes,
    )


def _without(collectives: Iterable[Collective], others: Iterable[Collective]) -> tuple[Collective, ...]:
    """The collectives that are not among the others, largest first; each with the count that is left."""
    left = Counter[tuple]()
    for other in others:
        left[_likeness(other)] += other.count
    found = []
    for one in collectives:
        key = _likeness(one)
        matched = min(one.count, left[key])
        left[key] -= matched
        if one.count > matched:
            found.append(replace(one, count=one.count - matched))
    return tuple(sorted(found, key=lambda one: -one.bytes * one.count))


def _likeness(collective: Collective) -> tuple:
    """Alike where `compare` would match them: a sum of which devices read a part counts as one they read whole."""
    return collective.kind.replace("reduce_scatter", "all_reduce"), collective.mesh_axes, collective.bytes


def with_source_lines(hlo_text: str) -> str:
    """The module with the program's own source line after the name of each operation, where its tables of stack frames tell."""
    head = hlo_text.partition("\nENTRY")[0]
    files = {number: name for number, name in re.findall(r'^(\d+) "(.*)"$', _table(head, "FileNames"), re.MULTILINE)}
    located = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(head, "FileLocations"), re.MULTILINE)
    places = {number: (files.get(name, ""), line) for number, name, line in located}
    framed = re.findall(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(head, "StackFrames"), re.MULTILINE)
    frames = {int(number): (places.get(place, ("", "")), int(parent or 1) - 1) for number, place, parent in framed}

    def line(frame: int) -> str:
        seen: set[int] = set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            (file, number), frame = frames[frame]
            if file.endswith(_LOWERS):
                return ""
            if file and not any(part in file for part in _HIDDEN):
                return f" {Path(file).name}:{number}"
        return ""

    return _FRAMED.sub(lambda found: f'op_name="{found[1]}{line(int(found[3]))}"{found[2]}stack_frame_id={found[3]}', hlo_text)


def _table(text: str, name: str) -> str:
    """The lines of a table before the module's computations."""
    return text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
