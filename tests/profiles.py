"""Profiles of programs, and what they hold and store: for the tests of the memory model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace

MESH = Mesh.of({"data": 8})


COMPILER = compiler_of(Cluster.parse("cpu:8"))


def facts_of(fn, *args, compiler=COMPILER, **options):
    """A program's facts."""
    graph = trace(fn, *args, **options).graph
    return program_facts(graph, rules_of(graph), compiler)


def compiled_for(facts, cluster):
    """The facts of the same program with a cluster's compiler."""
    return program_facts(facts.graph, facts.rules, compiler_of(Cluster.parse(cluster)))


def peak(facts, cluster="cpu:8", mesh=MESH, choices=None, layouts=None):
    """Peak bytes of an assignment; everything is replicated unless told otherwise."""
    assignment = Assignment(mesh, choices or {}, layouts or {}, {})
    return evaluate(compiled_for(facts, cluster), CostModel(Cluster.parse(cluster), mesh), assignment).peak.nbytes


def stored(fn, *args):
    """Shapes and dtypes of what a program's kernels write, in their order."""
    facts = facts_of(fn, *args)
    values = facts.graph.values
    return [(values[value].shape, values[value].dtype) for kernel in facts.fusion.kernels for value in kernel.makes]


def recorded(cases: Sequence[tuple], quick: Collection[int]) -> list:
    """Figures that a compiler reported, as parameters of a test: those at some places in any run, the others with the slow tests."""
    return [pytest.param(*case, marks=() if place in quick else pytest.mark.slow) for place, case in enumerate(cases)]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
