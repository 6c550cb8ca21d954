"""How near are predicted collectives of GPUs to published nccl-tests, and how much nearer is a fit?

Two questions. Of all-reduces on 2 to 8 A100 of one host, 1 MiB to 1 GiB (vTrain, MICRO 2024; the table is not part of this repository,
give its path with ``AUTOSHARD_NCCL_TABLE``): predicted from the catalogue, which nothing here was fitted to, and by the line that
`calibrate` would fit for each number of GPUs. And of what others published one figure at a time, inside hosts and between them.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.ir import Mesh
from autoshard.render import Heading, Paragraph, Part, Table, format_bytes
from benchmarks.cost_model.findings import Findings, Target

TABLE = Path(__file__).parents[2] / "../shared/data/nccl_all_reduce_a100.csv"
LARGE = 16 * 2**20

Sample = tuple[int, float]
"""Bytes, and measured seconds."""


@dataclass(frozen=True, slots=True)
class Published:
    """A bus bandwidth that somebody published, as nccl-tests define it (its doc/PERFORMANCE.md).

    Attributes:
        cluster: the nearest one of the catalogue.
        links: NVLinks of a GPU, where they are not the catalogue's.
        cards_per_host: network cards of a host, where they are not one a GPU.
    """

    source: str
    cluster: str
    kind: str
    nbytes: float
    bus_bandwidth: float
    links: float = 0.0
    cards_per_host: int = 0

    def predicted(self) -> float:
        """The bus bandwidth that the cost model says, in bytes per second."""
        cluster = Cluster.parse(self.cluster)
        wires, n = cluster.interconnect, cluster.n_devices
        if self.links:
            wires = replace(wires, bandwidth_bytes_per_second=wires.bandwidth_bytes_per_second * self.links)
        if self.cards_per_host:
            share = self.cards_per_host / cluster.topology[0]
            wires = replace(wires, network_bandwidth_bytes_per_second=wires.network_bandwidth_bytes_per_second * share)
        model = Communication(replace(cluster, interconnect=wires).links(Mesh((("all", n),))))
        factor = {"all_reduce": 2 * (n - 1) / n, "collective_permute": 1.0}[self.kind]
        return factor * self.nbytes / model.seconds(self.kind, self.nbytes, (0,))


PUBLISHED = (
    Published("nccl-tests issue 178: two A100 on NVLink", "a100:2", "all_reduce", 12e9, 208e9),
    Published("li-plus/playground cuda/nccl.md: sendrecv on 8 A100", "a100:8", "collective_permute", 2**30, 195.1e9),
    Published("nccl-tests issue 347: 8 H100", "h100:8", "all_reduce", 2**33, 479.4e9),
    Published("nccl issue 1374: 8 H800, 8 NVLinks of 18", "h100:8", "all_reduce", 2**33, 215e9, links=8 / 18),
    Published("nccl-tests issue 119: 3 x 8 A100, 4 cards a host", "a100-40g:8x3", "all_reduce", 2**27, 96e9, cards_per_host=4),
    Published("nccl issue 1368: 5 x 8 H100, 4 cards a host, ring", "h100:8x5", "all_reduce", 2**30, 190e9, cards_per_host=4),
)


def run(quick: bool, progress: Callable[[str, float], None]) -> Findings:
    """The errors against the table, where it is there, and against every published figure."""
    progress("published figures", 0.0)
    parts: list[Part] = [Heading("Bus bandwidth, GB/s"), _published()]
    errors = [abs(one.predicted() / one.bus_bandwidth - 1) for one in PUBLISHED]
    targets = [_at_most("published bus bandwidths, median error", 10, statistics.median(errors))]
    numbers: dict[str, object] = {"published": {one.source: error for one, error in zip(PUBLISHED, errors, strict=True)}}
    path = Path(os.environ.get("AUTOSHARD_NCCL_TABLE", TABLE))
    if path.is_file():
        progress(path.name, 0.5)
        table, found, more = _against(read(path))
        parts += [Heading("All-reduce on A100 of one host, error by GPUs and bytes"), table]
        return Findings("collectives of GPUs against nccl-tests", tuple(parts), (*found, *targets), numbers | more)
    parts.append(Paragraph(f"There is no table at {path}: set AUTOSHARD_NCCL_TABLE to the path of nccl_all_reduce_a100.csv."))
    return Findings("collectives of GPUs against nccl-tests", tuple(parts), tuple(targets), numbers)


def read(path: Path) -> dict[int, list[Sample]]:
    """By number of GPUs the measured times, out of place and in place averaged, as compilers use both."""
    samples: dict[int, list[Sample]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            seconds = (int(row["time_ns_out_of_place"]) + int(row["time_ns_in_place"])) / 2e9
            samples.setdefault(int(row["gpus"]), []).append((int(row["size_bytes"]), seconds))
    return samples


def errors(gpus: int, samples: Sequence[Sample]) -> list[float]:
    """Relative errors of the prediction from the catalogue."""
    model = Communication(Cluster.parse(f"a100:{gpus}").links(Mesh((("all", gpus),))))
    return [model.seconds("all_reduce", float(nbytes), (0,)) / seconds - 1 for nbytes, seconds in samples]


def fit_line(nbytes: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of times that grow with size: ``seconds = latency + bytes / bandwidth``.

    Both are at least zero, and minimise the squares of the relative error, so that short times count as much as long ones. The bandwidth
    is infinite where times do not grow.

    >>> fit_line([1e6, 1e9], [2e-5, 1.001e-2])
    (1e-05, 100000000000.0)

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    from scipy.optimize import nnls

    x, y = np.asarray(nbytes, float), np.asarray(seconds, float)
    if x.shape != y.shape or x.ndim != 1 or len(set(x)) < 2 or not np.all(y > 0) or not np.all(np.isfinite(y)):
        raise ValueError(f"a line is fitted to positive times of two or more sizes, got {len(x)} sizes and {len(y)} times.")
    scale = x.max()  # keeps both columns near one
    (latency, slope), _ = nnls(np.stack([1 / y, x / scale / y], axis=1) * y.min(), np.full_like(y, y.min()))
    return float(f"{latency:.12g}"), float(f"{scale / slope:.12g}") if slope else float("inf")


def fitted_errors(samples: Sequence[Sample]) -> list[float]:
    """Relative errors of the line fitted to these samples."""
    latency, bandwidth = fit_line(*zip(*samples, strict=True))
    return [(latency + nbytes / bandwidth) / seconds - 1 for nbytes, seconds in samples]


def _at_most(what: str, percent: float, error: float) -> Target:
    return Target(what, f"<= {percent} %", 100 * error, 100 * error <= percent)


def _published() -> Table:
    rows = []
    for one in PUBLISHED:
        predicted = one.predicted()
        error = f"{predicted / one.bus_bandwidth - 1:+.1%}"
        rows.append((one.source, one.kind, format_bytes(one.nbytes), f"{one.bus_bandwidth / 1e9:.0f}", f"{predicted / 1e9:.0f}", error))
    return Table(("source", "collective", ">bytes", ">measured", ">predicted", ">error"), tuple(rows))


def _against(samples: dict[int, list[Sample]]) -> tuple[Table, tuple[Target, ...], dict[str, object]]:
    predicted = {gpus: errors(gpus, measured) for gpus, measured in samples.items()}
    fitted = {gpus: fitted_errors(measured) for gpus, measured in samples.items()}
    sizes = sorted({nbytes for measured in samples.values() for nbytes, _ in measured})
    rows = []
    for nbytes in sizes:
        cells = [
            next((f"{error:+.0%}" for (size, _), error in zip(samples[gpus], predicted[gpus], strict=True) if size == nbytes), "")
            for gpus in samples
        ]
        rows.append((format_bytes(nbytes), *cells))
    large, small, line = [], [], []
    for gpus, measured in samples.items():
        for (nbytes, _), error, fit in zip(measured, predicted[gpus], fitted[gpus], strict=True):
            (large if nbytes >= LARGE else small).append(abs(error))
            if nbytes >= LARGE:
                line.append(abs(fit))
    medians = {name: statistics.median(found) for name, found in (("catalogue", large), ("small", small), ("fit", line))}
    targets = (
        _at_most("A100 all-reduce from 16 MiB, from the catalogue, median error", 15, medians["catalogue"]),
        _at_most("the same by calibrate's fit, median error", 5, medians["fit"]),
    )
    title = ("bytes", *(f">{gpus} GPUs" for gpus in samples))
    note = f"Below 16 MiB NCCL takes longer than its own model says: median error {medians['small']:.0%}."
    return Table(title, tuple(rows), notes=(note,)), targets, {"medians": medians}
