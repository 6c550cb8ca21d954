"""``autoshard calibrate``: the file it writes is one that ``--cluster`` reads."""

import json

import jax
import pytest

from autoshard.cluster import Cluster
from autoshard.probe import calibration
from autoshard.probe.measure import Effort


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Measures hardly at all: whether it works, not how well."""
    monkeypatch.setattr(calibration, "QUICK", Effort(run_seconds=1e-4, total_seconds=0.0, least_rounds=1))


@pytest.mark.slow
def test_calibrate_writes_what_search_reads(run, tmp_path):
    """The report names the file; the JSON has the same cluster; a search takes the file."""
    code, out, _ = run("calibrate", "--quick", "--json", "--out", "mine.toml")
    found = json.loads(out)
    assert code == 0 and Cluster.from_dict(found["cluster"]) == Cluster.load(tmp_path / "mine.toml")
    assert set(found["errors"]) == {"matrix product", "elementwise", "collective"}
    code, out, _ = run("search", "user_program:train_step", "--args", "user_program:example_args", "--cluster", "mine.toml", "--json")
    assert code == 0 and json.loads(out)["cluster"] == found["cluster"]


@pytest.mark.slow
def test_calibrate_prints_measured_next_to_fitted(run, tmp_path):
    """A person reads a table of constants, one of each section, the errors, and what to do with the file."""
    code, out, _ = run("calibrate", "--quick")
    words = ("device.kernel_overhead_seconds", "Matrix product", "Elementwise", "Collective", "median error", "--cluster cluster.toml")
    assert code == 0 and all(word in out for word in words) and (tmp_path / "cluster.toml").exists()


def test_an_interrupted_calibration_leaves_nothing(run, monkeypatch, tmp_path):
    """Ctrl-C ends the command with the shell's code for it, and no file."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "measure", interrupted)
    code, _, err = run("calibrate", "--quick", "--out", tmp_path / "cluster.toml")
    assert code == 130 and "interrupted" in err and not (tmp_path / "cluster.toml").exists()


def test_a_single_device_says_what_was_not_measured(run, monkeypatch, tmp_path):
    """Of one device the report says that there is no collective, and the command how to measure some; the file is there."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    code, out, _ = run("calibrate", "--quick")
    out = " ".join(out.split())
    assert code == 0 and "Calibration of 1 cpu device" in out and "no collective" in out and "calibrate --devices 8" in out
    assert Cluster.load(tmp_path / "cluster.toml").n_devices == 1
