"""XLA:CPU."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.compilers.base import Compiler


@dataclass(frozen=True, slots=True)
class XlaCpu(Compiler):
    """XLA:CPU, as jaxlib 0.10.2 has it: it runs a collective and the ops around it one after the other."""
