"""Arithmetic of a compiled module: FLOPs of its matrix products and convolutions, and the TPU compiler's estimated cycles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.errors import CompilerError
from autoshard.verify.hlo import Computation, Instruction, Module, shape_of

_NAMED = re.compile(r"(\w+)=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_PADDING = re.compile(r"padding=([\d_\-x]+)")
_SLICE = re.compile(r"slice=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_MATRIX_TARGETS = re.compile(r"gemm|matmul|conv(?!ert)|dnn|dot", re.IGNORECASE)
# XLA:GPU's calls of cuBLAS, and of cuDNN with the positions, among the two operands and the result, of image, kernel and output.
_LIBRARY_PRODUCTS = frozenset({"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"})
_LIBRARY_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}
_FUSED_ATTENTION = "__cudnn$fmha"  # how cuDNN's fused attention begins: kernels, whose work predictions count apart
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TILING = re.compile(r'ragged_dot_tiling="(\d+),')  # of XLA:TPU's kernels of grouped products, on v5p
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1  # XLA:TPU's mark for no estimate, as of a scatter on a v5p's sparse cores
_EXPANDED = re.compile(r'op_name="[^"]*/(dot\.\d+|jit\(fft\))"')  # in what XLA:TPU makes of a transform (libtpu 0.0.42)
_REMATERIALISED = ".remat"  # in the names of instructions that XLA rematerialises


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating point operations of one step on one device.

    Attributes:
        total: twice the multiplications of matrix products and convolutions, loop trips counted.
        rematerialised: the part of it that is XLA's rematerialisation.
    """

    total: float
    rematerialised: float


def dot_flops(hlo_text: str) -> Flops:
    """The FLOPs of a compiled module's matrix products and convolutions, loop trips counted.

    Products with padding or with the holes of dilation are not counted: XLA:TPU writes matrix products as convolutions whose windows are
    nearly all padding. Nor are the compiler's own, such as those with a Fourier transform's matrix.

    Raises:
        CompilerError: a library call is a matrix product of unknown sizes.
    """
    module = Module(hlo_text)
    counted = list(_flops(module, module.entry, 1, False))
    return Flops(sum(flops for flops, _ in counted), sum(flops for flops, again in counted if again))


def cycles_of(instruction: Instruction) -> int | None:
    """The cycles that the TPU compiler estimates for an instruction, 0 where they are marked unknown; None where it has no annotation."""
    found = _CYCLES.search(instruction.rest)
    return int(found[1]) % _UNKNOWN_CYCLES if found else None


def _flops(module: Module, name: str, count: int, again: bool) -> Iterator[tuple[float, bool]]:
    """Per matrix product its operations, and whether it is rematerialised."""
    computation = module.computations.get(name, Computation())
    for instruction in computation.values():
        repeated = again or _REMATERIALISED in instruction.name
        if _EXPANDED.search(instruction.rest):
            pass
        elif instruction.opcode == "dot":
            yield count * _of_dot(computation, instruction), repeated
        elif instruction.opcode == "convolution":
            yield count * _of_convolution(module, computation, instruction), repeated
        elif instruction.opcode == "custom-call":
            target = _TARGET.search(instruction.rest)
            if target and target[1] in _LIBRARY_PRODUCTS:
                yield count * _of_library_product(module, computation, instruction), repeated
            elif target and target[1] in _LIBRARY_CONVOLUTIONS:
                yield count * _of_convolution(module, computation, instruction, _LIBRARY_CONVOLUTIONS[target[1]]), repeated
            elif _TILING.search(instruction.rest):
                yield count * _of_grouped_kernel(computation, instruction), repeated
            elif target and _MATRIX_TARGETS.search(target[1]) and not target[1].startswith(_FUSED_ATTENTION):
                raise CompilerError(
                    f"flops are counted from dots and convolutions, and {instruction.name!r} calls {target[1]!r}, which says no sizes. "
                    "Report it with the versions of jax and its compiler."
                )
        for callee, times in module.called(instruction):
            yield from _flops(module, callee, count * times, repeated)


def _of_dot(computation: Computation, dot: Instruction) -> float:
    named = {name: [int(dim) for dim in dims.split(",") if dim] for name, dims in _NAMED.findall(dot.rest)}
    left = shape_of(computation[dot.operands[0]].type)
    return 2.0 * math.prod(shape_of(dot.type)) * math.prod(left[dim] for dim in named.get("lhs_contracting_dims", []))


def _of_grouped_kernel(computation: Computation, call: Instruction) -> float:
    """The operations of XLA:TPU's kernel of a grouped product, which visits blocks of rows, and those with several groups' once for each.

    Its operands are five vectors, of which the third has an element per visit, the rows, and the groups' matrices or other rows.
    """
    tiling = _TILING.search(call.rest)
    assert tiling is not None, "the kernel says how it is tiled"
    (visits, *_), (_, depth) = (shape_of(computation[call.operands[k]].type) for k in (2, 5))
    made = shape_of(call.type)
    return 2.0 * visits * int(tiling[1]) * (math.prod(made[1:]) if len(made) == 3 else depth * made[1])


def _of_library_product(module: Module, computation: Computation, call: Instruction) -> float:
    """The operations of a call of cuBLAS, whose configuration has the contracted dimensions."""
    found = _LIBRARY_CONTRACTED.search(call.rest)
    if found is None:
        raise CompilerError(f"a call of cuBLAS says which dimensions it contracts, and {call.name!r} does not: {call.rest[:120]}.")
    left, made = _unpadded(module, computation, call.operands[0]), _read(module, computation, call)
    contracted = [left[int(dim)] for dim in re.findall(r"\d+", found[1])]
    return 2.0 * math.prod(count for _, count, _ in (*made, *contracted))


def _of_convolution(module: Module, computation: Computation, convolution: Instruction, order: tuple[int, ...] = (0, 1, 2)) -> float:
    """The operations of a convolution; ``order`` is as in `_LIBRARY_CONVOLUTIONS`."""
    labels = _LABELS.search(convolution.rest)
    if labels is None:
        raise CompilerError(f"a convolution names its dimensions, and {convolution.name!r} does not: {convolution.rest[:120]}.")
    names = convolution.operands[:2]
    if convolution.opcode == "convolution":  # pads in its window; an explicit pad before it is the program's
        tensors = (*(_whole(computation[name].type) for name in names), _whole(convolution.type))
    else:
        tensors = (*(_unpadded(module, computation, name) for name in names), _read(module, computation, convolution))
    image, kernel, result = (dict(zip(text, tensors[position], strict=True)) for text, position in zip(labels.groups(), order, strict=True))
    window = _window(convolution.rest)
    products = 2.0 * result["b"][1] * result["f"][1] * kernel["i"][1]
    for position, dim in enumerate(sorted(label for label in result if label.isdigit())):
        # A convolution without spatial dimensions has no window: every size is one.
        products *= _overlaps(image[dim], kernel[dim], result[dim], *(part[position] for part in window))
    return products


Elements = tuple[int, int, int]
"""The elements of a dimension without padding and holes: offset of the first, number, and distance between two."""


def _whole(type_text: str) -> tuple[Elements, ...]:
    """Per dimension of an array's type, all elements."""
    return tuple((0, size, 1) for size in shape_of(type_text))


def _unpadded(module: Module, computation: Computation, name: str) -> tuple[Elements, ...]:
    """Per dimension of an operand, its elements before XLA:GPU padded and dilated it for a library call."""
    whole = _whole(computation[name].type)
    computation, made = _within(module, computation, computation[name])
    dims = list(range(len(whole)))  # of ``made``
    while made is not None and made.operands:
        before = computation.get(made.operands[0])
        if made.opcode == "pad" and before is not None and (found := _PADDING.search(made.rest)):
            pads = [[*map(int, pad.split("_")), 0][:3] for pad in found[1].split("x")]
            sizes = shape_of(before.type)
            return tuple((pads[dim][0], sizes[dim], pads[dim][2] + 1) for dim in dims)
        if made.opcode == "transpose":
            order = [int(dim) for dim in dict(_NAMED.findall(made.rest))["dimensions"].split(",")]
            dims = [order[dim] for dim in dims]
        elif before is None or made.opcode not in ("convert", "copy", "bitcast") or shape_of(before.type) != shape_of(made.type):
            break
        made = before
    return whole


def _within(module: Module, computation: Computation, made: Instruction) -> tuple[Computation, Instruction | None]:
    """The instruction that computes another one's result, inside a fusion where that is its source, and its computation."""
    index = re.search(r"index=(\d+)", made.rest) if made.opcode == "get-tuple-element" else None
    made = computation.get(made.operands[0], made) if index else made
    if made.opcode != "fusion":
        return computation, None if index else made
    inner = module.computations[module.called(made)[0][0]]
    root = next((instruction for instruction in inner.values() if instruction.root), None)
    return inner, inner.get(root.operands[int(index[1])]) if root and root.opcode == "tuple" and index else root


def _read(module: Module, computation: Computation, call: Instruction) -> tuple[Elements, ...]:
    """Per dimension of a library call's result, the elements that are read, where all readers take the same slice; else all."""
    whole = _whole(call.type)
    names = {taken.name for taken in computation.readers.get(call.name, []) if "index=0" in taken.rest}  # the other one is a workspace
    slices: set[str] = set()
    for reader in (reader for name in names for reader in computation.readers.get(name, [])):
        ends = [reader]
        if reader.opcode == "fusion":
            inner = module.computations[module.called(reader)[0][0]]
            places = {str(place) for place, name in enumerate(reader.operands) if name in names}
            ends = [
                end
                for parameter in inner.values()
                if parameter.opcode == "parameter" and parameter.rest.partition(",")[0] in places
                for end in inner.readers.get(parameter.name, [])
            ]
        slices.update(found[1] if end.opcode == "slice" and (found := _SLICE.search(end.rest)) else "" for end in ends)
    if len(slices) != 1 or "" in slices:
        return whole
    bounds = [[int(bound) for bound in part.split(":")] for part in re.findall(r"\[([\d:]+)\]", slices.pop())]
    return tuple((first, last - first, 1) for first, last, *_ in bounds)


def _overlaps(image: Elements, kernel: Elements, result: Elements, stride: int, before: int, image_step: int, kernel_step: int) -> int:
    """The number of pairs of a result position and a kernel position that read an element of the image, not padding or a hole.

    >>> _overlaps(image=(0, 1, 1), kernel=(0, 3, 1), result=(0, 3, 1), stride=1, before=2, image_step=1, kernel_step=1)
    3
    """
    first, count, step = image
    spacing, last, each = step * image_step, (count - 1) * step * image_step, kernel[2] * kernel_step
    at = (result[0] + np.arange(result[1]) * result[2]) * stride
    offset = at + kernel[0] * kernel_step - before - first * image_step  # of the kernel's first element from the image's first
    # Kernel positions k with offset + k * each in {0, spacing, ..., last}: by modular inverse, one residue class of an interval.
    common = math.gcd(each, spacing)
    period = spacing // common
    residue = -offset // common * pow(each // common, -1, period) % period
    low, high = np.maximum(-(offset // each), 0), np.minimum((last - offset) // each, kernel[1] - 1)
    found = (high - residue) // period - (low - 1 - residue) // period
    return int(np.where((offset % common == 0) & (high >= low), found, 0).sum())


def _window(rest: str) -> tuple[list[int], list[int], list[int], list[int]]:
    """Per spatial dimension the stride, the padding before, and the dilations of image and kernel."""
    found = _WINDOW.search(rest)
    parts = dict(part.split("=", 1) for part in found[1].split()) if found else {}
    n = len(parts.get("size", "").split("x")) if parts.get("size") else 0

    def numbers(name: str, default: int) -> list[int]:
        return [int(part.split("_")[0]) for part in parts[name].split("x")] if name in parts else [default] * n

    return numbers("stride", 1), numbers("pad", 0), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1)
