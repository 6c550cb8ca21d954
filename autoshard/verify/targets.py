"""What a strategy is held against: the lowered program, or what a compiler makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Target:
    """A target of `verify`.

    Attributes:
        description: which collectives are held against the predicted ones.
        here: whether it compiles for devices of this process, where there are enough.
        ahead: whether it compiles ahead of time for the strategy's cluster where not.
        pads: whether its compiler pads what it sends and computes, so that bytes within 3 % and FLOPs within 1 % are as predicted.
        cycles: whether its compiler estimates a schedule's cycles.
        example: clusters that it compiles for.
        differs: why what it makes may be far from what is predicted; empty where there is no known reason.
    """

    description: str
    here: bool = False
    ahead: bool = False
    pads: bool = False
    cycles: bool = False
    example: str = ""
    differs: str = ""


TARGETS = {
    "shardy": Target("the lowered program, or of the partitioner where constraints leave it a choice; nothing is compiled"),
    "cpu": Target(
        "the program compiled by XLA for as many CPU devices as the mesh has",
        here=True,
        differs="What is bfloat16 XLA:CPU computes, sends and holds in float32, in twice the bytes.",
    ),
    "tpu": Target(
        "the program compiled ahead of time by XLA:TPU for the strategy's slice",
        ahead=True,
        pads=True,
        cycles=True,
        example="v5e:2x4' or another slice",
    ),
    "gpu": Target(
        "the program compiled by XLA:GPU for the strategy's GPUs", here=True, ahead=True, pads=True, example="h100:8x1' or other GPUs"
    ),
}


def devices_here(platform: str) -> list[Any]:
    """This process's devices of a platform; none where JAX has no such backend."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
