"""Facts about compilers: each constant names the row of evidence that it rests on, and the rows are what compilers still do."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import autoshard.compilers
from autoshard.verify.aot import COMPILERS
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.program import Program
from benchmarks.evidence.programs import PROGRAMS
from benchmarks.evidence.rows import Row, read_rows

ROOT = Path(autoshard.compilers.__file__).parents[1]
# Other files with facts about compilers.
ELSEWHERE = ("judge/model.py", "cost/windows.py", "analysis/vector_products.py", "analysis/stacks.py", "lower/manual_plan.py")
# Tables of names, how keys are written, and how far predictions were off.
NO_FACTS = {"TARGETS", "PLATFORMS", "FIGURES", "NO_CORRECTIONS", "PEAK_ERROR"}
ROWS = read_rows()
NAMED = re.compile(r"evidence: ([\w .,'-]+?)$", re.MULTILINE)


def files():
    """Files that may have facts about compilers."""
    return [*sorted((ROOT / "compilers").rglob("*.py")), *(ROOT / name for name in ELSEWHERE)]


def constants(source: str) -> dict[str, str]:
    """The constants of a module, each with its line and the comment lines above it."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_"):
            first = node.lineno - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            found[target.id] = "\n".join(lines[first : node.lineno])
    return found


def resolved(dotted: str):
    """What a dotted name stands for."""
    module, _, names = dotted.rpartition(".")
    while True:
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names = f"{name}.{names}"
        else:
            break
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("file", [file for file in files() if "compilers" in file.parts], ids=lambda file: file.name)
def test_every_constant_names_its_evidence(file):
    """A constant about a compiler stands beside the name of a row, and that row is about it."""
    module = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
    for name, text in constants(file.read_text()).items():
        if name not in NO_FACTS:
            found = NAMED.findall(text)
            assert found and found[-1] in ROWS, f"{module}.{name} names no row of evidence"
            assert ROWS[found[-1]].constant == f"{module}.{name}"


def test_every_row_is_named_where_its_fact_is():
    """What a row supports exists, and its file names the row; no file names a row that is not there."""
    named = {file: set(NAMED.findall(file.read_text())) for file in files()}
    assert set().union(*named.values()) == set(ROWS)
    for row in ROWS.values():
        assert resolved(row.constant) is not None
        module = next(file for file in named if row.name in named[file])
        assert row.constant.startswith(".".join(module.relative_to(ROOT.parent).with_suffix("").parts))


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_a_form(name):
    """A row has a sentence, at least three programs that exist, their figures, a version, and the command that measures them."""
    row = ROWS[name]
    assert {field.name for field in fields(Row)} == {"name", "observation", "constant", "compiler", "expected", "command"}
    assert row.observation.endswith(".") and row.command == f'python -m benchmarks.evidence "{name}"'
    assert len(row.expected) >= 3 and all(isinstance(PROGRAMS[program], Program) for program in row.expected)
    assert all(isinstance(figure, int | float | str) for figure in row.expected.values())
    assert re.fullmatch(r"(libtpu|jax-cuda12-plugin) [\d.]+( and jax-cuda12-plugin [\d.]+)?", row.compiler)


def test_no_program_is_without_a_row():
    """Every program shows a fact of some row."""
    assert set(PROGRAMS) == {program for row in ROWS.values() for program in row.expected}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("platform", "program"),
    [
        ("tpu", "two halves of exponentials"),
        ("tpu", "a float32 weight of a product"),
        ("cuda", "a tanh that two read"),
        ("cuda", "the gradient of an embedding and its decay"),
    ],
)
def test_a_fact_is_what_the_compiler_does(platform, program):
    """The compiler that is installed still gives the figure of a small program."""
    if not COMPILERS[platform].installed:
        pytest.skip(f"{COMPILERS[platform].package} is not installed")
    (row,) = (row for row in ROWS.values() if program in row.expected)
    assert PROGRAMS[program].figure() == row.expected[program]


def test_the_exit_code_tells_of_a_difference(monkeypatch, capsys):
    """Figures stand beside those expected; one that differs is named, and the exit code is 1."""
    row = ROWS["sliced values are stored"]
    observed = {id(PROGRAMS[name]): figure for name, figure in row.expected.items()}
    monkeypatch.setattr(Program, "figure", lambda self: observed[id(self)])
    assert main([row.name]) == 0 and "differs" not in capsys.readouterr().out
    observed[id(PROGRAMS["three windows of sines"])] = 0
    assert main([row.name]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "differs" in line)
    assert "three windows of sines" in line


def test_rows_are_listed(capsys):
    """Without a name every row is listed with what it supports, and an unknown one is an error that names all."""
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(row.constant.rpartition(".")[2] in listed for row in ROWS.values())
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "rows are" in capsys.readouterr().err
