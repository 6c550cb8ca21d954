"""Small programs that keep all devices busy, for measurement, each with the cost model's prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.cluster import Cluster
from autoshard.compilers import TARGETS, compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh
from autoshard.rules import rules_of
from autoshard.trace import trace

Run = Callable[[], Any]
"""Runs a program; returns when it has ended."""

ALONE = Mesh(())


@dataclass(frozen=True)
class Kernel:
    """A program for one device whose result can be its next first argument; every device runs it.

    Attributes:
        section: its section of the report.
        name, size: its operation and its size, for the report.
        fn: the program.
        shapes, dtype: of its arguments.
        chained: its repetitions in the body of a loop; several where its result cannot overwrite its operand.
    """

    section: str
    name: str
    size: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    chained: int = 1

    @cached_property
    def _facts(self) -> ProgramFacts:
        graph = trace(self.fn, *(jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes)).graph
        return program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("cpu:1")))

    @property
    def nbytes(self) -> int:
        """Memory of its arguments on a device."""
        return sum(math.prod(shape) for shape in self.shapes) * jnp.dtype(self.dtype).itemsize

    def predicted_seconds(self, cluster: Cluster) -> float:
        """The cost model's prediction, on one device of the cluster."""
        one = replace(cluster, topology=(1,) * len(cluster.topology), levels=())
        return evaluate(self._facts, CostModel(one, ALONE), Assignment(ALONE, {}, {})).cost.compute_seconds

    def compiled(self, devices: Sequence[Any]) -> Callable[[int], Run]:
        """A function from a number of trips to a loop that runs it ``trips * chained`` times."""
        mesh = jax_mesh(Mesh((("all", len(devices)),)), devices)
        first, *rest = (_on_each(_block(shape, self.dtype, number), mesh) for number, shape in enumerate(self.shapes))

        def local(trips: int, x, *others):
            others = tuple(other[0] for other in others)

            def body(_, x):
                for _ in range(self.chained):
                    x = lax.optimization_barrier(self.fn(x, *others))  # otherwise XLA:GPU fuses two softmaxes
                return x

            return lax.fori_loop(0, trips, body, x[0])[None]

        return lambda trips: _mapped(lambda x, *others: local(trips, x, *others), mesh, first, *rest)


def matrix_product(rows: int, side: int, dtype: str) -> Kernel:
    """A product of ``(rows, side)`` by ``(side, side)``."""
    chained = 16 if rows * side <= 2**14 else 4 if rows * side <= 2**16 else 2
    size = f"{rows} x {side} x {side}"
    return Kernel("matrix product", dtype, size, jnp.matmul, ((rows, side), (side, side)), dtype, chained)


def elementwise(name: str, side: int, dtype: str) -> Kernel:
    """One of `ELEMENTWISE` on a square matrix; a softmax, which cannot overwrite its operand, is chained."""
    chained = 2 if name == "softmax" else 1
    return Kernel("elementwise", f"{name}, {dtype}", f"{side} x {side}", ELEMENTWISE[name], ((side, side),), dtype, chained)


def _scale(x):
    return x * 0.5 + 0.25


def _gelu(x):
    return jax.nn.gelu(x) + 0.5


def _softmax(x):
    return jax.nn.softmax(x, axis=-1)


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {"x / 2 + 1 / 4": _scale, "gelu": _gelu, "softmax": _softmax}
"""Elementwise programs: bound by memory, bound by arithmetic, and with reductions in between."""


@dataclass(frozen=True)
class CollectiveProgram:
    """A collective along one axis of a mesh; every group of devices along it runs one.

    Attributes:
        kind: one of `COLLECTIVES`.
        payload_bytes: the larger of a device's operand and result.
        sizes: of the mesh's axes.
        axis: the axis that communicates.
    """

    kind: str
    payload_bytes: int
    sizes: tuple[int, ...]
    axis: int
    section: str = field(default="collective", init=False)
    chained: int = field(default=1, init=False)

    @property
    def name(self) -> str:
        """Its kind and its number of devices."""
        of = f" (axis {self.axis} of {'x'.join(map(str, self.sizes))})" if len(self.sizes) > 1 else ""
        return f"{self.kind}, {self.sizes[self.axis]} devices{of}"

    @property
    def size(self) -> str:
        """Its payload in words."""
        return f"{self.payload_bytes // 1024} KiB"

    @property
    def nbytes(self) -> int:
        """Memory of its arguments on a device."""
        return self.payload_bytes

    def predicted_seconds(self, cluster: Cluster) -> float:
        """The cost model's prediction."""
        axes = tuple(number for number, name in enumerate(self._mesh.names) if name == self._mesh.all_names[self.axis])
        return float(CostModel(cluster, self._mesh).communication.seconds(self.kind, float(self.payload_bytes), axes))

    def compiled(self, devices: Sequence[Any]) -> Callable[[int], Run]:
        """A function from a number of trips to a loop of them."""
        mesh = jax_mesh(self._mesh, devices)
        group, name = self.sizes[self.axis], mesh.axis_names[self.axis]
        length = max(self.payload_bytes // 4 // group, 1) * group
        in_place = self.kind == "all_reduce" and TARGETS[devices[0].platform].reduces_in_place
        x = _on_each(np.zeros(length // group if self.kind == "all_gather" else length, np.float32), mesh)

        def body(_, x):
            result = COLLECTIVES[self.kind](x, name, group)
            # Otherwise one element of the result is put into the operand, so that the next trip depends on it without a copy.
            return result if in_place else x.at[:1].set(result[:1])

        return lambda trips: _mapped(lambda x: lax.fori_loop(0, trips, body, x[0])[None], mesh, x)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(tuple((f"axis{number}", size) for number, size in enumerate(self.sizes)))


COLLECTIVES: dict[str, Callable[[Any, str, int], Any]] = {
    "all_gather": lambda x, axis, n: lax.all_gather(x, axis, tiled=True),
    "all_reduce": lambda x, axis, n: lax.psum(x, axis),
    "reduce_scatter": lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
    "all_to_all": lambda x, axis, n: lax.all_to_all(x, axis, 0, 0, tiled=True),
    "collective_permute": lambda x, axis, n: lax.ppermute(x, axis, [(k, (k + 1) % n) for k in range(n)]),
}

Program = Kernel | CollectiveProgram


def _mapped(local: Callable[..., Any], mesh: jax.sharding.Mesh, *args: jax.Array) -> Run:
    """A run of a function on each device's block; its result takes the first argument's memory, and is the next first argument."""
    spec = PartitionSpec(mesh.axis_names)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), donate_argnums=0)
    state = [jnp.copy(args[0]), *args[1:]]

    def once() -> None:
        state[0] = jax.block_until_ready(run(*state))

    return once


def _on_each(block: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """An array with a copy of the block on each device."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, *block.shape), sharding, lambda _: block[None])


def _block(shape: tuple[int, ...], dtype: str, number: int) -> np.ndarray:
    """A normal random array; for second arguments the matrix of the cosine transform, which preserves the norms of rows in products."""
    if number == 0:
        return np.random.default_rng(0).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    place = np.arange(shape[-1], dtype=np.float32) + 0.5
    return (math.sqrt(2 / shape[-1]) * np.cos(np.pi / shape[-1] * np.outer(place, place))).astype(jnp.dtype(dtype))
