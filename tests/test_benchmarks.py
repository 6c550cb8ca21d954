"""The benchmarks run, and their arithmetic is right."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponents_are_those_of_power_laws(power, monkeypatch):
    """Seconds that grow as a power of the size give that power."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.search import exponent

    sizes = [100, 250, 1000, 8000]
    assert exponent(sizes, [3e-4 * n**power for n in sizes]) == pytest.approx(power)


def test_search_benchmark_runs():
    """One small case prints every phase's seconds as JSON."""
    command = [sys.executable, "-m", "benchmarks.search", "--depths", "1,2", "--devices", "8", "--repeats", "1", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    one, two = found["samples"]
    assert 0 < one["n_ops"] < two["n_ops"] and one["devices"] == 8
    assert all(len(sample[phase]) == 1 and sample[phase][0] > 0 for sample in (one, two) for phase in ("trace", "search"))
    assert set(found["exponents"]["8"]) == {"trace", "graph", "search"}


def test_harness_benchmark_runs():
    """A group JAX can run and one it cannot run all of: every case has an outcome, and none failed."""
    command = [sys.executable, "-m", "benchmarks.harnesses", "--quick", "--groups", "neg,lu", "--random", "1", "--processes", "1", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout)
    outcomes = found["outcomes"]
    assert len(outcomes) == 6 and {outcome["status"] for outcome in outcomes} <= {"equal", "unsupported"}
    assert all(outcome["sharded"] == ["search", "random"] for outcome in outcomes if outcome["group"] == "neg")


def test_rules_benchmark_runs():
    """One group prints its share, and the differences with their reasons, as JSON."""
    command = [sys.executable, "-m", "benchmarks.rules", "--groups", "igamma", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    group, everything = found["shares"]
    assert group["group"] == "igamma" and group["ours"] == group["equations"] == everything["equations"] > group["theirs"]
    assert found["differences"] and all(difference["reasons"] for difference in found["differences"])


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the TPU compiler is installed")
def test_cost_model_benchmark_says_what_it_lacks():
    """A section that needs the TPU compiler says what to install, and the exit code tells."""
    command = [sys.executable, "-m", "benchmarks.cost_model", "flops", "--quick", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "pip install 'autoshard[tpu]'" in json.loads(done.stdout)["flops"]["failed"]


@pytest.mark.parametrize("name", ["gpt", "gpt_scan_remat", "moe", "resnet", "unet", "lstm"])
def test_benchmark_models_and_their_tensor_parallelism_fit(name, monkeypatch):
    """Every model traces abstractly, and its hand-written specs name leaves it has, in sizes that divide."""
    monkeypatch.syspath_prepend(ROOT)
    import autoshard
    from benchmarks.models import MODELS

    function, args = MODELS[name].make()
    found = autoshard.evaluate(function, *args, cluster="v5e:2x4", mesh={"data": 2, "model": 4}, in_specs=MODELS[name].tensor_parallel)
    assert found.cost.peak_bytes > 1e9 and found.cost.flops > 1e12
