"""The benchmark that holds predictions against compilers: its arithmetic, what it prints of a difference, and that it runs."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HLO = """HloModule m

FileNames
1 "/home/someone/train.py"
2 "{package}/lower/constrain.py"
3 "{package}/run/step.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=8 end_line=8 column=1 end_column=9}}
3 {{file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=3 parent_frame_id=2}}
3 {{file_location_id=1 parent_frame_id=3}}
4 {{file_location_id=2 parent_frame_id=4}}
5 {{file_location_id=2 parent_frame_id=3}}

ENTRY %main () -> f32[8] {{
  %a = f32[8]{{0}} negate(%c), metadata={{op_name="in a function" stack_frame_id=4}}
  %b = f32[8]{{0}} negate(%a), metadata={{op_name="of ours" stack_frame_id=5}}
}}
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("AUTOSHARD_BENCHMARK_KEEP", str(tmp_path))


def outcomes(monkeypatch, *searchers):
    """Those of a small network on the CPU's devices."""
    from benchmarks import exact_compiled
    from benchmarks.models import mlp

    monkeypatch.setitem(exact_compiled.PROGRAMS, "mlp", partial(mlp, 1, 128, 512, 1024))
    return [exact_compiled.measure(exact_compiled.Case("mlp", searcher, False, "cpu:8")) for searcher in searchers]


def test_collectives_and_flops_are_those_that_the_cpu_compiles(monkeypatch):
    """A small network's, under every searcher that needs no mesh: the predicted ones to the byte, and nothing is unmatched."""
    found = outcomes(monkeypatch, "data_parallel", "fully_sharded")
    for outcome in found:
        one = outcome.compared
        assert one.predicted_bytes == one.compiled_bytes > 0 and one.unmatched == ((), ()), outcome
        assert one.flops_error == pytest.approx(0.0, abs=0.01) and one.peak_bytes > 0


def test_what_differs_is_printed_with_its_collectives(monkeypatch):
    """Where a predicted all_reduce is not what was compiled, the goal is missed, and both are shown with bytes and lines."""
    from dataclasses import replace

    from autoshard.ir import Origin, ServedOp
    from benchmarks import exact_compiled

    (outcome,) = outcomes(monkeypatch, "data_parallel")
    one = outcome.compared
    rows = tuple(replace(row, predicted_bytes=2 * row.predicted_bytes) for row in one.rows)
    sent = exact_compiled.Collective("all_gather", ("data",), 3e6, 2, ServedOp("dot_general", 7, Origin("models.py", 42)))
    wrong = replace(outcome, compared=replace(one, rows=rows, unmatched=((sent,), ())))
    assert "bytes" in wrong.missed and "bytes" not in outcome.missed
    text = str(exact_compiled.report([outcome, wrong], ["v5e:2x4, XLA:TPU is not installed"]))
    for part in ("mesh free, cpu:8: bytes", "+100.0 % !", "only predicted", "2 x 3.00 MB", "models.py:42", "Skipped: v5e:2x4"):
        assert part in text, part
    bytes_goal = exact_compiled.goals([outcome, wrong])[0][1]
    assert bytes_goal.found == 50 and not bytes_goal.reached
    assert exact_compiled.to_json([wrong], [])["cases"][0]["unmatched"]["only predicted"][0]["count"] == 2


def test_a_program_that_cannot_be_compiled_is_missed_in_everything(monkeypatch):
    """A failure is an outcome with its words, and no goal is reached with it."""
    from autoshard.errors import CompilerError
    from benchmarks import exact_compiled

    def refuse(*_):
        raise CompilerError("the compiler's process ended without a word.")

    monkeypatch.setattr(exact_compiled.compiled, "compiled", refuse)
    found = outcomes(monkeypatch, "data_parallel")
    assert found[0].failure and not any(goal.reached for _, goal in exact_compiled.goals(found))
    assert "without a word" in str(exact_compiled.report(found, []))


def test_source_lines_are_those_of_the_program():
    """Of a stack the innermost frame of the user's own function; none where the frames within the step are autoshard's."""
    import autoshard
    from benchmarks.cost_model.compared import with_source_lines

    found = with_source_lines(HLO.format(package=Path(autoshard.__file__).parent))
    assert 'op_name="in a function train.py:7"' in found and 'op_name="of ours"' in found


def test_collectives_match_by_what_they_send():
    """What both sides have is left out by its count; a sum that devices read a part of is one that they read whole."""
    from autoshard.ir import Collective
    from benchmarks.cost_model.compared import _without

    predicted = [Collective("all_reduce", ("x",), 64.0, 3), Collective("all_gather", ("x",), 32.0, 1)]
    actual = [Collective("reduce_scatter", ("x",), 64.0, 1), Collective("all_gather", ("y",), 32.0, 1)]
    assert [(one.kind, one.count) for one in _without(predicted, actual)] == [("all_reduce", 2), ("all_gather", 1)]
    assert _without(actual, predicted) == (actual[1],)


def test_programs_are_many_and_of_every_form():
    """At least forty, with every family of the models; a dozen of them are quick, and meshes are given to what takes two axes."""
    from benchmarks import exact_compiled
    from benchmarks.exact_programs import PROGRAMS, QUICK

    assert len(PROGRAMS) >= 40 and set(QUICK) <= set(PROGRAMS) and len(QUICK) == 12
    for family in ("gpt", "llama", "moe", "moe_sorted", "t5", "vit", "mlp", "dlrm", "resnet", "unet", "lstm"):
        assert any(name.startswith(family) for name in PROGRAMS), family
    every = exact_compiled.cases(["cpu:8"], ["mlp"], exact_compiled.SEARCHERS, quick=False)
    assert len(every) == 6 and {case.searcher for case in every if case.given} == {"auto", "tensor_parallel"}


def test_a_compiler_that_is_not_installed_is_named(monkeypatch):
    """Its targets are skipped, with the command that installs it; the CPU's is always there."""
    from dataclasses import replace

    from benchmarks import exact_compiled

    none = {name: replace(one, modules=(), variable="") for name, one in exact_compiled.COMPILERS.items()}
    monkeypatch.setattr(exact_compiled, "COMPILERS", none)
    assert "pip install 'autoshard[tpu]'" in exact_compiled.lacking("v5e:2x4")
    assert "pip install 'autoshard[gpu-compiler]'" in exact_compiled.lacking("h100:8x1")
    assert exact_compiled.lacking("cpu:8") == ""


@pytest.mark.slow
def test_the_benchmark_runs():
    """One program under one searcher, compiled by XLA:CPU, prints what was predicted and compiled as JSON."""
    command = [sys.executable, "-m", "benchmarks.exactness", "--compile", "--json", "--programs", "mlp", "--searchers", "data_parallel"]
    done = subprocess.run([*command, "--targets", "cpu:8"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    (case,) = found["cases"]
    assert case["bytes"]["error"] == 0.0 and abs(case["flops"]["error"]) < 0.01 and "jax" in found["versions"], done.stderr
    assert done.returncode == int(any(not goal["reached"] for goal in found["goals"]))


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("--programs", "nothing"), ("--searchers", "nobody"), ("--targets", "v5e:three")])
def test_unknown_names_are_refused(option, value):
    """An unknown program, searcher or cluster ends the run before anything is compiled, and names the known ones."""
    command = [sys.executable, "-m", "benchmarks.exactness", "--compile", option, value]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and value.split(":")[-1] in done.stderr
