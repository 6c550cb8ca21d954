"""How tight are the bounds of message passing, and how fast is exact inference, on fixed pairwise models?

``python -m benchmarks.inference`` reads the models of ``benchmarks/instances`` (the search tables of small train steps on one mesh axis of
four v5e chips, in microseconds, and a frustrated grid) and shows, of each:

- *bound*: the lower bound of TRW-S after some sweeps, as a gap to the optimum, with the seconds it took;
- *exact*: the seconds of variable elimination, and the induced width;
- *fixing*: the seconds of reduced-cost fixing, its sweeps, and the gap that it proves at a tolerance of zero.

A gap that is not zero where fixing ends, or an answer that is not the recorded optimum, fails. ``--record`` makes the models anew from
their programs; nothing is allocated or compiled. All of it takes half a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from autoshard import Cluster
from autoshard.cli.terminal import show
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.inference.elimination import eliminate
from autoshard.inference.model import PairwiseModel, load
from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.inference.trw_s import MessagePassing
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.reductions import low_degree
from autoshard.render import Report, Table, format_count, format_percent, format_seconds
from autoshard.rules import rules_of
from autoshard.trace import trace
from benchmarks.single_dtype import gpt, moe, unet

INSTANCES = Path(__file__).parent / "instances"
SWEEPS = (2, 20, 240)
DIGITS = 4  # of costs in files
CLUSTER, AXIS = "v5e:2x2", {"data": 4}
PROGRAMS: Mapping[str, partial] = {
    "gpt": partial(gpt, 2, width=256, heads=8, vocabulary=1024, batch=16, length=64),
    "moe": partial(moe, 1, width=256, heads=8, vocabulary=1024, batch=16, length=64),
    "unet": partial(unet, channels=16, batch=16, side=32),
}
GRID = "frustrated_grid"


@dataclass(frozen=True, slots=True)
class Measured:
    """What inference took on one model.

    Attributes:
        name: of the file.
        model: the model itself.
        optimum: its least energy, as recorded.
        bounds: per number of sweeps, the lower bound and its seconds.
        exact: the least energy that elimination found; ``width`` and ``exact_seconds`` are its induced width and time.
        fixed, fixed_bound: the energy and the bound of reduced-cost fixing; ``sweeps`` and ``fixed_seconds`` are what it took.
    """

    name: str
    model: PairwiseModel
    optimum: float
    bounds: tuple[tuple[float, float], ...]
    exact: float
    width: int
    exact_seconds: float
    fixed: float
    fixed_bound: float
    sweeps: int
    fixed_seconds: float

    @property
    def wrong(self) -> str:
        """The first guarantee that was broken, in words; empty: none was."""
        close = 1e-9 * abs(self.optimum)
        if abs(self.exact - self.optimum) > close:
            return f"elimination found {self.exact}, and the optimum is {self.optimum}"
        if abs(self.fixed - self.optimum) > close or self.fixed_bound < self.optimum - 1e-6 * abs(self.optimum):
            return f"reduced-cost fixing found {self.fixed} with a bound of {self.fixed_bound}, and the optimum is {self.optimum}"
        if any(bound > self.optimum + close for bound, _ in self.bounds):
            return f"a lower bound exceeds the optimum {self.optimum}"
        return ""


def measured(name: str) -> Measured:
    """Inference on the model of a file."""
    model, facts = load(INSTANCES / f"{name}.json")
    bounds = []
    for sweeps in SWEEPS:
        began = time.perf_counter()
        passing = MessagePassing(model)
        passing.run(sweeps)
        bounds.append((passing.bound(), time.perf_counter() - began))
    began = time.perf_counter()
    reduced = low_degree.apply(model)
    exact = eliminate(reduced.model)
    exact_seconds = time.perf_counter() - began
    began = time.perf_counter()
    fixing = ReducedCostFixing(1 << 21, SWEEPS[-1], 0.0)
    labels, bound, _ = fixing.solve(reduced.model)
    fixed_seconds = time.perf_counter() - began
    optimum = facts["optimum"]
    assert isinstance(optimum, float)
    fixed = model.energy(reduced.invert(labels))
    best = model.energy(reduced.invert(exact.labels))
    return Measured(name, model, optimum, tuple(bounds), best, exact.width, exact_seconds, fixed, bound, fixing.sweeps, fixed_seconds)


def names() -> list[str]:
    """The names of all recorded models."""
    return sorted(path.stem for path in INSTANCES.glob("*.json"))


def record(name: str) -> None:
    """Makes a model anew, and writes its file."""
    model, source = (frustrated_grid(), "a 5 x 5 torus of 4 labels, random costs of both signs") if name == GRID else search_tables(name)
    reduced = low_degree.apply(model)
    best = reduced.invert(eliminate(reduced.model).labels)
    INSTANCES.mkdir(exist_ok=True)
    model.save(INSTANCES / f"{name}.json", source=source, optimum=model.energy(best), labels=best.tolist())


def search_tables(name: str) -> tuple[PairwiseModel, str]:
    """The tables of a program's search in microseconds, rounded, and their source in words."""
    function, args = PROGRAMS[name]()
    graph, cluster = trace(function, *args).graph, Cluster.parse(CLUSTER)
    tables = Problem(program_facts(graph, rules_of(graph), compiler_of(cluster)), CostModel(cluster, Mesh.of(AXIS))).whole_tables()
    rounded: dict[int, np.ndarray] = {}

    def one(table: np.ndarray) -> np.ndarray:
        if id(table) not in rounded:
            digits = np.vectorize(lambda cost: float(f"{1e6 * cost:.{DIGITS}g}"))
            rounded[id(table)] = digits(table)
        return rounded[id(table)]

    model = PairwiseModel(tuple(map(one, tables.unary)), {pair: one(table) for pair, table in tables.pairs.items()})
    sizes = ", ".join([*map(str, PROGRAMS[name].args), *(f"{key}={value}" for key, value in PROGRAMS[name].keywords.items())])
    return model, f"benchmarks.single_dtype.{name}({sizes}) on {CLUSTER}, mesh {AXIS}, microseconds"


def frustrated_grid(side: int = 5, n_labels: int = 4) -> PairwiseModel:
    """A torus whose random costs of both signs no messages bound tightly."""
    generator = np.random.default_rng(0)
    unary = [np.round(generator.normal(size=n_labels), 3) for _ in range(side * side)]
    pairs = {}
    for row in range(side):
        for column in range(side):
            here = row * side + column
            for other in (row * side + (column + 1) % side, (row + 1) % side * side + column):
                pairs[here, other] = np.round(generator.normal(size=(n_labels, n_labels)), 3)
    return PairwiseModel(unary, pairs)


def report(found: Sequence[Measured]) -> Report:
    """The measurements as a table, and what failed."""
    rows = [
        (
            one.name,
            format_count(len(one.model.unary)),
            format_count(one.model.n_entries),
            *(f"{format_percent((one.optimum - bound) / abs(one.optimum))} in {format_seconds(seconds)}" for bound, seconds in one.bounds),
            f"{format_seconds(one.exact_seconds)}, width {one.width}",
            f"{format_seconds(one.fixed_seconds)}, {one.sweeps} sweeps",
            one.wrong or "optimal",
        )
        for one in found
    ]
    head = ("model", ">variables", ">entries", *(f"gap, {sweeps} sweeps" for sweeps in SWEEPS), "elimination", "fixing", "")
    return Report("Inference on fixed models: gaps of lower bounds to the optimum", (Table(head, tuple(rows)),))


def main() -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="models; all unless given")
    parser.add_argument("--record", action="store_true", help="make the models anew from their programs")
    options = parser.parse_args()
    chosen = options.names or [*PROGRAMS, GRID]
    if options.record:
        for name in chosen:
            record(name)
    found = [measured(name) for name in chosen]
    show(report(found))
    return int(any(one.wrong for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
