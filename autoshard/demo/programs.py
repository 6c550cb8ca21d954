"""The demo's programs: train steps with their models and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autoshard.demo import gpt, lenet
from autoshard.errors import AutoshardError


@dataclass(frozen=True, slots=True)
class Program:
    """A train step with its initial state and its data.

    Attributes:
        name, title: its short name and its description.
        init: makes the model and the optimizer; equal every time.
        train_step: ``(model, optimizer, *batch) -> loss``, updating both.
        batches: the batches of a number of steps; equal every time.
        arguments: those of the train step, abstract.
    """

    name: str
    title: str
    init: Callable[[], tuple[Any, Any]]
    train_step: Callable[..., Any]
    batches: Callable[[int], Iterable[tuple[Any, ...]]]
    arguments: Callable[[], tuple[Any, ...]]


PROGRAMS = (
    Program(
        "gpt",
        f"A GPT of {gpt.LAYERS} layers, {gpt.WIDTH} wide, on {gpt.BATCH} x {gpt.LENGTH} bytes of Python's documentation",
        gpt.init,
        gpt.train_step,
        gpt.batches,
        gpt.arguments,
    ),
    Program(
        "lenet",
        f"LeNet-5 on {lenet.BATCH} drawn digits",
        lenet.init,
        lenet.train_step,
        lenet.batches,
        lenet.arguments,
    ),
)


def named(name: str | None) -> tuple[Program, ...]:
    """The program with a name; all of them for None.

    Raises:
        AutoshardError: none has that name.
    """
    found = tuple(program for program in PROGRAMS if name in (None, program.name))
    if not found:
        raise AutoshardError(f"the demo's programs are {', '.join(program.name for program in PROGRAMS)}, got {name!r}. Name one of them.")
    return found
