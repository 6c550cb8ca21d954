"""Does the cost model rank strategies as the TPU compiler does? Predicted makespan against the compiler's own schedule.

Strategies are the baselines', a searcher's, hand-written tensor parallelism, batches split over one mesh axis only, and what random
changes make of all these (a few decisions are changed, the rest then settles for what is cheapest beside them), on three meshes of eight
v5e chips. Each is compiled to the end, and its schedule timed as `autoshard.verify.schedule` says.

There are some fifty strategies a program, and compiling one takes half a minute and more of two cores: an hour in all. What was compiled
is kept as it comes: with ``--keep FOLDER`` a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from scipy.stats import rankdata

from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.collectives import Communication
from autoshard.ir import Assignment, Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.render import Paragraph, Part, Table, format_seconds
from autoshard.rules import rules_of
from autoshard.run.recorded import record_of
from autoshard.search import DataParallel, FullySharded, RecursiveProgramming, Solution
from autoshard.search.propagation import Propagation
from autoshard.trace import trace
from autoshard.verify import Clock, scheduled_seconds
from benchmarks import single_dtype
from benchmarks.cost_model.compiled import Case, compiled
from benchmarks.cost_model.findings import Findings, Target, quantile, spearman
from benchmarks.models import Program

CLUSTER = "v5e:2x4"
CLOCK = Clock.of(Cluster.parse(CLUSTER).device)  # predictions are compared: with products at the share of the peak that these have
MESHES = ({"data": 8}, {"data": 2, "model": 4}, {"data": 4, "model": 2})
PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt": lambda: single_dtype.gpt(1, width=512, heads=8, vocabulary=8192, batch=64, length=512),
    "moe": lambda: single_dtype.moe(layers=1, width=256, heads=4, experts=8, vocabulary=4096, batch=64, length=256),
}
# Dimensions that tensor parallelism splits, by what an argument's path contains.
TENSOR = {
    "gpt": {"qkv": 2, "'out'": 0, "'up'": 1, "'down'": 0, "embed": 0},
    "moe": {"qkv": 2, "'out'": 0, "'up'": 2, "'down'": 1},
}
CHANGES = (2, 4, 8, 12, 20, 30)
CHANGED = 11  # strategies a mesh that random changes make


def run(quick: bool, progress: Callable[[str, float], None]) -> Findings:
    """Spearman's correlation of each program; quick: a dozen strategies of one program."""
    parts: list[Part] = []
    targets, numbers = [], {}
    programs = list(PROGRAMS.items())[: 1 if quick else None]
    for number, (name, make) in enumerate(programs):
        found = []
        every = list(_strategies(name, make(), 2 if quick else CHANGED))
        every = every[:: max(1, len(every) // 12)] if quick else every
        for position, (label, case) in enumerate(every):
            progress(f"{name}, {label}", (number + position / len(every)) / len(programs))
            record = case.strategy.record
            links = Communication(Cluster.parse(CLUSTER).links(record.mesh))
            scheduled = scheduled_seconds(compiled(case, cycles=True).hlo, record.mesh, links, CLOCK)
            found.append((label, record.cost.makespan_seconds, scheduled))
        rank = spearman([one for _, one, _ in found], [two for _, _, two in found])
        errors = [abs(one / two - 1) for _, one, two in found]
        rows = tuple((label, format_seconds(one), format_seconds(two), f"{one / two:.2f}") for label, one, two in found)
        parts += [
            Table((f"{name}, strategy", ">predicted", ">scheduled", ">ratio"), rows),
            Paragraph(
                f"Median error {quantile(errors, 0.5):.1%}, nine in ten within {quantile(errors, 0.9):.1%}. "
                f"Furthest from their place: {', '.join(_misplaced(found))}."
            ),
        ]
        targets.append(Target(f"{name}, Spearman over {len(found)} strategies", ">= 0.95", rank, rank >= 0.95))
        numbers[name] = [{"strategy": label, "predicted": one, "scheduled": two} for label, one, two in found]
    return Findings("does it rank strategies as the TPU compiler does?", tuple(parts), tuple(targets), numbers)


def _misplaced(found: list[tuple[str, float, float]]) -> list[str]:
    """The five strategies whose ranks differ most, and by how many places they are predicted too slow.

    >>> _misplaced([("a", 1.0, 1.0), ("b", 4.0, 2.0), ("c", 3.0, 3.0), ("d", 2.0, 4.0)])
    ['b (+2)', 'd (-2)', 'a (+0)', 'c (+0)']
    """
    predicted, scheduled = (rankdata([one[k] for one in found]) for k in (1, 2))
    places = [(label, int(p - s)) for (label, _, _), p, s in zip(found, predicted, scheduled, strict=True)]
    return [f"{label} ({place:+d})" for label, place in sorted(places, key=lambda one: -abs(one[1]))[:5]]


# -- strategies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Here:
    """The 'searcher' of strategies made here."""

    name: str


def _strategies(name: str, program: Program, changed: int) -> Iterator[tuple[str, Case]]:
    """Different strategies of a program, each once."""
    function, args = program
    traced = trace(function, *args, donate_argnums=0, axis_names=("data", "model"))
    cluster = Cluster.parse(CLUSTER)
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    seen = set()
    for sizes in MESHES:
        mesh = Mesh.of(sizes)
        problem = Problem(facts, CostModel(cluster, mesh))
        for label, assignment in _assignments(problem, TENSOR[name], changed):
            key = mesh.sizes, *(tuple(sorted(each.items())) for each in (assignment.choices, assignment.layouts, assignment.copies))
            if key not in seen:
                seen.add(key)
                solution = Solution(problem.evaluate(assignment))
                strategy = Strategy(record_of(traced, cluster, mesh, solution, _Here(label)), traced)
                yield f"{'x'.join(map(str, mesh.sizes))} {label}", Case(name, label, CLUSTER, function, args, strategy)


def _assignments(problem: Problem, tensor: Mapping[str, int], changed: int) -> Iterator[tuple[str, Assignment]]:
    """What baselines, a searcher, hands and chance come up with on a mesh."""
    found: list[tuple[str, Assignment]] = []
    if problem.mesh.sizes != (4, 2):  # baselines treat both axes alike
        stages = ((f"zero {stage}", FullySharded(stage)) for stage in (1, 2, 3))
        found += [(label, searcher.solve(problem).assignment) for label, searcher in (("data parallel", DataParallel()), *stages)]
    found.append(("recursive", RecursiveProgramming().solve(problem).assignment))
    if len(problem.mesh.axes) > 1:
        for axis, where in enumerate(problem.mesh.names):
            found.append((f"batch over {where}", _spread(problem, axis, {})))
            found.append((f"batch over {where}, tensors over the other", _spread(problem, axis, tensor)))
    yield from found
    for k in range(changed):
        label, assignment = found[5 * k % len(found)]
        yield f"{label}, changed {k}", _changed(problem, assignment, k, CHANGES[k % len(CHANGES)], 1 + k % 3)


def _spread(problem: Problem, axis: int, tensor: Mapping[str, int]) -> Assignment:
    """The batch over one mesh axis, and what ``tensor`` names over the other, spread through the program."""
    graph, sizes = problem.graph, problem.mesh.sizes
    replaced = {argument for _, argument in graph.aliases}
    seeds = {}
    for position, value in enumerate(graph.arguments):
        shape = graph.values[value].shape
        if position not in replaced:
            seeds[value] = tuple(0 if other == axis else -1 for other in range(2))
            continue
        dims = [dim for part, dim in tensor.items() if part in graph.argument_paths[position]]
        if dims and dims[0] < len(shape) and shape[dims[0]] % sizes[1 - axis] == 0:
            seeds[value] = tuple(-1 if other == axis else dims[0] for other in range(2))
    spread = Propagation(problem)
    spread.seed(seeds)
    spread.forward()
    spread.backward()
    spread.forward()
    return spread.assignment()


def _changed(problem: Problem, assignment: Assignment, seed: int, changes: int, sweeps: int) -> Assignment:
    """Some decisions changed at random, half of them layouts of arguments; the others then take what is cheapest beside them."""
    rng = random.Random(seed)
    variables = problem.decisions.variables
    labels = [assignment.choice(variable.leader) if variable.leader >= 0 else assignment.layout(variable.value) for variable in variables]
    for value, variable in problem.decisions.copies.items():
        labels[variable] = assignment.copies.get(value, assignment.layout(value))
    tables = problem.tables(tuple(range(len(problem.mesh.axes))), labels)
    at = [int(position) for position in tables.incumbent]
    beside: list[list] = [[] for _ in variables]
    for (i, j), table in tables.pairs.items():
        beside[i].append((j, table))
        beside[j].append((i, table.T))
    arguments = [i for i, variable in enumerate(variables) if variable.value in problem.graph.arguments]
    fixed = set()
    for _ in range(changes):
        i = rng.choice(arguments) if rng.random() < 0.5 else rng.randrange(len(variables))
        at[i] = rng.randrange(len(tables.labels[i]))
        fixed.add(i)
    for _ in range(sweeps):
        for i in rng.sample(range(len(variables)), len(variables)):
            if i not in fixed:
                at[i] = int(sum((table[:, at[j]] for j, table in beside[i]), start=tables.unary[i]).argmin())
    return problem.assignment([options[position] for options, position in zip(tables.labels, at, strict=True)])
