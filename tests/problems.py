"""Small search problems for tests, on clusters whose links are fast enough that sharding pays even for toy sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import jax
import jax.numpy as jnp

from autoshard import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.trace import trace


def eager_cluster(name: str = "v5e:2x4", speed: float = 1e-3) -> Cluster:
    """A cluster with slow devices and links without latency, so that the best sharding of a small program is never 'none'."""
    cluster = Cluster.parse(name)
    device = replace(
        cluster.device,
        kernel_overhead_seconds=0.0,
        matrix_tile=1,
        flops_per_second=tuple((kind, rate * speed) for kind, rate in cluster.device.flops_per_second),
        vector_flops_per_second=1e9,
        memory_bandwidth_bytes_per_second=1e11,
    )
    return replace(cluster, device=device, interconnect=replace(cluster.interconnect, latency_seconds=1e-9, launch_seconds=0.0))


def problem_of(fn, *args, mesh=None, cluster=None, pins=None, memory_limit_bytes=None) -> Problem:
    """The problem of a function on a mesh, by default four and two devices of an eager cluster."""
    cluster = cluster or eager_cluster()
    leaves, structure = jax.tree.flatten(args)
    found = _profile(fn, structure, tuple(leaves), compiler_of(cluster))
    return Problem(found, CostModel(cluster, Mesh.of(mesh or {"data": 4, "model": 2})), pins, memory_limit_bytes)


@lru_cache(64)
def _profile(fn, structure, leaves, compiler):
    """The facts of a program, which no problem changes."""
    graph = trace(fn, *jax.tree.unflatten(structure, leaves)).graph
    return program_facts(graph, rules_of(graph), compiler)


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@cache
def matmul():
    return (lambda w, x: x @ w), (_array(16, 32), _array(64, 16))


@cache
def two_matmuls():
    return (lambda v, w, x: jnp.tanh(x @ v) @ w), (_array(16, 64), _array(64, 16), _array(8, 16))


@cache
def shared_weight():
    return (lambda w, x: (x @ w + 1) @ w.T), (_array(8, 32), _array(16, 8))


@cache
def reshaped():
    return (lambda w, x: (x.reshape(8, 4, 8) @ w).transpose(1, 0, 2).sum(0)), (_array(8, 16), _array(32, 8))


@cache
def gathered():
    return (lambda table, tokens: table[tokens].mean(1)), (_array(64, 16), jax.ShapeDtypeStruct((16, 8), jnp.int32))


@cache
def descent():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    return step, (_array(16, 32), _array(64, 16))


SMALL = {f.__name__: f for f in (matmul, two_matmuls, shared_weight, reshaped, gathered, descent)}
