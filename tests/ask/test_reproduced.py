"""Strategies of the library are those of today's programs and cost model: a sample always, all of them in the slow tests."""

from __future__ import annotations

import shlex
from dataclasses import replace

import jax
import pytest

import autoshard
from autoshard import library
from autoshard.ask.reproduced import differences
from autoshard.cli import main
from autoshard.cli.commands import parser
from autoshard.cli.program import load
from autoshard.errors import StrategyError
from autoshard.strategy import to_json

NAMES = library.names()
SAMPLE = NAMES[::13]
TRACED_BY = (0, 10)
pytestmark = pytest.mark.skipif(jax.__version_info__[:2] != TRACED_BY, reason="other releases of JAX trace other equations")
REFRESH = "run `autoshard strategies refresh` and review the differences"


def program_of(record):
    """The function and the arguments that the record's command names."""
    given = parser().parse_args(shlex.split(record.provenance.command)[1:])
    function, arguments = load(given.program, given.args)
    return function, *arguments


@pytest.mark.parametrize("name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_strategies_are_reproduced(name):
    """The program has the file's fingerprint, and the strategy costs what the file says."""
    record = library.load(name)
    assert not differences(autoshard.Strategy(record), *program_of(record)), REFRESH


def test_other_figures_and_other_programs_are_found():
    """A step time or a collective that is another one is named; of another program nothing is compared."""
    record = min((library.load(name) for name in SAMPLE), key=lambda record: record.program.n_ops)
    program = program_of(record)
    slower = replace(record.cost, makespan_seconds=2 * record.cost.makespan_seconds, collectives=record.cost.collectives[1:])
    words = differences(autoshard.Strategy(replace(record, cost=slower)), *program)
    assert len(words) == 2 and words[0].startswith("makespan_seconds was ")
    with pytest.raises(StrategyError, match="the program it was found for"):
        differences(autoshard.Strategy(record), lambda *arguments: arguments[0], *program[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_searching_again_gives_the_same_bytes(name, tmp_path, monkeypatch):
    """The command in the file writes the file, but for what a compiler has confirmed."""
    words = shlex.split(library.load(name).provenance.command)
    target = tmp_path / f"{name}.json"
    assert main([*words[1:-1], str(target)]) == 0 and words[-2] == "--save"
    unconfirmed = to_json(replace(library.load(name), confirmation=None))
    assert target.read_text().replace(str(target), words[-1]) == unconfirmed, REFRESH
