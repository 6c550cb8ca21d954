"""The programs of a stage's tasks as records: what each reads, makes and sends, and where that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compilers import Compiler
from autoshard.ir import Assignment
from autoshard.lower import ReshardPath

Options = Mapping[str, Any] | None
"""A compiler's options by name, as `jax.jit` takes them in ``compiler_options``."""


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """What a search found for a stage, and where it runs.

    Attributes:
        assignment: of the stage's program.
        mesh: JAX's mesh of the stage's devices.
        reshard_path: the cheapest collectives from one layout of a value to another.
        compiler: of its devices.
    """

    assignment: Assignment
    mesh: Mesh
    reshard_path: ReshardPath
    compiler: Compiler | None = None

    @property
    def demotes(self) -> bool:
        """Whether what all readers cast to a narrower float is handed from program to program as that float.

        A compiler that sends such values narrow, as was predicted of it (`Compiler.demotes_operands`), does so within one program only.
        """
        return self.compiler is not None and self.compiler.demotes_operands


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    """A program of a stage before or after the loop.

    Attributes:
        level: the level of the messages that it may read.
        call: the jitted program, from arrays in this order: arguments and messages, donated arguments, what earlier programs hand on, and
            per kind of task its totals; to a list of results and messages, what it hands on, and where it makes them the constants of the
            loop's tasks and per kind the totals to begin with.
        arguments, donated: positions among the stage's arguments.
        receives: positions among the stage's ``receives``.
        reads: the numbers of the earlier programs whose arrays it reads.
        kinds: the tasks whose totals it reads.
        results, sends: positions among the stage's results and ``sends``.
        makes: how many arrays each part of what it makes has.
    """

    level: int
    call: Callable[..., Any]
    arguments: tuple[int, ...]
    donated: tuple[int, ...]
    receives: tuple[int, ...]
    reads: tuple[int, ...]
    kinds: tuple[str, ...]
    results: tuple[int, ...]
    sends: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def makes_constants(self) -> bool:
        """Whether it makes the constants of the loop's tasks and their first totals."""
        return len(self.makes) > 2


@dataclass(frozen=True, slots=True, eq=False)
class TaskProgram:
    """The program of one task.

    Attributes:
        kind: ``"F"``, ``"B"`` or ``"W"``.
        call: the jitted program, from arrays in this order: the microbatch's number, large constants that are arguments, the other
            constants, its totals, messages, and what each earlier task of the microbatch hands on; to a list of its totals, messages and
            what it hands on.
        keeping: the same, with which the totals that it is given are not used up.
        arguments: positions of large constants among the stage's arguments and, after them, what it receives.
        receives: positions among the stage's ``receives``.
        reads: the kinds of the earlier tasks whose arrays it reads.
        sends: positions among the stage's ``sends``.
        makes: how many totals, messages and arrays that it hands on it makes.
        residual_bytes: of what it hands on, on each device.
    """

    kind: str
    call: Callable[..., Any]
    keeping: Callable[..., Any]
    arguments: tuple[int, ...]
    receives: tuple[int, ...]
    reads: tuple[str, ...]
    sends: tuple[int, ...]
    makes: tuple[int, int, int]
    residual_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class StagePrograms:
    """All programs of a stage, and where its arguments, results and messages are.

    Attributes:
        before, after: the programs around the loop, by level.
        tasks: per kind its program; kinds in which nothing is computed are left out.
        argument_shardings, result_shardings: of the stage's arguments and results that are the step's.
        receive_shardings: of the messages that it receives, those of the loop for one microbatch.
        send_specs: the same of the messages that it sends, on its own mesh.
        passed: per result that is an argument as it is, the argument's position.
    """

    before: tuple[Outer, ...]
    tasks: dict[str, TaskProgram]
    after: tuple[Outer, ...]
    argument_shardings: tuple[NamedSharding, ...]
    result_shardings: tuple[NamedSharding, ...]
    receive_shardings: tuple[NamedSharding, ...]
    send_specs: tuple[PartitionSpec, ...]
    passed: dict[int, int] = field(default_factory=dict)


def parted(everything: Iterable[Any], sizes: Iterable[int]) -> list[tuple[Any, ...]]:
    """Parts of these sizes, one after the other."""
    left = iter(everything)
    return [tuple(islice(left, size)) for size in sizes]
