"""A small program of the evidence, and how it is compiled and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.errors import CompilerError
from autoshard.ir import Mesh
from autoshard.lower import abstract_mesh
from autoshard.verify import Ahead, compile_ahead, topology_of
from autoshard.verify.aot import COMPILERS
from benchmarks.evidence.measures import COMPILES, Figure, Measure, rounded

BF16, F32 = jnp.bfloat16, jnp.float32


def leaf(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True, slots=True)
class Program:
    """A small program, and the figure of it that shows a fact.

    Attributes:
        function, args: the program; where ``specs`` are given, that of one device of a mesh with the one axis ``x``.
        measure: the figure.
        on: the cluster that it is compiled for.
        specs: of arguments and results, as `jax.shard_map` takes them.
        options: the compiler's.
        donate: positions of arguments whose memory may be reused.
        over: another program; the figure is divided by that one's.
    """

    function: Callable
    args: tuple
    measure: Measure
    on: str = "v5e:1x1"
    specs: tuple[Any, Any] | None = None
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    donate: tuple[int, ...] = ()
    over: Program | None = None

    def figure(self) -> Figure:
        """The figure, measured.

        Raises:
            CompilerError: the compiler is not installed, or fails.
        """
        try:
            found = self.measure.of(self._compiled())
        except CompilerError:
            if self.measure is not COMPILES or not COMPILERS[topology_of(Cluster.parse(self.on)).platform].installed:
                raise
            return "no"
        if self.over is not None:
            divisor = self.over.figure()
            assert not isinstance(found, str) and not isinstance(divisor, str), "only numbers are divided"
            found = found / divisor
        return rounded(found)

    def _compiled(self) -> Ahead:
        cluster = Cluster.parse(self.on)
        topology, mesh = topology_of(cluster), Mesh.of({"x": cluster.n_devices})
        function = self.function
        if self.specs is not None:
            ins, outs = self.specs
            function = jax.shard_map(function, mesh=abstract_mesh(mesh), in_specs=ins, out_specs=outs, check_vma=False)
        lowered = jax.jit(function, donate_argnums=self.donate).trace(*self.args).lower(lowering_platforms=(topology.platform,))
        return compile_ahead(lowered, mesh, topology, self.measure.cycles, self.options)


PROGRAMS: dict[str, Program] = {}
"""Every program by its name."""


def program(measure: Measure, *args: Any, **how: Any) -> Callable[[Callable], Callable]:
    """Adds a function to `PROGRAMS`, its name with spaces."""

    def add(function: Callable) -> Callable:
        named(function.__name__.replace("_", " "), Program(function, args, measure, **how))
        return function

    return add


def named(name: str, one: Program) -> None:
    """Adds a program to `PROGRAMS`.

    Raises:
        ValueError: there is one of the name.
    """
    if name in PROGRAMS:
        raise ValueError(f"each program has a name of its own, and there are two {name!r}. Rename one.")
    PROGRAMS[name] = one


SPLIT = PartitionSpec("x")
WHOLE = PartitionSpec()
