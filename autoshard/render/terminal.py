"""Reports in a terminal, as rich draws them; loaded where one is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from autoshard.render.parts import Bar, Bars, Drawing, Gallery, Heading, Paragraph, Part, Picture, Table, rgb

NARROWEST = 80  # columns of a terminal


def lines(title: str, parts: Sequence[Part]) -> Iterator[RenderableType]:
    """What a console prints of a report, one after the other."""
    yield Text(title, style="bold")
    for part in parts:
        yield ""
        yield _rendered(part)


def _rendered(part: Part) -> RenderableType:
    match part:
        case Heading(text):
            return Text(text, style="bold underline")
        case Paragraph(text):
            return Text(text)
        case Table(columns, rows, notes):
            return Group(_table(columns, rows), *(Text(f" {note}", style="dim") for note in notes))
        case Bars(bars):
            return _bars(bars)
        case Drawing(text):
            return Padding(Text(text, no_wrap=True, overflow="crop"), (0, 0, 0, 1))
        case Gallery(pictures):
            return Padding(Columns([_picture(picture) for picture in pictures], padding=(1, 4)), (0, 0, 0, 1))


def _table(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> RichTable:
    whole = _unbroken(columns, rows)
    shown = [
        RichColumn(Text(c.removeprefix(">")), justify="right" if c.startswith(">") else "left", overflow="fold", no_wrap=k in whole)
        for k, c in enumerate(columns)
    ]
    table = RichTable(*shown, box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False, show_header=any(columns))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _unbroken(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> set[int]:
    """The columns whose cells are not wrapped: the narrowest ones, as far as the narrowest terminal has room for the others.

    >>> _unbroken(("path", "shape"), (("a rather long path to a tensor, somewhere deep in a model", "float32[4,32]"),))
    {1}
    """
    widths = [max(len(text) for text in (column, *cells)) for column, *cells in zip(columns, *rows, strict=True)]
    kept, taken = set(), 0
    for k in sorted(range(len(columns)), key=widths.__getitem__):
        taken += widths[k] + 3
        if taken > NARROWEST * 3 // 4:
            break
        kept.add(k)
    return kept


def _bars(bars: tuple[Bar, ...]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    for column in ("left", "left", "right"):
        grid.add_column(justify=column)
    for bar in bars:
        grid.add_row(Text(f" {bar.label}"), _TextBar(bar.share), Text(bar.text))
    return grid


@dataclass(frozen=True, slots=True)
class _TextBar:
    """A bar of block characters, or of ``#`` in an ASCII terminal."""

    share: float
    width: int = 40

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        filled = min(self.width, max(round(self.share * self.width), int(self.share > 0)))
        full, empty = ("#", ".") if options.ascii_only else ("█", "░")
        yield Segment(full * filled + empty * (self.width - filled))


def _picture(picture: Picture) -> Group:
    table = RichTable(box=box.SQUARE, show_header=False)
    for row in picture.rows:
        table.add_row(*(Text(cell.text, style="" if cell.hue is None else f"black on {rgb(cell.hue)}") for cell in row))
    caption = (Text(picture.caption, style="dim"),) if picture.caption else ()
    return Group(Text(picture.title), table, *caption)
