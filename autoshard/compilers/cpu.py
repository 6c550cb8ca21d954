"""XLA:CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autoshard.compilers.base import Compiler, Copies, Partials, ProgramFacts
from autoshard.compilers.buffer_assignment import buffers
from autoshard.compilers.buffers import Buffers
from autoshard.ir import Assignment


@dataclass(frozen=True, slots=True)
class XlaCpu(Compiler):
    """XLA:CPU, as jaxlib 0.10.2 has it: it runs a collective and the ops around it one after the other."""

    hangs_ahead: ClassVar[bool] = True
    drops_nan: ClassVar[tuple[str, ...]] = (
        *("bfloat16", "float16", "float32", "float64"),
        *(f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
    )

    # It drops barriers before it merges equal operations, and XLA:TPU and XLA:GPU after: what `jax.checkpoint` computes and gathers again
    # would be kept from the first time.
    options: ClassVar[Mapping[str, str]] = {"xla_disable_hlo_passes": "cse_barrier_expander"}

    def buffers(self, facts: ProgramFacts, assignment: Assignment, copies: Copies, partials: Partials) -> tuple[Buffers, ...]:
        return (buffers(facts, assignment, copies, partials),)
