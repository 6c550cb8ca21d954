"""The report on a strategy: one HTML file that opens offline, and a trace file of its timeline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autoshard.errors import StrategyError
from autoshard.explanation import Explanation, explanation_of
from autoshard.explanation.explain_pipeline import timeline_of
from autoshard.explanation.stored import packed
from autoshard.report.data import Content, Programs, content_of, to_data
from autoshard.report.page import framed, page
from autoshard.report.trace import Drawn, Inside, pipeline_trace, step_trace
from autoshard.strategy import Record


@dataclass(eq=False)
class HtmlReport:
    """The report on a strategy with timeline, memory, mesh, tables and graph; a notebook shows it.

    Attributes:
        content: what it shows.
    """

    content: Content

    @cached_property
    def html(self) -> str:
        """The page: one self-contained file."""
        return page(to_data(self.content))

    @property
    def packed(self) -> str:
        """What it shows, as a text that a strategy's file keeps."""
        return packed(self.content.explanation, to_data(self.content))

    @property
    def trace(self) -> dict[str, Any]:
        """The timeline in Chrome's trace format, in microseconds.

        Raises:
            StrategyError: the program of the strategy is not at hand.
        """
        content, title = self.content, self.content.explanation.title
        if content.record.pipeline is not None:
            return pipeline_trace(list(_passes(content)), title)
        if content.step is None:
            raise StrategyError(
                "a trace has the events of a program, and this strategy's file has none. Name the program: autoshard explain FILE.json "
                "MODULE:FUNCTION --args MODULE:NAME --trace trace.json, or strategy.with_program(fn, *args).report().save_trace(path)."
            )
        return step_trace(content.step, content.record.mesh.names, title)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page; browsers open it without a network.

        Raises:
            StrategyError: the file cannot be written.
        """
        _write(path, self.html)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, which ui.perfetto.dev and chrome://tracing open.

        Raises:
            StrategyError: as for `trace`, or the file cannot be written.
        """
        _write(path, json.dumps(self.trace, separators=(",", ":"), allow_nan=False))

    def _repr_html_(self) -> str:
        return framed(self.html)


def _passes(content: Content) -> Iterator[Drawn]:
    """The pipelines of all passes over the microbatches, one after the other; each begins when the one before has ended."""
    record, pipeline = content.record, content.record.pipeline
    assert pipeline is not None, "of a pipeline"
    insides = [Inside(each.record.mesh.names, each.step) for each in content.stages if each.step is not None]
    start, several = 0.0, len(pipeline.passes) > 1
    counts = [len(own.stages) for own in pipeline.passes]
    for number, own in enumerate(pipeline.passes):
        timeline, first = timeline_of(record, own), sum(counts[:number])
        inside = insides[first : first + counts[number]] if len(insides) == sum(counts) else []
        yield Drawn(timeline, inside, start, f"pass {number + 1} of {len(counts)}" if several else "")
        after = [sum(own.stages[k].after_seconds for k in own.stages_of(part)) for part in range(own.n_parts)]
        start += max(end + more for end, more in zip(timeline.end_seconds, after, strict=True))


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StrategyError(f"a report is written to a file, and '{path}' cannot be: {error.strerror}. Choose another path.") from None


def report(record: Record, explanation: Explanation, programs: Programs = ()) -> HtmlReport:
    """The report on a strategy.

    Args:
        record: the strategy's.
        explanation: of it.
        programs: its program, or those of its stages; () where only the record is at hand: the page is the one that its file keeps, or says
            what it lacks.
    """
    return HtmlReport(content_of(record, explanation, programs))


def report_of(record: Record) -> HtmlReport:
    """The report on a strategy from its file alone."""
    return report(record, explanation_of(record))
