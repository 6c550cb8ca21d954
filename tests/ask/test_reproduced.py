"""Strategies of the library are those of today's programs and cost model: a sample always, all of them in the slow tests."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

import jax
import pytest

import autoshard
from autoshard import library
from autoshard.ask.reproduced import differences
from autoshard.cli import main
from autoshard.cli.commands import parser
from autoshard.cli.program import load
from autoshard.errors import StrategyError
from autoshard.strategy import load_record

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


@pytest.mark.sample(1)
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


@pytest.mark.slow(minutes=5)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_command_finds_the_strategy(name, tmp_path):
    """The command in the file decides and predicts as the file does."""
    record = library.load(name)
    words = shlex.split(record.provenance.command)
    target = tmp_path / f"{name}.json"
    assert main([*words[1:-1], str(target)]) == 0 and words[-2] == "--save"
    found = load_record(target)
    assert found.program.fingerprint == record.program.fingerprint
    for part in fields(record.assignment):
        assert getattr(found.assignment, part.name) == getattr(record.assignment, part.name), REFRESH
    assert found.cost.makespan_seconds == pytest.approx(record.cost.makespan_seconds), REFRESH
