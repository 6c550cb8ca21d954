"""Collectives of a compiled module, from its HLO text.

The text is followed from the entry computation: a loop's body counts as often as it runs, a call or fusion once for each
caller. A combined collective gives one record per tensor. All forms are known (XLA:CPU's plain instructions, pairs of
``-start`` and ``-done``, ``async-start`` around a computation, custom fusions on TPU), and each transfer counts once.
XLA:CPU sends narrow floats as wider ones (bfloat16 as float32, jaxlib 0.10.2), and these bytes are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoshard.errors import CompilerError
from autoshard.ir import Collective, Mesh, ServedOp
from autoshard.ir.naming import runs_rarely
from autoshard.verify.groups import axes_of
from autoshard.verify.slices import is_between_slices, kind_and_axes, rendezvous, within_slice

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
# Bits per element of XLA's primitive types.
BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8,
    "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip

_COLLECTIVE_MARKS = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # around a collective that is an instruction itself
_OTHER_COLLECTIVES = re.compile(
    r"(collective-|ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|send|recv)(?!.*-done$|.*-update$)"
)

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_TENSOR = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLEES = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OFFLOADED = re.compile(r"\bcalled_computations=\{([^}]*)\}")  # what TPU7x leaves to its SparseCores, collectives among it
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation; ``rest`` is the text after the operands."""

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
    """The collectives of a compiled module: kind, mesh axes, bytes of one execution, executions per step, source.

    An all_reduce whose readers all slice this device's part counts as a reduce_scatter.
    """
    module = Module(hlo_text)
    return tuple(collective for collective in _collectives(module, module.entry, 1, mesh) if collective.bytes and collective.count)


class Module:
    """The computations of an HLO text, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        partitions = _PARTITIONS.search(text, 0, text.find("\n"))
        self._n_partitions = int(partitions[1]) if partitions else 0
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                header = _HEADER.match(line)
                if header and not line.startswith("HloModule"):
                    current = self.computations[header[2]] = Computation()
                    self.entry: str = header[2] if header[1] else self.entry
            elif line.startswith("}") and not line.startswith("}}"):  # the end of attributes over several lines, as of splash attention
                current = None
            elif found := _INSTRUCTION.match(line):
                instruction = _parse(found[2], found[3], bool(found[1]))
                for operand in instruction.operands:
                    _add_elements(current, operand)
                current[instruction.name] = instruction

    def mesh(self, mesh: Mesh) -> Mesh:
        """The mesh on which groups of devices are numbered: of those of one slice, where the module is one of several slices."""
        return mesh if self._n_partitions in (0, mesh.size) else within_slice(mesh)

    def called(self, instruction: Instruction) -> list[tuple[str, int]]:
        """The computations that an instruction runs, and how often; without those it applies to elements, as a reduction does.

        What `runs_rarely` counts as not run.
        """
        if (source := _SOURCE.search(instruction.rest)) and runs_rarely(source[1]) and instruction.opcode in ("while", "conditional"):
            return []
        if instruction.opcode == "while":
            trips = self.trips(instruction)
            return [(callee, trips) for callee in dict(_CALLEES.findall(instruction.rest)).values()]
        if instruction.opcode in ("call", "conditional", "async-start", "fusion"):
            return [(callee, 1) for callee in _callees(instruction)]
        if instruction.opcode == "custom-call" and (offloaded := _OFFLOADED.search(instruction.rest)):
            return [(callee, 1) for callee in re.findall(r"%?([\w.\-]+)", offloaded[1])]
        return []

    def trips(self, loop: Instruction) -> int:
        """The trip count of a while loop: as annotated, else by its counter's start, bound and step; 1 where data decide."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        callees = dict(_CALLEES.findall(loop.rest))
        condition, body = (self.computations.get(callees.get(name, ""), Computation()) for name in ("condition", "body"))
        bounds = [bound for instruction in condition.values() if (bound := _constant(instruction)) is not None]
        is_counted = not any(instruction.root and instruction.opcode in ("and", "or", "not") for instruction in condition.values())
        counter = _counter(condition)
        start = 0 if counter is None else self._start(loop, counter)
        if not bounds or not is_counted or start is None:
            return 1
        return -(-max(max(bounds) - start, 0) // (1 if counter is None else _step(counter, body)))

    def _start(self, loop: Instruction, counter: int) -> int | None:
        """The value with which a loop's counter begins; 0 where the text does not say, None where it is an argument of the program."""
        entry = self.computations.get(self.entry, Computation())
        carry = entry.get(loop.operands[0])
        first = entry.get(carry.operands[counter]) if carry and carry.opcode == "tuple" else None
        while first and first.operands and first.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            first = entry.get(first.operands[0])
        return None if first and first.opcode == "parameter" else _constant(first) or 0


def _parse(name: str, line: str, root: bool) -> Instruction:
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    kind, call = line[:end], line[end:].strip()
    opcode, _, _ = call.partition("(")
    close = _closing(call, len(opcode))
    inside = call[len(opcode) + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-#]+)", inside))
    rest = inside + call[close + 1 :] if opcode in ("constant", "parameter") else call[close + 1 :]
    return Instruction(name, kind, opcode, operands, rest, root)


def _add_elements(computation: Computation, operand: str) -> None:
    """Adds the ``get-tuple-element``s that an operand ``name#k`` stands for, under these names; XLA of jaxlib 0.12 writes them so."""
    whole, *indices = operand.split("#")
    for index in indices:
        name = f"{whole}#{index}"
        if name not in computation and whole in computation:
            kind = _elements(computation[whole].type)[int(index)]
            computation[name] = Instruction(name, kind, "get-tuple-element", (whole,), f", index={index}", False)
        whole = name


@lru_cache(maxsize=64)  # each element of a loop's carry is asked for by itself
def _elements(tuple_type: str) -> tuple[str, ...]:
    """The types of a tuple's elements.

    >>> _elements("(f32[8,16]{1,0:T(8,128)}, /*index=1*/(s32[], bf16[4]{0}))")
    ('f32[8,16]{1,0:T(8,128)}', '(s32[], bf16[4]{0})')
    """
    inside = re.sub(r"/\*.*?\*/", "", tuple_type)[1:-1]
    elements, depth, start = [], 0, 0
    for position, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(inside[start:position].strip())
            start = position + 1
    return (*elements, inside[start:].strip())


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text) - 1


def _constant(instruction: Instruction | None) -> int | None:
    """The value of an integer scalar constant; None for anything else."""
    found = re.match(r"\(?(\d+)\)?(?:$|[,)])", instruction.rest) if instruction and instruction.opcode == "constant" else None
    return int(found[1]) if found else None


def _counter(condition: Computation) -> int | None:
    """The position in a loop's carry of what its condition compares; None where it is another condition."""
    compared = next((instruction for instruction in condition.values() if instruction.root and instruction.opcode == "compare"), None)
    counter = next((condition[name] for name in compared.operands if name in condition), None) if compared else None
    index = re.search(r"index=(\d+)", counter.rest) if counter and counter.opcode == "get-tuple-element" else None
    return int(index[1]) if index else None


def _step(counter: int, body: Computation) -> int:
    """The step of a loop's counter; 1 where it is not an addition of a constant. A bidirectional windowed einsum counts by two."""
    root = next((instruction for instruction in body.values() if instruction.root and instruction.opcode == "tuple"), None)
    grown = body.get(root.operands[counter]) if root else None
    steps = [_constant(body.get(name)) for name in grown.operands] if grown and grown.opcode == "add" else []
    return next((step for step in steps if step), 1)


def shape_of(type_text: str) -> tuple[int, ...]:
    """The dimensions of an array's type."""
    found = _TENSOR.search(type_text)
    return tuple(int(re.sub(r"\D", "", size)) for size in found[2].split(",") if size) if found else ()


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


def _collectives(module: Module, name: str, count: int, mesh: Mesh) -> Iterator[Collective]:
    computation = module.computations.get(name, Computation())
    for instruction in computation.values():
        yield from sent_by(module, computation, instruction, mesh, count)
        for callee, times in module.called(instruction):
            yield from _collectives(module, callee, count * times, mesh)


def sent_by(module: Module, computation: Computation, instruction: Instruction, mesh: Mesh, count: int = 1) -> list[Collective]:
    """The collectives that an instruction is or starts, without those of computations that it calls."""
    base = instruction.opcode.removesuffix("-start")
    if base in KINDS:
        return [] if _carried(computation, instruction) else _records(module, computation, instruction, base, count, mesh)
    if instruction.opcode in ("send", "recv") and is_between_slices(instruction.rest):
        return [_between_slices(computation, instruction, mesh, count)] if instruction.opcode == "recv" else []
    if _is_collective(instruction):
        raise CompilerError(
            f"every collective of a compiled module is counted, and {instruction.opcode} {instruction.name!r} is of an unknown form: "
            f"{instruction.rest[:120]}. Report it with the versions of jax and its compiler."
        )
    return []


def _between_slices(computation: Computation, received: Instruction, mesh: Mesh, count: int) -> Collective:
    """The collective between slices of which a recv is the end; the sent or received array that is larger counts."""
    kind, axes = kind_and_axes(received.rest, mesh)
    named = _SOURCE.search(received.rest)
    both = [end for end in computation.values() if end.opcode in ("send", "recv") and rendezvous(end.rest) == rendezvous(received.rest)]
    return Collective(kind, axes, max(tensor_bytes(end.type)[0] for end in both), count, ServedOp(name=named[1]) if named else None)


def _carried(computation: Computation, collective: Instruction) -> bool:
    """Whether a collective repeats one that was started before.

    XLA:TPU repeats it in the fusions that carry it, and in the one that ends it; the first is an operand of "AsyncCollectiveStart".
    """
    if '"async_collective_fusion_config"' not in collective.rest:
        return False
    return not any('"AsyncCollectiveStart"' in reader.rest for reader in computation.readers.get(collective.name, ()))


def _is_collective(instruction: Instruction) -> bool:
    """Whether an instruction that is not one of `KINDS` is a collective of another form."""
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
        return target is not None and "ollective" in target[1] and target[1] not in _COLLECTIVE_MARKS
    return bool(_OTHER_COLLECTIVES.match(instruction.opcode))


def _callees(instruction: Instruction) -> list[str]:
    branches = _BRANCHES.search(instruction.rest)
    named = [callee for _, callee in _CALLEES.findall(instruction.rest)]
    return named + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


def _records(module: Module, computation: Computation, instruction: Instruction, base: str, count: int, mesh: Mesh) -> list[Collective]:
    mesh = module.mesh(mesh)
    axes = axes_of(instruction.rest, mesh)
    named = _SOURCE.search(instruction.rest)
    op = ServedOp(name=named[1]) if named else None
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
            if parts > 1 and names and all(_only_sliced(module, computation, name, results[k] / parts) for name in names):
                kinds[k] = "reduce_scatter"
    return [Collective(kind, axes, size, count, op) for kind, size in zip(kinds, sizes, strict=True)]


def _tensors(computation: Computation, instruction: Instruction, n: int) -> list[list[str]]:
    """Per tensor of an all_reduce the names under which it is read: its own, or those of its ``get-tuple-element``s."""
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
    """Whether every reader of a tensor slices a part of this size, as after a reduce_scatter."""
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
