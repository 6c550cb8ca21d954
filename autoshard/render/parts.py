"""The parts of a report: headings, text, tables, bars, pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heading:
    """A section's name."""

    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Prose, wrapped to the available width."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column titles.

    Attributes:
        columns: the titles, all empty for a table without a head; a title that starts with ``>`` aligns its column to the right.
        rows: per row one cell for each column; line breaks are kept.
        notes: remarks below it.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has one cell a column: {len(self.columns)} columns {self.columns}, got {row}.")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its length as a share of the whole, and its number as text."""

    label: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars one below the other, on one scale."""

    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One block of a picture: its text, and a colour as a hue in [0, 1), or None for no colour."""

    text: str
    hue: float | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A grid of coloured blocks: a mesh, or a tensor cut into its shards."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side."""

    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines of characters in columns, such as a schedule; neither wrapped nor aligned."""

    text: str


Part = Heading | Paragraph | Table | Bars | Gallery | Drawing


def rgb(hue: float) -> str:
    """A light colour of this hue as ``#rrggbb``, legible under black text."""
    channels = (0.66 + 0.24 * math.cos(2 * math.pi * (hue - third / 3)) for third in range(3))
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
