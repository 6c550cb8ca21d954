"""Calibration of the cluster that this process runs on: measured times, fitted constants, and the error of the fit.

*Measured.* Matrix products of several sizes and dtypes, elementwise work bound by memory and by arithmetic, and with several devices
each collective over message sizes, on all of them and along both axes of a two-dimensional mesh. All devices work at once.

*Fitted.* First the device: rates of the matrix unit, rate of elementwise work, memory bandwidth, cost of a kernel. Then the
interconnect: launch, latency, bandwidths. Each minimises the relative error of the searches' cost model (`autoshard.probe.fit`). Constants
on which no measurement depends keep the catalogue's figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.cluster import Cluster
from autoshard.probe.fit import constant, fit_cluster, with_constant
from autoshard.probe.measure import Effort, measure, seconds_of
from autoshard.probe.programs import COLLECTIVES, ELEMENTWISE, CollectiveProgram, Kernel, Program, elementwise, matrix_product
from autoshard.progress import Progress, silent
from autoshard.render import Heading, Paragraph, Part, Report, Reported, Table, format_bytes, format_flops, format_percent, format_seconds

DEVICE_CONSTANTS = (
    "device.flops_per_second.f32",
    "device.flops_per_second.bf16",
    "device.vector_flops_per_second",
    "device.memory_bandwidth_bytes_per_second",
    "device.kernel_overhead_seconds",
)
# Rates that are not measured are scaled with one that is: narrow types run on the unit of bfloat16, if there is one.
FOLLOWS = {"fp16": "bf16", "fp8": "bf16", "int8": "bf16", "f64": "f32"}
LINK_CONSTANTS = ("launch_seconds", "latency_seconds", "bandwidth_bytes_per_second", "copy_bandwidth_bytes_per_second")
LEVEL_CONSTANTS = ("bandwidth_bytes_per_second", "latency_seconds")
NETWORK_CONSTANTS = ("network_bandwidth_bytes_per_second", "network_latency_seconds")

DISTURBED = 1.5  # estimate: ratio of a typical run to the fastest of its program, above which the report warns
LONGEST_SECONDS = 0.01  # sizes grow until one execution takes about this long
MEMORY_SHARE = 1 / 64  # or this share of a device's memory
THOROUGH = Effort(run_seconds=0.005, total_seconds=40.0)
QUICK = Effort(run_seconds=0.002, total_seconds=6.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time, next to its predictions.

    Attributes:
        section: ``matrix product``, ``elementwise`` or ``collective``.
        name, size: what ran, on how much.
        measured_seconds: of one execution, with all devices at work.
        fitted_seconds: the prediction with the fitted constants.
        catalogue_seconds: the prediction with the constants before the fit.
    """

    section: str
    name: str
    size: str
    measured_seconds: float
    fitted_seconds: float
    catalogue_seconds: float

    @property
    def error(self) -> float:
        """The relative error of the fit: ``fitted / measured - 1``, or ``measured / fitted - 1`` where the fit is too short."""
        return _error(self.fitted_seconds, self.measured_seconds)


@dataclass(frozen=True, slots=True)
class Calibration(Reported):
    """A calibrated cluster, and the error of the fit.

    Attributes:
        cluster: the devices of this process with fitted constants.
        start: the cluster before the fit: the catalogue's figures, or for an unknown device those of another.
        samples: all measured times.
        constants: names of the fitted constants.
        start_seconds: from the host's call of an almost empty program to its end; in no prediction.
        disturbance: the ratio of a program's typical run to its fastest; 1.0 on an idle machine.
    """

    cluster: Cluster
    start: Cluster
    samples: tuple[Sample, ...]
    constants: tuple[str, ...]
    start_seconds: float
    disturbance: float

    @property
    def errors(self) -> dict[str, float]:
        """Per section the median error of the fit: 0.1 where a typical prediction is 10 % too long or too short."""
        return {section: float(np.median([sample.error for sample in group])) for section, group in self._sections()}

    def report(self) -> Report:
        """The fitted constants, measured next to fitted times, and the errors; for terminals and notebooks."""
        parts: list[Part] = [_constants_table(self)]
        errors = []
        for section, group in self._sections():
            columns = ("program", "size", ">measured", ">fitted", ">error", ">before")
            parts += [Heading(section.capitalize()), Table(columns, tuple(map(_row, group)))]
            fitted = [s.error for s in group]
            before = [_error(s.catalogue_seconds, s.measured_seconds) for s in group]
            quantiles = (format_percent(float(np.quantile(fitted, q))) for q in (0.5, 0.9))
            errors.append((section, str(len(group)), *quantiles, format_percent(float(np.median(before)))))
        parts += [
            Heading("Error of the fit"),
            Table(("section", ">measured", ">median error", ">nine in ten below", ">median before"), tuple(errors)),
            Paragraph(
                "The error is the ratio of the longer to the shorter of predicted and measured time, less one. 'Before' is the prediction "
                f"without the fit. Starting a program takes {format_seconds(self.start_seconds)} more, which no prediction counts."
            ),
        ]
        if self.cluster.n_devices == 1:
            parts.append(Paragraph("One device was measured, and no collective: those keep the figures that calibration started from."))
        if self.disturbance > DISTURBED:
            parts.append(
                Paragraph(
                    f"A typical run took {self.disturbance:.1f} times as long as the fastest of its program: other work ran on the "
                    "machine. Calibrate again when it is quiet."
                )
            )
        n = self.cluster.n_devices
        return Report(f"Calibration of {n} {self.cluster.device.name} device{'s' * (n > 1)}", tuple(parts))

    def to_json(self) -> dict[str, Any]:
        """The calibration as plain JSON values."""
        before = _reached(self.start)
        return {
            "cluster": self.cluster.to_dict(),
            "start": self.start.to_dict(),
            "constants": {name: {"fitted": constant(self.cluster, name), "before": constant(before, name)} for name in self.constants},
            "errors": self.errors,
            "start_seconds": self.start_seconds,
            "disturbance": self.disturbance,
            "samples": [
                {
                    "section": s.section,
                    "name": s.name,
                    "size": s.size,
                    "measured_seconds": s.measured_seconds,
                    "fitted_seconds": s.fitted_seconds,
                    "before_seconds": s.catalogue_seconds,
                }
                for s in self.samples
            ],
        }

    def _sections(self) -> list[tuple[str, list[Sample]]]:
        names = dict.fromkeys(sample.section for sample in self.samples)
        return [(name, [sample for sample in self.samples if sample.section == name]) for name in names]


def calibrate(devices: Sequence[Any] | None = None, *, quick: bool = False, progress: Progress = silent) -> Calibration:
    """The cluster of this process's devices with measured constants; takes about a minute on 8 virtual devices of 2 cores.

    ``calibrate().cluster.save("cluster.toml")`` keeps it; `Cluster.load` and ``autoshard search --cluster cluster.toml`` read it.

    Args:
        devices: jax devices of one kind; all of this process's by default.
        quick: fewer sizes and repetitions, in about ten seconds.
        progress: called with the current activity and the fraction done.
    """
    devices = list(jax.devices() if devices is None else devices)
    settled = _of_process_0 if len({device.process_index for device in devices}) > 1 else float
    progress(f"starting {len(devices)} devices", 0.0)
    start = start_of(devices)
    start_seconds = _start_seconds(devices)
    programs = list(_programs(start, quick))
    measured, disturbance = measure(
        [program.compiled(devices) for program in programs],
        [program.predicted_seconds(start) * program.chained for program in programs],
        start_seconds,
        QUICK if quick else THOROUGH,
        lambda fraction: progress(f"measuring {len(programs)} programs on {len(devices)} devices", 0.95 * fraction),
        settled,
    )
    seconds = np.array([settled(time) / program.chained for time, program in zip(measured, programs, strict=True)])
    progress("fitting", 0.95)
    cluster, constants = fit(start, programs, seconds)
    samples = tuple(
        Sample(p.section, p.name, p.size, float(time), p.predicted_seconds(cluster), p.predicted_seconds(start))
        for p, time in zip(programs, seconds, strict=True)
    )
    return Calibration(cluster, start, samples, constants, start_seconds, disturbance)


def fit(start: Cluster, programs: Sequence[Program], seconds: np.ndarray) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with fitted constants for the programs' measured times, and the names of these constants."""
    kernels = [k for k, program in enumerate(programs) if isinstance(program, Kernel)]
    collectives = [k for k, program in enumerate(programs) if isinstance(program, CollectiveProgram)]

    def fitted(cluster: Cluster, which: list[int], names: Sequence[str]) -> Cluster:
        return fit_cluster(cluster, names, lambda c: np.array([programs[k].predicted_seconds(c) for k in which]), seconds[which])

    reached = _reached(start)
    cluster = fitted(reached, kernels, DEVICE_CONSTANTS)
    rates = dict(cluster.device.flops_per_second)
    for name, measured in FOLLOWS.items():
        if name in rates:
            moved = constant(cluster, f"device.flops_per_second.{measured}") / constant(reached, f"device.flops_per_second.{measured}")
            cluster = with_constant(cluster, f"device.flops_per_second.{name}", rates[name] * moved)
    names = DEVICE_CONSTANTS
    if collectives:
        several_hosts = start.interconnect.kind == "switch" and len(start.topology) > 1
        fields = (*LINK_CONSTANTS, *(NETWORK_CONSTANTS if several_hosts else ()))
        of_levels = (f"levels.{number}.{field}" for number in range(len(start.levels)) for field in LEVEL_CONSTANTS)
        links = (*(f"interconnect.{field}" for field in fields), *of_levels)
        for name in links:
            if not constant(cluster, name):  # the fit is of logarithms: zero costs start from small ones
                little = 1e-7 if name.endswith("_seconds") else 10 * cluster.interconnect.bandwidth_bytes_per_second
                cluster = with_constant(cluster, name, little)
        cluster = fitted(cluster, collectives, links)
        names = (*names, *links)
    source = f"measured by autoshard calibrate; not measured: {start.device.source}"
    wires = f"measured by autoshard calibrate; not measured: {start.interconnect.source}" if collectives else start.interconnect.source
    return replace(cluster, device=replace(cluster.device, source=source), interconnect=replace(cluster.interconnect, source=wires)), names


def _reached(cluster: Cluster) -> Cluster:
    """The cluster with effective rates in place of peaks, as the fit will have it."""
    device = cluster.device
    reached = replace(
        device,
        flops_per_second=tuple((name, rate * device.matrix_efficiency) for name, rate in device.flops_per_second),
        memory_bandwidth_bytes_per_second=device.memory_rate,
        matrix_efficiency=1.0,
        memory_efficiency=1.0,
        low_share=0.0,  # what is published is of predictions by the catalogue
        high_share=0.0,
        late_share=0.0,
        pair_error=0.0,
    )
    return replace(cluster, device=reached)


def start_of(devices: Sequence[Any]) -> Cluster:
    """The cluster of these devices before the fit: from the catalogue, or for an unknown device like one of its platform."""
    known = Cluster.of_devices(devices)
    stats = next((device for device in devices if device.process_index == jax.process_index()), devices[0]).memory_stats()
    if stats and stats.get("bytes_limit"):  # the allocator's memory, whose share is set by the environment
        known = replace(known, memory_limit_bytes=int(stats["bytes_limit"]))
    return known


def _of_process_0(seconds: float) -> float:
    """The number that process 0 has, in all processes."""
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))


def _start_seconds(devices: Sequence[Any]) -> float:
    """Seconds from the host's call of an almost empty program on all devices to its end."""
    run = elementwise("x / 2 + 1 / 4", 1, "float32").compiled(devices)(1)
    run()
    return min(seconds_of(run) for _ in range(20))


# -- measured programs ---------------------------------------------------------------------------------------------------


def _programs(start: Cluster, quick: bool) -> Iterable[Program]:
    """The programs to measure on a cluster, small to large."""
    room = start.memory_limit_bytes * MEMORY_SHARE

    def affordable(program: Program) -> bool:
        return program.predicted_seconds(start) <= LONGEST_SECONDS and program.nbytes <= room

    for dtype in ("float32", "bfloat16"):
        square = _growing(lambda side, d=dtype: matrix_product(side, side, d), 32, 4 if quick else 2, affordable)
        yield from square
        if not quick:
            yield from _growing(lambda side, d=dtype: matrix_product(max(side // 16, 1), side, d), 256, 4, affordable)
    for name in ELEMENTWISE:
        yield from _growing(lambda side, n=name: elementwise(n, side, "float32"), 128, 4 if quick else 2, affordable)
    if not quick:
        yield from _growing(lambda side: elementwise("x / 2 + 1 / 4", side, "bfloat16"), 128, 4, affordable)
    for sizes, axis in _axes(start.n_devices):
        if quick and axis:
            continue
        for kind in COLLECTIVES:
            least = 2**12 if not quick or len(sizes) == 1 else 2**16
            yield from _growing(lambda n, k=kind, s=sizes, a=axis: CollectiveProgram(k, n, s, a), least, 32 if quick else 8, affordable)


def _growing(make: Callable[[int], Program], least: int, step: int, affordable: Callable[[Program], bool]) -> list[Program]:
    """Programs of growing size as long as they are affordable, at least one."""
    found = [make(least)]
    while affordable(larger := make(least := least * step)):
        found.append(larger)
    return found


def _axes(n: int) -> list[tuple[tuple[int, ...], int]]:
    """Pairs of mesh sizes and an axis: all devices on one axis, and both axes of a rectangle if there is one."""
    if n == 1:
        return []
    side = next((d for d in range(2, math.isqrt(n) + 1) if n % d == 0), 0)
    return [((n,), 0), *(((side, n // side), axis) for axis in (0, 1) if side)]


# -- report --------------------------------------------------------------------------------------------------------------


def _error(predicted: float, measured: float) -> float:
    ratio = predicted / measured
    return max(ratio, 1 / ratio) - 1 if ratio > 0 else math.inf


def _row(sample: Sample) -> tuple[str, ...]:
    """A program's times, measured, fitted and before, in words."""
    measured, fitted, before = sample.measured_seconds, sample.fitted_seconds, sample.catalogue_seconds
    times = format_seconds(measured), format_seconds(fitted)
    return sample.name, sample.size, *times, _signed(fitted / measured - 1), _signed(before / measured - 1)


def _signed(share: float) -> str:
    return ("+" if share > 0 else "") + format_percent(share)


def _constants_table(calibration: Calibration) -> Table:
    def shown(name: str, cluster: Cluster) -> str:
        value = constant(_reached(cluster), name)
        return format_seconds(value) if name.endswith("_seconds") else f"{(format_flops if 'flops' in name else format_bytes)(value)}/s"

    rows = tuple((name, shown(name, calibration.cluster), shown(name, calibration.start)) for name in calibration.constants)
    return Table(("constant", ">fitted", ">before"), rows)
