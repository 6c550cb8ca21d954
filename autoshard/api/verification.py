"""A strategy held against what partitioners and compilers really make of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from autoshard.api.step import Step
from autoshard.api.strategy import Strategy
from autoshard.errors import StrategyError
from autoshard.ir import Mesh
from autoshard.lower import jax_mesh
from autoshard.render import Paragraph, Part, Report, Table, format_bytes, format_count, format_percent
from autoshard.verify import Row, collectives_of, compare, explicit_collectives

TARGETS = {
    "shardy": "the partitioner's own explicit collectives, without compiling or devices",
    "cpu": "the program compiled by XLA for as many CPU devices as the mesh has",
}


@dataclass(frozen=True, slots=True)
class Verification:
    """Predicted against actual.

    Attributes:
        program, mesh, target: what was held against what; a target is one of `TARGETS`.
        rows: collectives by kind and mesh axes, counts and bytes of one step on one device.
        n_ops: operations of the program.
        n_constraints: sharding constraints that the lowered program carries.
        predicted_peak_bytes: memory of a device at the fullest moment, as the cost model says.
        actual_peak_bytes: the same as the compiler says; None where nothing was compiled.
    """

    program: str
    mesh: Mesh
    target: str
    rows: tuple[Row, ...]
    n_ops: int
    n_constraints: int
    predicted_peak_bytes: float
    actual_peak_bytes: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the actual collectives are the predicted ones in kind, mesh axes, count and bytes."""
        return all(row.agrees for row in self.rows)

    @property
    def bytes_ratio(self) -> float:
        """Actual over predicted bytes of all collectives; 1.0 where there are none on either side."""
        predicted, actual = (sum(getattr(row, f"{side}_bytes") for row in self.rows) for side in ("predicted", "actual"))
        return actual / predicted if predicted else 1.0 if not actual else float("inf")

    def report(self) -> Report:
        """The comparison as a table, for terminals and notebooks."""
        rows = tuple(
            (
                row.kind,
                ", ".join(row.mesh_axes),
                format_count(row.predicted_count),
                format_count(row.actual_count),
                format_bytes(row.predicted_bytes),
                format_bytes(row.actual_bytes),
                "" if row.agrees else "differs",
            )
            for row in self.rows
        )
        columns = ("collective", "mesh axes", ">predicted", ">actual", ">predicted bytes", ">actual bytes", "")
        found = "the predicted ones, exactly" if self.exact else f"{format_percent(self.bytes_ratio)} of the predicted bytes"
        parts: list[Part] = [Paragraph(f"Collectives of {TARGETS[self.target]}: {found}.")]
        if rows:
            notes = ("Counts and bytes are of one step on one device.", "An all_reduce of which only slices are read is a reduce_scatter.")
            parts.append(Table(columns, rows, notes))
        parts.append(Paragraph(f"{format_count(self.n_constraints)} sharding constraints on {format_count(self.n_ops)} operations."))
        if self.actual_peak_bytes is not None:
            predicted, actual = format_bytes(self.predicted_peak_bytes), format_bytes(self.actual_peak_bytes)
            parts.append(Paragraph(f"Peak memory a device: {predicted} predicted, {actual} actual."))
        return Report(f"{self.program} on mesh {self.mesh}, held against {self.target}", tuple(parts))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {**asdict(self), "mesh": dict(self.mesh.axes), "exact": self.exact, "bytes_ratio": self.bytes_ratio}

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def verify(strategy: Strategy, fn: Callable, *args: Any, target: str = "shardy") -> Verification:
    """What a strategy predicts next to what the target makes of its program.

    Args:
        strategy: of this function; loaded ones too.
        fn, args: the program, with arguments as for `search`.
        target: ``"shardy"`` asks the partitioner for its explicit collectives, in milliseconds and without devices; ``"cpu"`` compiles
            for this process's CPU devices and reads the compiled module.

    Raises:
        StrategyError: the function is not the strategy's program, or the target is unknown.
        ClusterError: fewer devices than the mesh has places.

    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> program = lambda w, x: jnp.tanh(x @ w)
    >>> arguments = jnp.ones((64, 64)), jnp.ones((512, 64))
    >>> strategy = autoshard.search(program, *arguments, cluster="cpu:8", mesh={"data": 8})
    >>> verify(strategy, program, *arguments).exact
    True
    """
    if target not in TARGETS:
        raise StrategyError(f"a target of verify is one of {sorted(TARGETS)}, got {target!r}. Use one of those.")
    record = strategy.record
    mesh = None if target == "shardy" else jax_mesh(record.mesh, jax.devices("cpu"))
    lowered = Step(fn, record, mesh).lower(*args)
    peak = None
    if target == "shardy":
        actual = explicit_collectives(lowered, record.mesh)
    else:
        compiled = lowered.compile()
        actual = collectives_of(compiled.as_text() or "", record.mesh)
        memory = compiled.memory_analysis()
        peak = None if memory is None else float(_peak_bytes(memory))
    return Verification(
        program=record.program.name,
        mesh=record.mesh,
        target=target,
        rows=compare(record.cost.collectives, actual),
        n_ops=int(record.stats["n_ops"]),
        n_constraints=lowered.as_text().count("sdy.sharding_constraint"),
        predicted_peak_bytes=record.cost.peak_bytes,
        actual_peak_bytes=peak,
    )


def _peak_bytes(memory: Any) -> int:
    """What a device holds at most: XLA:CPU's own peak leaves temporaries out."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return max(held, memory.peak_memory_in_bytes)
