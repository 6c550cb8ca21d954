"""The benchmark of the cost model reads schedules, runs and times as it says."""

from functools import partial
from pathlib import Path

import pytest
from schedules import schedule

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_published_runs_are_read_and_predicted(tmp_path, monkeypatch):
    """A run of the table's form is predicted; twice the stages or the micro-batches' number takes longer, fewer layers less."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.cost_model.published import predicted, read

    table = tmp_path / "runs.csv"
    head = "\ufeffParameters (billion),# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,t,d,p,ms\n"
    rows = ("0.1,8,64,8,512,8,4,256,2,4,1,10", "0.1,8,128,8,512,8,4,256,2,4,1,10", "0.1,8,64,8,512,8,2,256,2,4,1,10")
    table.write_text(head + "\n".join(rows), encoding="utf-8")
    one, longer, shorter = (predicted(run) for run in read(table))
    assert 0 < shorter < one < longer


@pytest.mark.slow
def test_a_ranking_that_was_interrupted_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Nothing that was compiled is compiled again, progress never goes back, and every strategy gets its rank."""
    monkeypatch.syspath_prepend(ROOT)
    from autoshard.verify import Ahead
    from benchmarks import models
    from benchmarks.cost_model import compiled, ranking

    asked = []

    def compile_ahead(lowered, mesh, topology, cycles):
        asked.append(lowered)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return Ahead(schedule(len(asked)), 0.0, 0.0, None, True, 0.0)

    monkeypatch.setenv("AUTOSHARD_BENCHMARK_KEEP", str(tmp_path))
    monkeypatch.setattr(compiled, "compile_ahead", compile_ahead)
    small = partial(models.gpt, 1, width=64, heads=8, vocabulary=64, batch=8, length=16)
    monkeypatch.setattr(ranking, "PROGRAMS", {"gpt": small})
    told: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        ranking.run(True, lambda what, fraction: told.append(fraction))
    assert told == sorted(told)
    found = ranking.run(True, lambda what, fraction: told.append(fraction))
    assert len(found.numbers["gpt"]) >= 12
    assert len(asked) == 1 + len(list(tmp_path.iterdir())), "the interrupted one was asked for again, the others were not"


@pytest.mark.sample(1)
@pytest.mark.parametrize("section", ["memory", "gpu"])
def test_peaks_are_held_against_the_compilers(section, monkeypatch):
    """Of large programs each section says how far the median, nine in ten and the lowest are off; here the compiler is ours."""
    monkeypatch.syspath_prepend(ROOT)
    from importlib import import_module

    from autoshard.verify import Ahead
    from benchmarks.models import mlp

    module = import_module(f"benchmarks.cost_model.{section}")
    small = ("mlp", partial(mlp, 1, 128, 256, 64), "v5e:2x4", {"data": 8})
    for name in {"DESIGNED", "UNSEEN", "ON_V5P"} & set(vars(module)):
        monkeypatch.setattr(module, name, (small,))
    hlo = "HloModule m\n\nENTRY %main (p: f32[4,8]) -> f32[4,4] {\n  %p = f32[4,8]{1,0} parameter(0)\n"
    hlo += "  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n}\n"
    monkeypatch.setattr(module, "compiled", lambda case: Ahead(hlo, max(2 * case.strategy.cost.peak_bytes, 1e9), 1e9, None, True, 1.0))
    monkeypatch.setattr(module, "SMALLEST_BYTES", 1e3)
    found = module.run(False, lambda *_: None)
    peaks = [target for target in found.targets if "error" in target.what or "below" in target.what]
    assert len(peaks) >= 6 and not any(target.reached for target in peaks) and len(found.numbers["cases"]) >= 6
