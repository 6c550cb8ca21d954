"""The demo's checked-in strategies are what a search finds today."""

from dataclasses import replace

import pytest

from autoshard import library
from autoshard.cli.terminal import progress
from autoshard.demo.programs import PROGRAMS
from autoshard.demo.run import SEARCHERS
from autoshard.demo.strategies import COMMAND, checked_in, write
from autoshard.ir import Origin

ENTRIES = [(program, searcher) for program in PROGRAMS for searcher in SEARCHERS]


@pytest.mark.parametrize("program, searcher", ENTRIES, ids=lambda entry: getattr(entry, "name", entry))
def test_checked_in_strategies_are_what_a_search_finds(program, searcher):
    """Searching the demo's programs anew gives the checked-in program, mesh, shardings and costs."""
    with progress() as callback:
        found = checked_in(program, searcher, callback).record
    kept = library.load(found.name)
    assert kept.program == found.program, f"the program has changed: run `{COMMAND}` and review the difference"
    assert (kept.mesh, kept.arguments, kept.results) == (found.mesh, found.arguments, found.results)
    assert (kept.choices, kept.layouts, kept.copies) == (found.choices, found.layouts, found.copies)
    assert unsourced(kept.cost.collectives) == unsourced(found.cost.collectives)
    for name in ("objective_seconds", "makespan_seconds", "peak_bytes", "flops"):
        assert getattr(kept.cost, name) == pytest.approx(getattr(found.cost, name), rel=1e-9), f"run `{COMMAND}` and review the difference"
    assert kept.lower_bound_seconds == pytest.approx(found.lower_bound_seconds, rel=1e-9)


def unsourced(collectives):
    """The collectives without the source lines, which name files of whatever Flax is installed."""
    return [replace(collective, op=replace(collective.op, origin=Origin())) for collective in collectives]


def test_every_checked_in_demo_strategy_names_its_command():
    """The library's demo entries are the searched ones, no more and no fewer, and say how they were made."""
    names = {f"demo_{program.name}_{searcher}" for program, searcher in ENTRIES}
    assert {name for name in library.names() if name.startswith("demo_")} == names
    assert all(library.load(name).provenance.command == COMMAND for name in names)


def test_writing_makes_the_same_file_every_time(tmp_path):
    """Two runs of the command write the same bytes, under the names of the library."""
    texts = []
    for folder in ("one", "two"):
        with progress() as callback:
            files = write(tmp_path / folder, PROGRAMS[1:], callback)
        texts.append({file.name: file.read_bytes() for file in files})
    assert texts[0] == texts[1] and set(texts[0]) == {f"demo_lenet_{searcher}.json" for searcher in SEARCHERS}
