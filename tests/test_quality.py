"""Results of `benchmarks.quality`: how rows are merged, held against goals and shown; and XLA's auto-sharding in its environment."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard import Cluster
from autoshard.ir import Mesh

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import quality, results, xla_auto  # noqa: E402  # the benchmarks are no package that is installed
from benchmarks.results import XLA, Row  # noqa: E402

CLUSTER = "v5e:2x4"


def row(plan: str, seconds: float | None = None, program: str = "gpt", cluster: str = CLUSTER, **known) -> Row:
    return Row(program, cluster, plan, "data=8", scheduled_seconds=seconds, **known)


@pytest.fixture
def compared():
    """Two programs on a cluster: the first faster than its rivals, the second without a plan of XLA's that fits."""
    one = [row("auto", 3.0), row("data parallel", 4.0), row("tensor parallel, sequence", 5.0), row(XLA, 8.0)]
    two = [row("auto", 6.0, "mlp"), row("data parallel", 5.0, "mlp"), row(XLA, program="mlp", failure="does not fit")]
    return results.compared([*one, *two])


# --- rows --------------------------------------------------------------------------------------------------------------


def test_a_run_replaces_the_rows_it_covers_and_leaves_the_others():
    """Of a run with --plans 'auto*' experts' rows stay, and auto's rows that it no longer finds go."""
    kept = [row("auto", 3.0), row("auto, mesh given", 3.0), row("data parallel", 4.0), row("auto", 1.0, program="mlp")]
    merged = results.merged(kept, [row("auto", 2.0)], lambda one: one.program == "gpt" and one.plan.startswith("auto"))
    assert [(one.program, one.plan, one.seconds) for one in merged] == [
        ("gpt", "auto", 2.0),
        ("gpt", "data parallel", 4.0),
        ("mlp", "auto", 1.0),
    ]


def test_rows_of_a_program_that_has_changed_are_not_compared():
    """A run of a changed program drops what was found for it before, whatever the run covers, and no other program's rows."""
    kept = [row("data parallel", 4.0, fingerprint="old"), row("data parallel", 4.0, cluster="v5e:4x4", fingerprint="old")]
    merged = results.merged(kept, [row("auto", 2.0, fingerprint="new")], lambda one: False)
    assert [(one.cluster, one.plan) for one in merged] == [(CLUSTER, "auto"), ("v5e:4x4", "data parallel")]
    assert results.compared([kept[0], row("auto", 2.0, fingerprint="new")]) == {("gpt", CLUSTER): [row("auto", 2.0, fingerprint="new")]}


def test_results_come_back_and_are_the_same_file_whatever_their_order(tmp_path):
    """Rows are saved sorted, rounded, and read back."""
    rows = [row(XLA, 1 / 3, search_seconds=53.0, versions="jax 0.10.0"), row("auto", 0.25)]
    results.save(tmp_path / "one.json", rows, "command")
    results.save(tmp_path / "two.json", rows[::-1], "command")
    text = (tmp_path / "one.json").read_text()
    assert text == (tmp_path / "two.json").read_text() and json.loads(text)["command"] == "command"
    assert results.load(tmp_path / "one.json") == [row(XLA, 0.333333, search_seconds=53.0, versions="jax 0.10.0"), row("auto", 0.25)]
    assert results.load(tmp_path / "none.json") == []


def test_kept_results_are_canonical_and_name_no_folder_of_any_machine():
    """The repository's results are as they would be saved again; each row names versions, and no path of a machine is in them."""
    text = results.FILE.read_text()
    rows = results.load(results.FILE)
    assert rows == sorted(rows, key=lambda one: one.key) and all(one.versions and one.fingerprint for one in rows)
    assert not any(f'"{folder}' in text or f" {folder}" in text for folder in ("/home", "/root", "/tmp", "/work", "/usr"))
    assert {one.cluster for one in rows} <= set(quality.GIVEN) and {one.program for one in rows} <= set(quality.PROGRAMS)


def test_failures_are_kept_without_folders():
    """What a compiler says keeps its words, not the folders of the machine."""
    assert quality._short("File /opt/x/y.py: Used 22.53G\n of 15.75G hbm; 1/2 a/b") == "File ...: Used 22.53G of 15.75G hbm; 1/2 a/b"


def test_rows_are_kept_as_they_come(tmp_path):
    """What is found before a run is interrupted is in the results; what a whole run covers and no longer finds is gone from them."""
    options = quality._parser().parse_args(["--results", str(tmp_path / "found.json")])
    results.save(options.results, [row("fully sharded", 5.0)], "before")

    def interrupted():
        yield row("auto", 3.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quality._kept(options, "gpt", CLUSTER, interrupted(), quality.Run())
    assert [one.plan for one in results.load(options.results)] == ["auto", "fully sharded"]
    assert [one.plan for one in quality._kept(options, "gpt", CLUSTER, [row("auto", 2.0)], quality.Run())] == ["auto"]


# --- goals -------------------------------------------------------------------------------------------------------------


def test_goals_are_held_against_the_best_rival_and_against_xla(compared):
    """The worst row, the geometric means over rows with a rival, and over those with a plan of XLA's."""
    found = {target.what.partition(",")[0] + target.what.rpartition(",")[2]: target for target in results.goals(compared)}
    assert [target.found for target in found.values()] == pytest.approx([0, 1.2, (0.75 * 1.2) ** 0.5, 3 / 8])
    assert [target.reached for target in found.values()] == [True, False, False, True]
    assert "geometric mean of 1" in results.goals(compared)[-1].what


def test_a_plan_of_ours_that_does_not_fit_reaches_no_goal():
    """Its ratio is infinite, in the worst row and in the mean."""
    rows = results.compared([row("auto", failure="does not fit", predicted_seconds=1.0), row("data parallel", 4.0), row(XLA, 8.0)])
    assert not any(target.reached for target in results.goals(rows))


def test_means_are_goals_of_compiled_plans_only():
    """Where nothing was compiled there is no mean to reach, and rows are held by what is predicted."""
    rows = [Row("gpt", CLUSTER, plan, "", predicted_seconds=s) for plan, s in (("auto", 4.1), ("data parallel", 4.0))]
    assert [(target.found, target.reached) for target in results.all_goals(results.compared(rows))] == [(0, True), (4.1 / 4.0, True)]


def test_table_has_a_line_for_each_program_and_cluster(compared):
    """Steps, ratios and failures as the README shows them."""
    head, _, gpt, mlp = results.markdown(compared).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, gpt, mlp)]
    shown = [dict(zip(cells[0], line, strict=True)) for line in cells[1:]]
    assert shown[0]["tensor parallel"] == "5.00 s" and shown[0]["`auto` / best rival"] == "0.75" and shown[0]["`auto` / XLA"] == "0.38"
    assert shown[1][XLA] == "does not fit" and shown[1]["`auto` / XLA"] == "-" and shown[1]["fully sharded"] == "-"


def test_command_names_rows_and_no_folders():
    """The command that is kept chooses the same rows, and has no option of this machine."""
    options = quality._parser().parse_args(["--models", "mlp", "--plans", "auto*", "--keep", "/tmp/x", "--rival-env", "/tmp/y"])
    assert quality.command(options) == "python -m benchmarks.quality --models mlp --plans 'auto*'"


# --- XLA's auto-sharding -----------------------------------------------------------------------------------------------


def test_the_process_with_auto_sharding_needs_nothing_of_autoshard():
    """Its environment has JAX and optax alone."""
    code = "import sys, benchmarks.xla_auto_child; sys.exit(any(name.partition('.')[0] == 'autoshard' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_named_and_gone_without(tmp_path, monkeypatch, capsys):
    """The message has the packages and the option; the benchmark goes on."""
    monkeypatch.setattr(xla_auto, "VERSIONS", {"jax": "0.0.0.no.such.release"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    options = quality._parser().parse_args(["--rival-env", str(tmp_path / "made")])
    assert quality._rival(options) is None
    assert "jax==0.0.0.no.such.release" in (said := capsys.readouterr().err) and "--rival-env" in said and XLA in said


def _python(folder: Path, script: str) -> Path:
    """A program in the place of the environment's Python; its last argument is the folder of the request."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    python.chmod(0o755)
    return python


def _auto_sharded(python: Path, limit_seconds: float, fingerprint: str = "f") -> xla_auto.AutoSharded:
    mesh = Mesh.of({"data": 2, "model": 4})
    return xla_auto.auto_sharded(python, "mlp", {"batch": 1024}, fingerprint, mesh, Cluster.parse(CLUSTER), limit_seconds)


def test_auto_sharding_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    """Its process is gone, the row says how far it came, and only a longer limit asks again."""
    monkeypatch.setenv("AUTOSHARD_BENCHMARK_KEEP", str(tmp_path))
    python = _python(tmp_path, "echo 'Auto Sharding took 7 seconds' >&2; exec sleep 600")
    found = _auto_sharded(python, 0.5)
    assert (
        found.ahead is None
        and found.failure == "stopped after 0.5 s: the search had ended, compiling had not"
        and found.search_seconds == 7
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    (tmp_path / "pid").unlink()
    assert _auto_sharded(python, 0.4) == found and not (tmp_path / "pid").exists()
    assert _auto_sharded(python, 0.6).limit_seconds == 0.6 and (tmp_path / "pid").exists()


def test_auto_sharding_says_what_does_not_fit_and_is_kept(tmp_path, monkeypatch):
    """A refusal of the TPU compiler is a plan that does not fit; another program is asked for anew."""
    monkeypatch.setenv("AUTOSHARD_BENCHMARK_KEEP", str(tmp_path))
    python = _python(tmp_path, 'cp "$3/request.json" "$(dirname "$0")"; echo "Used 22.53G of 15.75G hbm" > "$3/failure"')
    found = _auto_sharded(python, 60)
    assert found.ahead is not None and not found.ahead.fits and found.ahead.needed_bytes == 22.53 * 2**30
    request = json.loads((tmp_path / "request.json").read_text())
    assert request["topology"] == CLUSTER and request["sizes"] == {"batch": 1024} and request["mesh"] == [["data", 2], ["model", 4]]
    started = time.perf_counter()
    python.write_text("#!/bin/sh\nexit 3")
    assert _auto_sharded(python, 90) == found and time.perf_counter() - started < 1
    assert "without a word" in _auto_sharded(python, 60, "another").failure
