"""Profiles of programs, and what they hold and store: for the tests of the memory model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard.cluster import Cluster
from autoshard.cost.evaluate import evaluate
from autoshard.cost.model import CostModel
from autoshard.cost.profile import profile
from autoshard.ir import Assignment, Mesh
from autoshard.rules import rules_of
from autoshard.trace import trace

MESH = Mesh.of({"data": 8})


def facts_of(fn, *args, **options):
    """A program's profile."""
    graph = trace(fn, *args, **options).graph
    return profile(graph, rules_of(graph))


def peak(facts, cluster="cpu:8", mesh=MESH, choices=None, layouts=None):
    """Peak bytes of an assignment; everything is replicated unless told otherwise."""
    assignment = Assignment(mesh, choices or {}, layouts or {}, {})
    return evaluate(facts, CostModel(Cluster.parse(cluster), mesh), assignment).peak.nbytes


def stored(fn, *args):
    """Shapes and dtypes of what a program's kernels write, in their order."""
    facts = facts_of(fn, *args)
    values = facts.graph.values
    return [(values[value].shape, values[value].dtype) for kernel in facts.fusion.kernels for value in kernel.makes]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
