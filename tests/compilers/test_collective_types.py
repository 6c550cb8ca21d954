"""Element types of collectives: a compiler takes those of `autoshard.lower.element_types`, and lacks what its table says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from collective_types import COLLECTIVES, TYPES, collectives_of
from jax import lax
from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.compilers import TARGETS
from autoshard.errors import CompilerError
from autoshard.ir import Mesh
from autoshard.lower import abstract_mesh
from autoshard.lower import element_types as et
from autoshard.verify import compile_ahead, topology_of
from autoshard.verify.aot import COMPILERS

CLUSTERS = {"tpu": "v5e:2x2", "gpu": "h100:4x1"}
QUICK = {("tpu", "complex64"), ("gpu", "float8_e4m3")}
SHAPE = (32, 1024)


def compiled(kind, name, *functions):
    """The program of functions of one device's array of a type, compiled for a kind of device; complex numbers are made in it."""
    cluster = Cluster.parse(CLUSTERS[kind])
    topology, mesh = topology_of(cluster), Mesh.of({"x": cluster.n_devices})
    if not COMPILERS[topology.platform].installed:
        pytest.skip(f"{COMPILERS[topology.platform].package} is not installed")
    is_complex = name.startswith("complex")  # XLA:TPU crashes where a shard_map has complex128 operands or results (libtpu 0.0.52)
    given = {"complex64": "float32", "complex128": "float64"}.get(name, name)

    def made(x):
        x = lax.complex(x, x + 1) if is_complex else x
        results = [function(x) for function in functions]
        return [(lax.real(each), lax.imag(each)) if is_complex else each for each in results]

    with jax.enable_x64(True):
        spec = PartitionSpec("x")
        program = jax.shard_map(made, mesh=abstract_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
        array = jax.ShapeDtypeStruct((cluster.n_devices * SHAPE[0], SHAPE[1]), jnp.dtype(given))
        lowered = jax.jit(program).trace(array).lower(lowering_platforms=(topology.platform,))
    return compile_ahead(lowered, mesh, topology, cycles=True)


def marked(cases, quick):
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("kind", "name"), marked([(kind, name) for kind in CLUSTERS for name in TYPES], QUICK))
def test_every_collective_of_a_type_compiles(kind, name):
    """All collectives that a plan may have, of one element type."""
    compiled(kind, name, *(how for how, _ in collectives_of(name).values()))


def lacked():
    for kind in CLUSTERS:
        for collective, names in TARGETS[kind].lacks.items():
            yield from ((kind, collective, name) for name in names)


@pytest.mark.parametrize(("kind", "collective", "name"), marked(lacked(), {("tpu", "reduce_scatter", "complex64")}))
def test_a_collective_that_is_made_of_others_is_lacked(monkeypatch, kind, collective, name):
    """The compiler still refuses JAX's own, so that none is replaced for nothing."""
    monkeypatch.setattr(et, "lacking", lambda collective, name: ())
    with pytest.raises(CompilerError):
        compiled(kind, name, COLLECTIVES[collective][0])
