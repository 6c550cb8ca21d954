"""Domains of variables, and the tables that problems on other placements of a mesh share."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import SMALL, problem_of
from programs import PROGRAMS

from autoshard import Cluster
from autoshard.ir import Mesh, legal, operand_layout, result_layout
from autoshard.judge.model import CostModel
from autoshard.mesh_search.candidates import placed
from autoshard.problem import Problem


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["gpt", "convnet", "moe"])
def test_slots_are_the_layouts_of_their_labels(program):
    """Every op variable has the legal choices that its slots allow, and each slot's number is that of the layout under its label."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args)
    for index, variable in enumerate(problem.decisions.variables):
        if variable.leader < 0:
            continue
        rule = problem.decisions.signatures[variable.label_type[1]].rule
        domain = problem.costs.whole_domain(index)
        assert all(legal(rule, label, problem.mesh.sizes) for label in domain.labels)
        for derivation, slot in variable.slots.items():
            if derivation[0] not in ("operand", "result"):
                continue
            layout_of = operand_layout if derivation[0] == "operand" else result_layout
            dims = (rule.operands if derivation[0] == "operand" else rule.results)[derivation[1]]
            numbers = dict(zip(domain.labels, domain.slots[slot].tolist(), strict=True))
            for label, number in numbers.items():
                layout = layout_of(rule, label, derivation[1])
                assert number == sum((dim + 1) * (len(dims) + 1) ** axis for axis, dim in enumerate(layout))


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", sorted(SMALL))
def test_no_legal_choice_is_forgotten(program):
    """The domain of an op variable is all of its legal choices, less those that leave one of its slots without a layout."""
    fn, args = SMALL[program]()
    problem = problem_of(fn, *args)
    for index, variable in enumerate(problem.decisions.variables):
        if variable.leader >= 0 and all(derivation[0] in ("operand", "result") for derivation in variable.slots):
            rule = problem.decisions.signatures[variable.label_type[1]].rule
            scatters = range(-1, len(rule.results[0]))
            atoms = [(factor, scatter) for factor in range(-1, len(rule.factors)) for scatter in scatters]
            sizes = problem.mesh.sizes
            every = {
                choice
                for choice in product(atoms, repeat=len(sizes))
                if all(factor < 0 or rule.factors[factor].size > 1 for factor, _ in choice)
                and all(scatter < 0 or (factor >= 0 and rule.factors[factor].operator == "sum") for factor, scatter in choice)
                and legal(rule, choice, sizes)
            }
            assert set(problem.costs.whole_domain(index).labels) == every


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["gpt", "convnet", "moe"])
def test_another_placement_has_the_tables_it_would_have_alone(program):
    """Sharing with a problem on another placement of the mesh, or on another mesh, changes no table."""
    fn, args = PROGRAMS[program]()
    cluster = Cluster.parse("v5e:2x4")
    first = problem_of(fn, *args, cluster=cluster)
    meshes = placed(cluster, [first.mesh, Mesh((("data", 2), ("model", 4)))], renamed=False)
    assert len({mesh.placement for mesh in meshes}) > 1 and len({mesh.sizes for mesh in meshes}) > 1
    for mesh in meshes:
        model = CostModel(cluster, mesh)
        shared, alone = Problem(first.facts, model, like=first), Problem(first.facts, model)
        ours, theirs = (problem.tables((0, 1), problem.start()) for problem in (shared, alone))
        assert ours.labels == theirs.labels and ours.pairs.keys() == theirs.pairs.keys()
        assert all(np.array_equal(one, other) for one, other in zip(ours.unary, theirs.unary, strict=True))
        assert all(np.array_equal(table, theirs.pairs[pair]) for pair, table in ours.pairs.items())
        first = shared


def test_domains_are_shared_by_sizes_that_divide_alike():
    """Layers of other widths have the domains of the first where the same parts divide both, and their own where other parts do."""

    def chain(x, *weights):
        for one, other in weights:
            x = x + (x @ one) @ other
        return x

    widths = 1024, 1040, 1056, 1044
    arrays = [(_array(32, width), _array(width, 32)) for width in widths]
    problem = problem_of(chain, _array(64, 32), *arrays)
    leaders = [index for index, variable in enumerate(problem.decisions.variables) if variable.leader >= 0]
    domain = problem.costs.domains.domain
    whole = tuple(range(len(problem.mesh.axes)))
    variables, kinds = problem.decisions.variables, problem.decisions.kinds
    found = [domain(variables[i], kinds[i], problem.costs.replicated(i), whole) for i in leaders]
    by_width = {}
    for i, one in zip(leaders, found, strict=True):
        rule = problem.decisions.signatures[variables[i].label_type[1]].rule
        assert set(one.labels) == {label for label in one.labels if legal(rule, label, problem.mesh.sizes)}
        by_width.setdefault(max(factor.size for factor in rule.factors), []).append(one)
    assert by_width[1024][0] is by_width[1040][0] is by_width[1056][0]
    assert by_width[1044][0] is not by_width[1024][0]
    assert len(by_width[1044][0].labels) < len(by_width[1024][0].labels)


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
