"""Kernels of a compiled program by the operations of the graph that they compute, and the cycles or bytes of each.

The innermost scope of an operation is its number (`autoshard.ir.naming.OP_SCOPE`), which compilers keep in the metadata of instructions. A
kernel is of several operations, and *led* by one: by its product, if it has one, else by the operation that its own metadata name. What
has no scope, as copies between layouts have none, is led by the operation that makes its operand, else by the first that reads it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoshard.cluster import Device
from autoshard.ir.naming import OP_SCOPE
from autoshard.verify.flops import cycles_of
from autoshard.verify.hlo import Computation, Instruction, Module, tensor_bytes

_OP = re.compile(rf'op_name="[^"]*[/(]{re.escape(OP_SCOPE)}(\d+)')  # greedy: the innermost
_PRODUCTS = frozenset({"convolution", "dot"})
_NOTHING = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"})
_PASSED = frozenset({"bitcast", "get-tuple-element", "tuple", "copy", "copy-start", "copy-done", "transpose", "reshape"})

NO_OP = -1
"""The number that stands for no operation."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel of a compiled program.

    Attributes:
        name: of its instruction.
        leader: the index of the operation that leads it; `NO_OP` where none does.
        ops: the indices of all operations that it computes, the leader's included.
        product: whether it has a matrix product or a convolution.
        runs: how often it runs in a step.
        cycles: of one run, as the compiler estimates them; None where it does not.
        nbytes: of its operands and results, read and written once.
    """

    name: str
    leader: int
    ops: tuple[int, ...]
    product: bool
    runs: int
    cycles: int | None
    nbytes: float


@dataclass(frozen=True, slots=True)
class Clock:
    """The seconds of a compiler's cycles.

    Its schedule assumes products at the peak. Of published runs it is known what share of it products reach on machines; with that share
    seconds are on the scale of predictions, without it they are the compiler's own.

    Attributes:
        hertz: of the device.
        product_share: the share of the assumed rate that products reach.
        bytes_per_second: of memory; a product that waits for its traffic is no slower where the matrix unit is.
    """

    hertz: float
    product_share: float = 1.0
    bytes_per_second: float = math.inf

    @classmethod
    def of(cls, device: Device) -> Clock:
        """The clock of a device on the scale of predictions."""
        return cls(device.clock_hertz, device.matrix_efficiency, device.memory_rate)

    def seconds(self, kernel: CompiledKernel) -> float:
        """The seconds of one run of a kernel; 0.0 where the compiler does not estimate it."""
        seconds = (kernel.cycles or 0) / self.hertz
        waits = kernel.nbytes / self.bytes_per_second >= seconds * self.product_share
        return seconds if waits or not kernel.product else seconds / self.product_share


def compiled_kernels(hlo_text: str) -> tuple[CompiledKernel, ...]:
    """The kernels of a compiled module in its order, those of loops once; collectives are not among them, fusions with them are."""
    module = Module(hlo_text)
    return tuple(_kernels(module, module.entry, 1))


def seconds_by_op(kernels: Iterable[CompiledKernel], clock: Clock) -> dict[int, float]:
    """The seconds of a step by the operation that leads; of several kernels the sum."""
    found: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        found[kernel.leader] += kernel.runs * clock.seconds(kernel)
    return dict(found)


def bytes_by_op(hlo_text: str, alive: Iterable[tuple[str, float]]) -> tuple[dict[int, float], dict[int, float]]:
    """The bytes of values by the operation that makes them, and those of arguments by their position.

    Args:
        alive: the names of their instructions, with the bytes of each.
    """
    module = Module(hlo_text)
    made, given = defaultdict[int, float](float), defaultdict[int, float](float)
    places = {name: computation for computation in module.computations.values() for name in computation}
    for name, nbytes in alive:
        computation = places.get(name, Computation())
        if name not in computation:
            made[NO_OP] += nbytes
        elif (instruction := computation[name]).opcode == "parameter" and computation is module.computations[module.entry]:
            given[int(instruction.rest.partition(",")[0])] += nbytes
        else:
            made[_led_by(module, computation, instruction)] += nbytes
    return dict(made), dict(given)


def _kernels(module: Module, name: str, runs: int) -> Iterator[CompiledKernel]:
    computation = module.computations.get(name, Computation())
    for instruction in computation.values():
        inner = [] if instruction.opcode == "fusion" else module.called(instruction)
        for callee, times in inner:
            yield from _kernels(module, callee, runs * times)
        cycles = cycles_of(instruction)
        if inner or instruction.opcode in _NOTHING or (cycles is None and not instruction.opcode.startswith(("fusion", "custom-call"))):
            continue
        yield kernel_of(module, computation, instruction, runs)


def kernel_of(module: Module, computation: Computation, instruction: Instruction, runs: int = 1) -> CompiledKernel:
    """The kernel that an instruction is."""
    ops, products = _ops(module, instruction), _products(module, instruction)
    leader = _led_by(module, computation, instruction)
    read = (computation[operand].type for operand in instruction.operands if operand in computation)
    nbytes = sum(sum(tensor_bytes(each)) for each in (instruction.type, *read))
    named, cycles = tuple(dict.fromkeys((leader, *ops))), cycles_of(instruction)
    return CompiledKernel(instruction.name, leader, named, bool(products), runs, cycles, nbytes)


def _op(instruction: Instruction) -> int:
    """The operation that an instruction's own metadata name."""
    found = _OP.search(instruction.rest)
    return int(found[1]) if found else NO_OP


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions of a fusion, fusions within it opened."""
    for callee, _ in module.called(instruction) if instruction.opcode == "fusion" else ():
        for inner in module.computations.get(callee, Computation()).values():
            yield inner
            yield from _inside(module, inner)


def _ops(module: Module, instruction: Instruction) -> list[int]:
    """The operations that a kernel computes, those of most instructions first."""
    counts = Counter(op for each in (instruction, *_inside(module, instruction)) if (op := _op(each)) != NO_OP)
    return [op for op, _ in counts.most_common()]


def _products(module: Module, instruction: Instruction) -> list[Instruction]:
    """The products of a kernel."""
    return [each for each in (instruction, *_inside(module, instruction)) if each.opcode in _PRODUCTS]


def _led_by(module: Module, computation: Computation, instruction: Instruction) -> int:
    """The operation that leads a kernel."""
    if not (ops := _ops(module, instruction)):
        return _nearby(module, computation, instruction)
    return next((op for each in (*_products(module, instruction), instruction) if (op := _op(each)) != NO_OP), ops[0])


def _nearby(module: Module, computation: Computation, instruction: Instruction) -> int:
    """The operation that makes the first operand of an instruction without one, else the first that reads its result."""
    for before in (True, False):
        waiting, seen = [instruction], {instruction.name}
        while waiting:
            at = waiting.pop(0)
            near = [computation[name] for name in at.operands if name in computation] if before else computation.readers.get(at.name, [])
            for each in near:
                if each.name in seen or each.opcode == "parameter":
                    continue
                seen.add(each.name)
                if _ops(module, each):
                    return _led_by(module, computation, each)
                if each.opcode in _PASSED or each.opcode == "fusion":
                    waiting.append(each)
    return NO_OP
