"""XLA:CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.compilers.base import Compiler


@dataclass(frozen=True, slots=True)
class XlaCpu(Compiler):
    """XLA:CPU, as jaxlib 0.10.2 has it: it runs a collective and the ops around it one after the other."""

    drops_nan: ClassVar[tuple[str, ...]] = (
        *("bfloat16", "float16", "float32", "float64"),
        *(f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
    )
