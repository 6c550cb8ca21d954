"""The board of published runs: its table, its figures and its pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.models.decoder import PRODUCTS
from benchmarks.published.board import Cache, Row, errors, pairs, report, row
from benchmarks.published.predicted import Predicted, planned, predicted
from benchmarks.published.runs import SIZES, Run, read

RUNS = read()


def one(words: str) -> Run:
    return next(run for run in RUNS if words in str(run))


def test_runs_have_sources_and_plans_that_fill_their_devices():
    """Each row names where it was published, a known model, and as many devices as its plan has."""
    assert len(RUNS) > 150
    for run in RUNS:
        slices, left = divmod(run.devices, run.cluster.n_devices)
        assert slices >= 1 and not left and len(run.source) > 20 and run.model in SIZES, run
        assert not run.cluster.n_devices % (run.tensor * run.stages) and not run.batch % slices, run
        assert run.keeps in ("all", "none") or set(run.keeps.split()) <= set(PRODUCTS), run
        assert run.seconds > 0 and run.batch % (run.microbatches * slices) == 0, run


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", ("MPT 125M, 8 a100, 1024 x", "MaxText 16B, 256 v5e", "Llama-3 8B, 128 h100-96g, 256 x 8192, fp8"))
def test_plans_without_stages_are_evaluated(words):
    """A figure of every kind of run is within a factor of two of the measured one, and judging again gives the same."""
    run = one(words)
    found = planned(run)
    assert found.on(run.cluster) == found.on(run.cluster) == predicted(run)
    assert 0.5 < predicted(run).seconds / run.seconds < 2


def test_plans_in_stages_are_evaluated(monkeypatch):
    """The best way to fill in what a pipeline of a small model leaves open has a step time and a peak."""
    monkeypatch.setitem(SIZES, "small", {"layers": 4, "width": 64, "heads": 4, "ffn": 256, "vocabulary": 128, "tied": True})
    run = replace(one("stages"), model="small", topology="8x1", devices=8, batch=16, length=32, tensor=2, stages=2, microbatches=4)
    found = predicted(run)
    assert found.seconds > 0 and found.peak_bytes > 0


def test_the_faster_of_two_plans_of_one_release_comes_first():
    """Pairs are of one model, release and precision, by device-seconds a token, and tell a wrong order."""
    slow = one("MPT 1B, 32 a100-40g")
    fast = one("MPT 1B, 64 a100-40g")
    rows = [Row(slow, Predicted(1.0, 0.0)), Row(fast, Predicted(1.0, 0.0)), Row(one("MaxText 16B"), Predicted(1.0, 0.0)), Row(fast, None)]
    (found,) = pairs(rows)
    assert found.runs == (fast, slow) and found.measured > 1.1 and found.is_ranked == (found.predicted > 1)
    assert pairs([Row(slow, Predicted(9.0, 0.0)), Row(replace(slow, devices=8), Predicted(1.0, 0.0))])[0].predicted != found.predicted
    assert len(errors(rows)) == 3 and "By family" in str(report(rows))


def test_kept_figures_are_of_the_same_code_and_plan(tmp_path):
    """A row is found once; another source of the same plan is not searched again, another plan is; a broken file is no hindrance."""
    path = tmp_path / "kept.json"
    path.write_text("{broken")
    made: list[Run] = []

    def make(run: Run) -> Predicted:
        made.append(run)
        return Predicted(float(len(made)), 0.0)

    run = one("MPT 1B, 32 a100-40g")
    first = Cache(path).found(run, make)
    assert Cache(path).found(replace(run, source="another", seconds=1.0), make) == first and len(made) == 1
    assert Cache(path).found(replace(run, microbatches=2), make) != first


def test_a_plan_that_cannot_be_predicted_says_why():
    """The other rows are printed all the same."""
    refused = row(replace(one("MPT 1B, 32 a100-40g"), tensor=7))
    assert refused.found is None and refused.refused and "Not predicted" in str(report([refused]))
