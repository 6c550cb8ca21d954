"""The figures of a stage's tasks are those of the programs that run them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autoshard.ir import Mesh
from autoshard.pipeline.figures import StageFigures, task_kinds
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.stages import stages_of
from autoshard.pipeline.tasks import _Divided
from autoshard.rules import rules_of
from autoshard.trace import subjaxprs, trace
from tests.pipelines import plans_of
from tests.programs import gpt, gpt_scan


def products(eqn) -> int:
    """The products of an equation and of what it contains."""
    inner = (each for closed in subjaxprs(eqn) for each in getattr(closed, "jaxpr", closed).eqns)
    return (eqn.primitive.name == "dot_general") + sum(map(products, inner))


@pytest.mark.parametrize("program", [gpt, gpt_scan])
def test_the_figures_divide_a_program_as_its_tasks_do(program):
    """Each kind of task is charged as many products as its program has."""
    fn, args = program(n_layers=2)
    staged = stages_of(trace(fn, *args), 2, 2)
    for stage, plan in zip(staged.stages, plans_of(staged, 2, Mesh.of({"data": 2}), "data_parallel"), strict=True):
        graph = stage.traced.graph
        loop = loop_of(graph, rules_of(graph), 2)
        kinds = task_kinds(stage, loop)
        charged = Counter(kinds[op.index] for each in loop.bodies[0].ops for op in each.walk() if op.primitive == "dot_general")
        divided = _Divided(stage, plan, staged.loop_level, splits_weights=True, joins=False)
        assert charged == Counter({kind: n for kind, eqns in divided.kinds.items() if (n := sum(map(products, eqns)))})
        assert set("FW") <= set(charged)


def test_a_stage_knows_the_numbers_that_are_written_in_it():
    """Zeros and masks of a stage's program are recognised as those of the whole step are."""
    fn, args = gpt(n_layers=2)
    for stage in stages_of(trace(fn, *args), 2, 2).stages:
        graph = stage.traced.graph
        assert graph.literals and len(graph.written) == len(graph.literals)


def test_what_a_forward_task_hands_on_is_there_while_the_backward_task_runs():
    """Beside what the latter makes for itself; in one program of both it is not, and each microbatch more hands on as much again."""
    figures = StageFigures(
        {}, {}, 0.0, residual_bytes=10.0, lasting_bytes=100.0, working_bytes=112.0, backward_bytes=7.0, passes_bytes=11.0
    )
    assert [figures.peak_bytes(n, joins=False) for n in (1, 3)] == [117.0, 137.0]
    assert [figures.peak_bytes(n, joins=True) for n in (1, 3)] == [112.0, 132.0]
    assert replace(figures, passes_bytes=15.0).peak_bytes(1, joins=True) == 115.0
