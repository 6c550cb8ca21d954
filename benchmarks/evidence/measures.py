"""Figures of compiled programs: what kernels write, what is sent and in which type, cycles and bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.verify import Ahead
from autoshard.verify.flops import cycles_of as estimated
from autoshard.verify.flops import dot_flops
from autoshard.verify.hlo import Computation, Instruction, Module, tensor_bytes

Figure = float | str
"""A number, or types of arrays as HLO writes them."""

DIGITS = 4  # of a figure
_TYPE = re.compile(r"\b[a-z]+\d*\[[\d,]*\]")
_SENT = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$")
_VIEWS = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "call", "conditional"})


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of compiled programs.

    Attributes:
        name: what it counts.
        of: gives it.
        cycles: whether code has to be generated for it.
    """

    name: str
    of: Callable[[Ahead], Figure]
    cycles: bool = False


def rounded(figure: Figure) -> Figure:
    """A figure as it is kept.

    >>> rounded(1748544), rounded(2.0), rounded("bf16[8]")
    (1749000, 2, 'bf16[8]')
    """
    if isinstance(figure, str):
        return figure
    number = float(f"{figure:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


# -- arrays ----------------------------------------------------------------------------------------------------------------


def stored(type_text: str) -> Measure:
    """How many arrays of a type, such as ``bf16[64,64]``, kernels write."""
    return Measure(f"kernels' results {type_text}", lambda ahead: sum(_TYPE.findall(one.type).count(type_text) for one in _kernels(ahead)))


def read(type_text: str) -> Measure:
    """How many kernels of a program without loops read an array of a type."""

    def of(ahead: Ahead) -> int:
        module = Module(ahead.hlo)
        entry = module.computations[module.entry]
        return sum(any(type_text in entry[name].type for name in one.operands if name in entry) for one in _kernels(ahead))

    return Measure(f"kernels that read {type_text}", of)


def ordered(type_text: str) -> Measure:
    """How many arrays of a type in an order of dimensions, such as ``f32[64,128]{0,1``, kernels write."""
    return Measure(f"kernels' results {type_text}}}", lambda ahead: sum(one.type.count(type_text) for one in _kernels(ahead)))


def together(first: str, second: str) -> Measure:
    """How many kernels write arrays of two types."""
    return Measure(
        f"kernels that make {first} and {second}",
        lambda ahead: sum({first, second} <= set(_TYPE.findall(one.type)) for one in _kernels(ahead)),
    )


def copies(type_text: str) -> Measure:
    """How many kernels do nothing but copy an array of a type to another layout."""
    return Measure(f"copies of {type_text}", lambda ahead: sum(one.opcode == "copy" and type_text in one.type for one in _kernels(ahead)))


def in_fast_memory(type_text: str) -> Measure:
    """How many arrays of a type kernels write to the core's own memory."""
    there = re.compile(re.escape(type_text) + r"\{[^}]*S\(1\)")
    return Measure(f"{type_text} in the core's memory", lambda ahead: sum(len(there.findall(one.type)) for one in _kernels(ahead)))


def near() -> Measure:
    """Of the bytes that products read the percentage that is in the core's own memory."""

    def of(ahead: Ahead) -> float:
        module = Module(ahead.hlo)
        entry = module.computations[module.entry]
        read = [entry[name].type for one in entry.values() if _multiplies(module, one) for name in one.operands if name in entry]
        return 100 * sum(sum(tensor_bytes(one)) for one in read if "S(1)" in one) / sum(sum(tensor_bytes(one)) for one in read)

    return Measure("% of products' operands in the core's memory", of)


PEAK = Measure("MiB at the fullest moment", lambda ahead: "refused" if ahead.peak_bytes is None else ahead.peak_bytes / 2**20)
"""Arguments and results included."""


COMPILES = Measure("compiles", lambda ahead: "yes", cycles=True)
"""Whether the compiler takes the program; ``no`` of one that it refuses."""


# -- collectives and products ----------------------------------------------------------------------------------------------


def sent(kind: str) -> Measure:
    """The types of the arrays that collectives of a kind send, and how many there are of each."""

    def of(ahead: Ahead) -> str:
        found = Counter(_TYPE.findall(one.type)[0] for one in _collectives(ahead, kind))
        return ", ".join(f"{n} {one}" if n > 1 else one for one, n in sorted(found.items()))

    return Measure(f"{kind}s", of)


def largest(kind: str) -> Measure:
    """The MiB of the largest collective of a kind."""

    def of(ahead: Ahead) -> float:
        return max((sum(tensor_bytes(one.type)) for one in _collectives(ahead, kind)), default=0.0) / 2**20

    return Measure(f"MiB of the largest {kind}", of)


def formed(kind: str) -> Measure:
    """How many collectives of a kind there are, those that are kernels of XLA:TPU's own included, such as ``all-reduce-scatter``."""
    name = re.compile(rf"{kind}|all-{kind}")

    def is_one(one: Instruction) -> bool:
        return bool(name.match(one.opcode) or (one.opcode == "fusion" and name.match(one.name)))

    return Measure(f"{kind}s", lambda ahead: sum(map(is_one, _kernels(ahead))))


def carried(kind: str) -> Measure:
    """How many of the fusions in which a collective is under way have a product."""

    def of(ahead: Ahead) -> str:
        module = Module(ahead.hlo)
        bodies = [module.computations[callee] for one in _kernels(ahead) if one.opcode == "fusion" for callee, _ in module.called(one)]
        under_way = [body for body in bodies if any(one.opcode == kind for one in body.values()) and not _starts_or_ends(body)]
        return f"{sum(any(_multiplies(module, one) for one in body.values()) for body in under_way)} of {len(under_way)}"

    return Measure(f"fusions with a product, of those that carry an {kind}", of)


def counted(text: str) -> Measure:
    """How many instructions, in fusions or not, have a text."""

    def of(ahead: Ahead) -> int:
        computations = Module(ahead.hlo).computations.values()
        return sum(text in f"{one.opcode}({one.rest}" for computation in computations for one in computation.values())

    return Measure(f"instructions with {text.removesuffix('(')}", of)


def after_the_last(type_text: str, others: str) -> Measure:
    """How many calls of a library that make arrays of a type come after the last one that makes others."""

    def of(ahead: Ahead) -> int:
        made = [one.type for one in _kernels(ahead) if one.opcode == "custom-call"]
        last = max((k for k, one in enumerate(made) if others in one), default=-1)
        return sum(type_text in one for one in made[last + 1 :])

    return Measure(f"{type_text} made after the last {others}", of)


def times_the_rows(flops: float) -> Measure:
    """The arithmetic of products as a multiple, and whether a kernel skips blocks of it."""

    def of(ahead: Ahead) -> str:
        skips = "ITERATION_SKIPPER_MODE_GROUP_STARTS" in ahead.hlo
        return f"{dot_flops(ahead.hlo).total / flops:.4g}{', skipped' if skips else ''}"

    return Measure("times the work of each row in its group", of)


def rows_of_blocks(rows: int) -> Measure:
    """How many of so many rows a block of a grouped product's kernel has, in the mean."""
    bounds = re.compile(r'"num_groups_in_ragged_dot".*"iteration_bounds":\["\d+","\d+","(\d+)"')

    def of(ahead: Ahead) -> float:
        return next(rows / int(found[1]) for found in map(bounds.search, ahead.hlo.splitlines()) if found)

    return Measure("rows of a block", of)


# -- cycles ----------------------------------------------------------------------------------------------------------------


def cycles_of(name: str, counts: Callable[[Module, Instruction], bool]) -> Measure:
    """What the schedule estimates for some kernels, one after the other."""

    def of(ahead: Ahead) -> float:
        module = Module(ahead.hlo)
        return sum(times * (estimated(one) or 0) for one, times in _scheduled(module) if counts(module, one))

    return Measure(name, of, cycles=True)


def _only_copies(module: Module, one: Instruction) -> bool:
    inside = {each.opcode for callee, _ in module.called(one) for each in module.computations[callee].values()}
    return one.opcode == "copy" or (one.opcode == "fusion" and "copy" in inside <= _VIEWS | {"copy"})


CYCLES = cycles_of("cycles", lambda _, one: True)
COPYING = cycles_of("cycles of copies", _only_copies)
FILLING = cycles_of("cycles of filling", lambda _, one: one.opcode == "broadcast")


# -- instructions ----------------------------------------------------------------------------------------------------------


def _scheduled(module: Module) -> Iterator[tuple[Instruction, int]]:
    """The instructions that run one after the other, loops' bodies included, each with how often it does."""

    def of(name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for one in module.computations[name].values():
            yield one, times
            for callee, trips in module.called(one) if one.opcode != "fusion" else ():
                yield from of(callee, times * trips)

    return of(module.entry, 1)


def _kernels(ahead: Ahead) -> Iterator[Instruction]:
    """Those that write something; not copies to and from the core's own memory."""
    for one, _ in _scheduled(Module(ahead.hlo)):
        if one.opcode not in _VIEWS and not one.opcode.startswith("copy-") and not one.opcode.endswith("-done"):
            yield one


def _collectives(ahead: Ahead, kind: str) -> Iterator[Instruction]:
    return (one for one in _kernels(ahead) if (match := _SENT.match(one.opcode)) and match[1] == kind)


def _starts_or_ends(body: Computation) -> bool:
    return any("AsyncCollective" in one.rest for one in body.values())


def _multiplies(module: Module, one: Instruction) -> bool:
    """Whether an instruction is a product, or a fusion that has one."""
    called = module.called(one) if one.opcode == "fusion" else ()
    return one.opcode in ("convolution", "dot") or any(
        _multiplies(module, each) for callee, _ in called for each in module.computations[callee].values()
    )
