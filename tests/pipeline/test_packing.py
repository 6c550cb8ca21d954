"""How arrays are handed on from one program of a stage to the next."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.ir import Mesh
from autoshard.pipeline.packing import Packing
from autoshard.verify import compile_ahead, topology_of
from tests.requirements import needs_tpu_compiler

TYPES = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape in ((), (7,), (3, 4), (600, 500))
    for dtype in (jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16)
]


def test_arrays_on_hosts_are_handed_on_as_they_are():
    """They take no bytes of the device, and are not joined with others."""
    small = jax.ShapeDtypeStruct((64,), jnp.float32)
    packing = Packing.of([small, small, jax.core.ShapedArray((64,), jnp.float32, memory_space=jax.memory.Space.Host)])
    assert (packing.n_arrays, packing.on_host, packing.nbytes) == (2, (False, True), 512.0)


@pytest.mark.slow
def test_arrays_come_back_as_they_were():
    """Whatever their shapes and dtypes, and however they are packed; each array that is handed on is one that devices can concatenate."""
    arrays = [jnp.asarray(np.arange(math.prod(t.shape)).reshape(t.shape) % 3, t.dtype) for t in TYPES]
    for packing in (Packing.of(TYPES), Packing.of(TYPES, True)):
        handed = packing.pack(arrays)
        assert packing.n_arrays == len(handed) < len(arrays) and all(x.ndim for x in handed)
        found = packing.unpack(handed)
        assert [x.dtype for x in found] == [x.dtype for x in arrays]
        assert all(x.shape == y.shape and bool((x == y).all()) for x, y in zip(found, arrays, strict=True))


@needs_tpu_compiler
def test_narrow_arrays_among_others_take_no_more_memory_on_tpus():
    """XLA reshapes no packed array as a whole to the four columns of one part, each row of which would take a row of 128."""
    router, weight = (256, 4), (256, 512)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (router, *[weight] * 8, router) * 2]
    packing = Packing.of(types)

    def program(x, handed):
        return [x @ w for w in packing.unpack(handed)]

    handed = jax.eval_shape(packing.pack, types)
    x = jax.ShapeDtypeStruct((16, 64, 256), jnp.bfloat16)
    lowered = jax.jit(program).trace(x, handed).lower(lowering_platforms=("tpu",))
    peak = compile_ahead(lowered, Mesh.of({"data": 1}), topology_of(Cluster.parse("v5e:1x1"))).peak_bytes
    assert len(handed) == 1 and peak < 2 * sum(y.size * y.dtype.itemsize for y in (x, *handed, *jax.eval_shape(program, x, handed)))
