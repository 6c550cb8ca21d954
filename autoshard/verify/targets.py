"""Targets of verification: the lowered program, or a compiler's module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Target:
    """A target of `verify`.

    Attributes:
        description: the program whose collectives are compared with the predicted ones.
        here: whether it compiles for devices of this process, where there are enough.
        ahead: whether it compiles ahead of time for the strategy's cluster otherwise.
        pads: whether its compiler pads operands, so that bytes within 3 % and FLOPs within 1 % count as predicted.
        cycles: whether its compiler estimates a schedule's cycles.
        slices: whether it divides collectives between slices into phases.
        example: clusters that it compiles for.
        differs: a known reason for large differences from the prediction; empty where there is none.
    """

    description: str
    here: bool = False
    ahead: bool = False
    pads: bool = False
    cycles: bool = False
    slices: bool = False
    example: str = ""
    differs: str = ""


TARGETS = {
    "shardy": Target("the lowered program, after Shardy's propagation where it has constraints; nothing is compiled"),
    "cpu": Target(
        "the program compiled by XLA for as many CPU devices as the mesh has",
        here=True,
        differs="XLA:CPU computes, sends and stores bfloat16 as float32, in twice the bytes.",
    ),
    "tpu": Target(
        "the program compiled ahead of time by XLA:TPU for the strategy's slice",
        ahead=True,
        pads=True,
        cycles=True,
        slices=True,
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


def several_devices() -> list[Any]:
    """Devices of this process for small programs: those of the CPU, where it has several."""
    of_cpu = devices_here("cpu")
    return of_cpu if len(of_cpu) > 1 else jax.devices()


def peak_bytes_of(compiled: jax.stages.Compiled) -> float | None:
    """What a device holds at most, as the compiler says, if it does: XLA:CPU's own peak leaves temporaries out."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return float(max(held, memory.peak_memory_in_bytes))
