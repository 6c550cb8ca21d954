"""The collectives of a compiled module, read from its HLO text.

The text is walked from the entry computation: a loop's body counts its trips, a call or fusion once for each caller. One
record a tensor: a combined collective moves several. Forms differ by compiler (XLA:CPU's plain instructions, pairs
``-start`` and ``-done``, ``async-start`` around a computation, custom fusions on TPU); what moves data once counts once.
XLA:CPU moves narrow floats as wider ones (bfloat16 as float32, jaxlib 0.10.2), and their bytes are what it moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.ir import Collective, Mesh
from autoshard.verify.groups import axes_of

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
# Bits an element; XLA's primitive types.
BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8,
    "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_TENSOR = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLEES = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation; ``rest`` is what follows the operands."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool


class Computation(dict[str, Instruction]):
    """Instructions by name."""

    @cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """Per name the instructions that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


def collectives_of(hlo_text: str, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives of a compiled module: kind, mesh axes, bytes of one execution, executions a step, source.

    An all_reduce of which every reader takes this device's slice is a reduce_scatter that the compiler did not form.
    """
    module = Module(hlo_text)
    return tuple(collective for collective in _collectives(module, module.entry, 1, mesh, set()) if collective.bytes)


class Module:
    """The computations of an HLO text, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                header = _HEADER.match(line)
                if header and not line.startswith("HloModule"):
                    current = self.computations[header[2]] = Computation()
                    self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif found := _INSTRUCTION.match(line):
                instruction = _parse(found[2], found[3], bool(found[1]))
                current[instruction.name] = instruction

    def trips(self, loop: Instruction) -> int:
        """How often a while loop runs: as the compiler says, else the bound its condition compares with, else once."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = dict(_CALLEES.findall(loop.rest)).get("condition", "")
        bounds = [
            int(constant[1])
            for instruction in self.computations.get(condition, Computation()).values()
            if instruction.opcode == "constant" and (constant := re.match(r"\(?(\d+)\)?", instruction.rest))
        ]
        return max(bounds, default=1)


def _parse(name: str, line: str, root: bool) -> Instruction:
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    kind, call = line[:end], line[end:].strip()
    opcode, _, _ = call.partition("(")
    close = _closing(call, len(opcode))
    inside = call[len(opcode) + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    rest = inside + call[close + 1 :] if opcode in ("constant", "parameter") else call[close + 1 :]
    return Instruction(name, kind, opcode, operands, rest, root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at ``start`` closes."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text) - 1


def tensor_bytes(type_text: str) -> tuple[float, ...]:
    """The bytes of every tensor of a type, tuples flattened.

    >>> tensor_bytes("(f32[8,16]{1,0}, bf16[4]{0}, s4[3])")
    (512.0, 8.0, 1.5)
    """
    return tuple(
        BITS[kind] / 8 * math.prod(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size)
        for kind, sizes in _TENSOR.findall(type_text)
        if kind in BITS
    )


def _collectives(module: Module, name: str, count: int, mesh: Mesh, in_flight: set[str]) -> Iterator[Collective]:
    computation = module.computations.get(name, Computation())
    for instruction in computation.values():
        base = instruction.opcode.removesuffix("-start")
        if base in KINDS:
            yield from _records(module, computation, instruction, base, count, mesh)
        elif instruction.opcode == "while":
            trips = module.trips(instruction)
            for callee in dict(_CALLEES.findall(instruction.rest)).values():
                yield from _collectives(module, callee, count * trips, mesh, in_flight)
        elif instruction.opcode in ("call", "conditional", "async-start"):
            for callee in _callees(instruction):
                yield from _collectives(module, callee, count, mesh, in_flight)
        elif instruction.opcode == "fusion":
            yield from _fused(module, instruction, count, mesh, in_flight)


def _fused(module: Module, fusion: Instruction, count: int, mesh: Mesh, in_flight: set[str]) -> Iterator[Collective]:
    """A TPU fusion's collectives; the fusions that start, carry and end one all show it, under one channel."""
    for callee in _callees(fusion):
        for inner in module.computations.get(callee, Computation()).values():
            channel = re.search(r"channel_id=(\d+)", inner.rest)
            if channel and channel[1] in in_flight:
                return
            if channel:
                in_flight.add(channel[1])
        yield from _collectives(module, callee, count, mesh, in_flight)


def _callees(instruction: Instruction) -> list[str]:
    branches = _BRANCHES.search(instruction.rest)
    named = [callee for _, callee in _CALLEES.findall(instruction.rest)]
    return named + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


def _records(module: Module, computation: Computation, instruction: Instruction, base: str, count: int, mesh: Mesh) -> list[Collective]:
    axes = axes_of(instruction.rest, mesh)
    source = _SOURCE.search(instruction.rest)
    results = tensor_bytes(instruction.type)
    operands = tuple(size for name in instruction.operands if name in computation for size in tensor_bytes(computation[name].type))
    if base == "all-to-all" and "dimensions=" not in instruction.rest:
        sizes = (max(sum(operands), sum(results)),)  # the chunks of one tensor
    elif instruction.opcode.endswith("-start") and base != "all-reduce":
        sizes = tuple(max(pair) for pair in zip(operands, results[len(operands) :], strict=False))  # (operands, results, contexts)
    else:
        sizes = tuple(max(pair) for pair in zip(operands or results, results, strict=False))
    kinds = [KINDS[base]] * len(sizes)
    if base == "all-reduce":
        parts = math.prod(dict(mesh.axes).get(axis, 0) for axis in axes)
        for k, names in enumerate(_tensors(computation, instruction, len(sizes))):
            if parts > 1 and names and all(_only_sliced(module, computation, name, sizes[k] / parts) for name in names):
                kinds[k] = "reduce_scatter"
    return [Collective(kind, axes, size, count, source[1] if source else "") for kind, size in zip(kinds, sizes, strict=True)]


def _tensors(computation: Computation, instruction: Instruction, n: int) -> list[list[str]]:
    """Per tensor of an all_reduce the names under which it is read: its own, or those that take it out of the tuple."""
    name = instruction.name
    if instruction.opcode.endswith("-start"):
        (name,) = [reader.name for reader in computation.readers.get(name, ())] or [name]
    if n == 1 and not computation[name].type.startswith("("):
        return [[name]]
    taken: list[list[str]] = [[] for _ in range(n)]
    for reader in computation.readers.get(name, ()):
        index = re.search(r"index=(\d+)", reader.rest)
        if reader.opcode == "get-tuple-element" and index:
            taken[int(index[1])].append(reader.name)
    return taken


def _only_sliced(module: Module, computation: Computation, name: str, part_bytes: float) -> bool:
    """Whether every reader of a tensor takes just a part of this size, as after a reduce_scatter."""
    readers = computation.readers.get(name, [])
    if not readers or computation[name].root:
        return False
    return all(_slices(module, computation, name, reader, part_bytes) for reader in readers)


def _slices(module: Module, computation: Computation, name: str, reader: Instruction, part_bytes: float) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name and tensor_bytes(reader.type) == (part_bytes,)
    if reader.opcode in ("bitcast", "copy", "reshape"):
        return _only_sliced(module, computation, reader.name, part_bytes)
    if reader.opcode != "fusion":
        return False
    (body,) = (module.computations[callee] for callee in _callees(reader))
    positions = {str(position) for position, operand in enumerate(reader.operands) if operand == name}
    parameters = [inner.name for inner in body.values() if inner.opcode == "parameter" and inner.rest.partition(",")[0] in positions]
    return bool(parameters) and all(_only_sliced(module, body, parameter, part_bytes) for parameter in parameters)
