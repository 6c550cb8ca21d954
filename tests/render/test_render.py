"""Reports show everything they describe, in text and in HTML."""

import io
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autoshard.render import (
    Bar,
    Bars,
    Cell,
    Gallery,
    Heading,
    Paragraph,
    Picture,
    Report,
    Table,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    print_report,
    to_html,
    to_text,
)

REPORT = Report(
    "A <title>",
    (
        Heading("Arguments"),
        Paragraph("Some [bold]prose[/bold] & more."),
        Table(("path", ">bytes"), (("state['w']", "1.00 MB"), ("<script>alert(1)</script>", "2 B")), ("a note",)),
        Bars((Bar("compute", 0.75, "3.00 ms"), Bar("all of it", 1.5, "9.00 ms"), Bar("nothing", 0.0, "0 s"))),
        Gallery((Picture("mesh data=2", ((Cell("0", 0.0), Cell("1", 0.5)),), "two devices"), Picture("w", ((Cell("0 1"),),)))),
    ),
)
PREFIXES = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


class Balanced(HTMLParser):
    """Collects tags, attributes and text, and fails where a tag closes what is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.styles, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)
        assert [name for name, _ in attrs] in ([], ["style"])
        self.styles.extend(value for _, value in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(report):
    parser = Balanced()
    parser.feed(to_html(report))
    parser.close()
    assert not parser.open
    return parser


def value_of(text, unit):
    number, _, rest = text.partition(" ")
    return float(number) * PREFIXES[rest.removesuffix(unit)]


@given(st.floats(1e-9, 1e5))
def test_seconds_keep_three_digits(seconds):
    """A duration read back from its text is within half a unit of the third digit."""
    assert value_of(format_seconds(seconds), "s") == pytest.approx(seconds, rel=5.1e-3)


@given(st.floats(1e3, 1e17))
def test_bytes_and_flops_keep_three_digits(n):
    """Bytes and operations read back from their text are within half a unit of the third digit, three digits before the point at most."""
    for text, unit in ((format_bytes(n), "B"), (format_flops(n), "FLOP")):
        assert value_of(text, unit) == pytest.approx(n, rel=5.1e-3)
        assert float(text.split()[0]) < 1000


@pytest.mark.parametrize(
    "text, expected",
    [
        (format_seconds(float("inf")), "inf s"),
        (format_seconds(1e-12), "< 1 ns"),
        (format_bytes(0), "0 B"),
        (format_bytes(999.7), "1.00 kB"),
        (format_percent(0.999), "100 %"),
    ],
)
def test_edges_of_numbers(text, expected):
    """Zero, infinity and what rounds up to the next unit read naturally."""
    assert text == expected


def test_text_shows_every_part_without_colour_codes():
    """The text has every word of the report and no escape sequence."""
    text = to_text(REPORT)
    for word in ("A <title>", "[bold]prose[/bold]", "state['w']", "1.00 MB", "a note", "compute", "mesh data=2", "two devices", "0 1"):
        assert word in text
    assert "\x1b" not in text and text == str(REPORT)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_to_its_width(width):
    """No line is longer than the width asked for, and a long cell is folded rather than cut."""
    long = "x" * 150
    text = to_text(Report("t", (Table(("path", ">n"), ((long, "1"),)), *REPORT.parts)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("x") >= 150


def test_bars_are_as_long_as_their_shares():
    """A bar fills its share of the scale, and none overflows."""
    lines = {line.split()[0]: line for line in to_text(REPORT).splitlines() if "░" in line or "█" in line}
    assert lines["compute"].count("█") == 30 and lines["all"].count("█") == 40 and lines["nothing"].count("█") == 0


def test_colour_goes_to_terminals_only():
    """A console that is a terminal gets colours; ASCII consoles get no box characters."""
    colour, ascii_only = (
        Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=80, force_terminal=terminal, color_system="truecolor")
        for encoding, terminal in (("utf-8", True), ("ascii", False))
    )
    outputs = []
    for console in (colour, ascii_only):
        print_report(Report("t", (REPORT.parts[-1], Bars((Bar("compute", 0.5, "1 s"),)))), console)
        console.file.flush()
        outputs.append(console.file.buffer.getvalue().decode("utf-8"))
    assert "\x1b[" in outputs[0] and "█" in outputs[0]
    assert outputs[1].isascii() and "#" in outputs[1]


def test_html_is_escaped_balanced_and_static():
    """The HTML closes what it opens, carries inline styles only, and shows the report's text rather than running it."""
    html = parsed(REPORT)
    assert "script" not in html.tags and "A <title>" in html.text and "<script>alert(1)</script>" in html.text
    assert REPORT._repr_html_() == to_html(REPORT)


def test_html_reads_on_light_and_dark_pages():
    """Text takes the page's colour, but on coloured blocks, which are light with dark text."""
    html = parsed(REPORT)
    for style in html.styles:
        if ";color:" in f";{style}" and "color:inherit" not in style:
            assert "color:#111" in style and "background:#" in style
    assert html.styles[0].count("color:inherit") == 1


@given(st.text(), st.text())
def test_any_text_survives_in_html(title, cell):
    """Whatever a path or a message holds, the HTML stays balanced."""
    parsed(Report(title, (Table(("a",), ((cell,),)), Paragraph(cell), Gallery((Picture(title, ((Cell(cell, 0.3),),)),)))))


def test_rows_fit_their_columns():
    """A row with a cell too few is refused where it is made."""
    with pytest.raises(ValueError, match="one cell a column"):
        Table(("a", "b"), (("1",),))
