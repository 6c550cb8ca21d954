"""Calibration from end to end on virtual devices, and what it starts from on devices that are not here."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import autoshard
from autoshard.probe import calibration
from autoshard.probe.calibration import MEMORY_SHARE, calibrate, fit, start_of
from autoshard.probe.measure import Effort
from autoshard.probe.programs import COLLECTIVES, CollectiveProgram, Kernel


@pytest.fixture
def hurried(monkeypatch):
    """Measures hardly at all: whether it works, not how well."""
    monkeypatch.setattr(calibration, "QUICK", Effort(run_seconds=1e-4, total_seconds=0.0, least_rounds=1))


def test_calibration_measures_fits_and_reports(hurried, tmp_path):
    """All sections are measured and fitted, the cluster searches and comes back from its file, the report has every sample."""
    seen = []
    found = calibrate(jax.devices()[:4], quick=True, progress=lambda what, fraction: seen.append(fraction))
    assert set(found.errors) == {"matrix product", "elementwise", "collective"} and all(error >= 0 for error in found.errors.values())
    assert seen == sorted(seen) and seen[0] >= 0 and seen[-1] < 1
    assert all(sample.measured_seconds > 0 and sample.fitted_seconds > 0 for sample in found.samples)
    assert found.cluster.n_devices == 4 and found.cluster != found.start and "measured" in found.cluster.device.source
    found.cluster.save(tmp_path / "cluster.toml")
    assert autoshard.Cluster.load(tmp_path / "cluster.toml") == found.cluster
    strategy = autoshard.search(lambda x: x * 2, jax.ShapeDtypeStruct((8, 8), "float32"), cluster=found.cluster)
    assert strategy.cost.makespan_seconds > 0
    assert found.disturbance >= 1 and found.start_seconds > 0
    assert "other work ran" in str(replace(found, disturbance=2.0)) and "other work ran" not in str(replace(found, disturbance=1.0))
    text = str(found)
    assert all(name in text for name in found.constants) and all(sample.name in text for sample in found.samples)


def test_one_device_has_no_collectives(hurried):
    """Of a single device everything but collectives is measured, and the wires keep their figures."""
    found = calibrate(jax.devices()[:1], quick=True)
    assert set(found.errors) == {"matrix product", "elementwise"}
    assert found.cluster.interconnect == found.start.interconnect


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_compile_to_what_they_are_called(kind):
    """A loop of one collective has just that collective in it, along the axis that was asked for."""
    run = CollectiveProgram(kind, 4096, (2, 4), 1).compiled(jax.devices()[:8])(3)
    text = run.__closure__ and next(cell.cell_contents for cell in run.__closure__ if hasattr(cell.cell_contents, "lower"))
    args = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, list))
    lines = text.lower(*args).compile().as_text().splitlines()
    name = kind.replace("_", "-")
    names = [other.replace("_", "-") for other in COLLECTIVES]
    here = [other for line in lines for other in names if f" {other}(" in line or f" {other}-start(" in line]
    assert here == [name]


def test_both_kinds_of_time_move_the_fit():
    """Devices twice as slow as the catalogue says come out half as fast: measured rates, and those that follow them."""
    start = autoshard.Cluster.parse("h100:8")
    programs = list(calibration._programs(start, quick=True))
    assert {type(program) for program in programs} == {Kernel, CollectiveProgram}
    found, names = fit(start, programs, np.array([2 * program.predicted_seconds(start) for program in programs]))
    for name in ("bf16", "f32", "fp16", "int8"):
        reached = dict(start.device.flops_per_second)[name] * start.device.matrix_efficiency
        assert dict(found.device.flops_per_second)[name] == pytest.approx(reached / 2, rel=0.1)
    assert found.device.memory_rate == pytest.approx(start.device.memory_rate / 2, rel=0.1) and found.device.matrix_efficiency == 1.0
    assert found.device.kernel_overhead_seconds == pytest.approx(2 * start.device.kernel_overhead_seconds, rel=0.1)
    assert found.interconnect.bandwidth_bytes_per_second < 0.7 * start.interconnect.bandwidth_bytes_per_second
    assert not any("network" in name for name in names)


@pytest.mark.parametrize("cluster", ["h100:1", "h200:8", "v5e:4x4", "cpu:8"])
@pytest.mark.parametrize("quick", [True, False])
def test_what_is_measured_fits_the_device(cluster, quick):
    """On any device sizes stay a small part of its memory, and grow large enough to show its rates."""
    start = autoshard.Cluster.parse(cluster)
    programs = list(calibration._programs(start, quick))
    assert all(program.nbytes <= start.memory_limit_bytes * MEMORY_SHARE for program in programs)
    assert max(program.predicted_seconds(start) for program in programs) > 2e-4
    assert any(isinstance(program, CollectiveProgram) for program in programs) == (start.n_devices > 1)


class FakeDevice:
    """A device that is not here."""

    def __init__(self, platform, device_kind, stats=None, process_index=0):
        self.platform, self.device_kind, self.process_index, self.stats = platform, device_kind, process_index, stats

    def memory_stats(self):
        return self.stats


def test_an_unknown_device_starts_from_another_of_its_kind():
    """A GPU that the catalogue does not have gets a name of its own and another one's figures; its allocator says what memory there is."""
    start = start_of([FakeDevice("gpu", "NVIDIA L40S (rev. 2)", {"bytes_limit": 36_000_000_000})] * 4)
    assert (start.name, start.n_devices, start.memory_limit_bytes) == ("nvidia-l40s-rev-2:4", 4, 36_000_000_000)
    assert start.device.kind == "gpu" and "figures of a100" in start.device.source
    assert start_of([FakeDevice("gpu", "NVIDIA H200")]).device == autoshard.Cluster.parse("h200:1").device
