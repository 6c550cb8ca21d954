"""Random legal assignments of a program, for tests that a plan's numbers and collectives come out as planned."""

from __future__ import annotations

import random

from autoshard.ir import Assignment, Choice, Graph, Layout, Mesh, Rule, divides, layouts, legal, result_layout, shift_layout


def random_assignment(graph: Graph, rules: tuple[Rule | None, ...], mesh: Mesh, seed: int) -> Assignment:
    """A legal choice for every op with a rule, dividing layouts for arguments and holders, and copies for some values."""
    rng = random.Random(seed)
    choices: dict[int, Choice] = {}
    found: dict[int, Layout] = {value: _layout(graph, value, mesh, rng) for value in graph.arguments}
    for op in graph.walk():
        if (rule := rules[op.index]) is not None:
            choices[op.index] = choice = _choice(rule, mesh, rng)
            found |= {value: result_layout(rule, choice, k) for k, value in enumerate(op.results)}
    for op in graph.walk():
        for holder in op.holders:
            layout = _layout(graph, holder.value, mesh, rng)
            for flow in holder.sources:  # a stacked result keeps its leading dimension whole
                layout = tuple(-1 if shift_layout((dim,), flow.shift) is None else dim for dim in layout)
            found |= dict.fromkeys((holder.value, *holder.views), layout)
    copies = {value: _layout(graph, value, mesh, rng) for value in found if rng.random() < 0.2}
    return Assignment(mesh, choices, found, copies)


def _layout(graph: Graph, value: int, mesh: Mesh, rng: random.Random) -> Layout:
    shape = graph.values[value].shape
    return rng.choice([layout for layout in layouts(len(shape), len(mesh.axes)) if divides(layout, shape, mesh.sizes)])


def _choice(rule: Rule, mesh: Mesh, rng: random.Random) -> Choice:
    whole = ((-1, -1),) * len(mesh.axes)
    for _ in range(30):
        factors = [rng.randrange(-1, len(rule.factors)) for _ in mesh.axes]
        scatter = rng.randrange(-1, len(rule.results[0])) if len(rule.results) == 1 else -1
        choice = tuple((f, scatter if f >= 0 and rule.factors[f].kind == "reduction" else -1) for f in factors)
        if legal(rule, choice, mesh.sizes):
            return choice
    return whole
