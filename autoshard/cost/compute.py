"""Arithmetic of an op, and its seconds on a device by the roofline.

*Work.* Floating point operations of one execution of the whole, unsharded op: two for a multiply-add, one per element of an elementwise
op of any function, one per operand element of a reduction. Ops that only move data have none; only their bytes count.

*Roofline.* The slower of arithmetic and memory traffic, plus a kernel's fixed cost (Williams, Waterman and Patterson, Roofline, CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np

from autoshard.cluster import Device
from autoshard.ir import Op, Rule, Value
from autoshard.primitives import Work, primitive

# Blocks of a product that cuBLAS and CUTLASS give a multiprocessor: the larger ones of NVIDIA's Matrix Multiplication Background guide,
# section 2.3; smaller ones reuse their operands too little to reach the unit's rate
BLOCKS = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))
# Where the result's blocks leave multiprocessors idle, libraries split the contracted dimension among them, and add up partial sums in
# float32 (NVIDIA CUTLASS, "Efficient GEMM in CUDA", Parallelized Reductions); not for depths up to 4,096: in XLA's table a 256 x 256 result
# of such a depth runs at the rate of eight blocks on B200. A convolution's kernel gradient sums over all pixels of all images, 400,000 and
# more.
SPLIT_DEPTH = 4096
SUM_BYTES = 2 * 4  # written and read
ROWS = 8  # operands stream through a matrix unit in blocks of 8 rows: TPU sublanes (scaling book, TPUs), and an NVIDIA mma's n (PTX ISA)
THREEFRY_FLOPS = 40  # 20 rounds of add, rotate (3) and xor make two words: Salmon et al., SC 2011, section 4


def op_flops(op: Op, rule: Rule | None, values: Sequence[Value]) -> float:
    """Floating point operations of one execution of the whole op; 0.0 for control flow, whose bodies are counted by themselves.

    Args:
        op: the op.
        rule: its rule; an op without a formula counts one for each point of its iteration space, where the rule has a reduction.
        values: the program's values, by number.
    """
    if op.kernel is not None:
        return op.kernel.flops
    counted = primitive(op.primitive).work
    if op.bodies or counted == "none":
        return 0.0
    operands = tuple(values[value] for value in op.operands)
    results = tuple(values[value] for value in op.results)
    if (formula := _FORMULAS.get(counted)) is not None:
        return float(formula(op, operands, results))
    largest = max((value.size for value in results), default=0)
    if rule is None or not any(factor.kind == "reduction" for factor in rule.factors):
        return float(largest)
    return float(max(largest, math.prod(factor.size for factor in rule.factors)))


Values = tuple[Value, ...]


def _dot(op: Op, operands: Values, results: Values) -> float:
    (contracted, _), _ = op.params["dimension_numbers"]
    return 2 * results[0].size * math.prod(operands[0].shape[dim] for dim in contracted)


def _ragged_dot(op: Op, operands: Values, results: Values) -> float:
    """Work for groups of equal size; where the ragged dimension is contracted, each group contracts its share."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    work = 2 * results[0].size * math.prod(operands[0].shape[dim] for dim in contracted)
    groups = operands[2].shape[-1]
    return work / groups if set(numbers.lhs_ragged_dimensions) & set(contracted) and groups else work


def _convolution(op: Op, operands: Values, results: Values) -> float:
    """Work of the window positions over the image, without padding and dilation holes, as in XLA's HloCostAnalysis.

    So a convolution, its gradient for the image (dilated where it strides) and the one for the kernel (a large window over the
    padded image) count alike. The kernel's input channels are those of one feature group already.
    """
    numbers = op.params["dimension_numbers"]
    kernel, made = operands[1].shape, results[0].shape
    pairs = math.prod(_overlaps(*each, padded=False) for each in _slides(op, operands, results))
    return 2 * made[numbers.out_spec[0]] * made[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]] * pairs


def padding_met(op: Op, operands: Values, results: Values) -> dict[int, float]:
    """Per spatial dimension of the image, the factor by which a convolution's work grows if padding is multiplied, too.

    It is where that dimension is sharded with halos: at the image's ends halos are zeros, which are multiplied like any elements.
    """
    dims = op.params["dimension_numbers"].lhs_spec[2:]
    ratios = (_overlaps(*each, padded=True) / max(_overlaps(*each, padded=False), 1) for each in _slides(op, operands, results))
    return dict(zip(dims, ratios, strict=True))


def _slides(op: Op, operands: Values, results: Values) -> Iterator[tuple]:
    """Per spatial dimension of a convolution, the positional arguments of `_overlaps`."""
    numbers = op.params["dimension_numbers"]
    params = (op.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    sizes = [(operands[0].shape[dim], operands[1].shape[over], results[0].shape[to]) for dim, over, to in dims]
    return zip(sizes, *params, strict=True)


@cache
def _overlaps(sizes: tuple[int, int, int], stride: int, padding: tuple[int, int], holes: int, spread: int, padded: bool) -> int:
    """The number of pairs of a window element and an image element that are multiplied, along one dimension.

    Args:
        sizes: of the image, the window and the result.
        stride, padding: of the window.
        holes, spread: the dilation of the image, and of the window.
        padded: whether padding counts as elements.
    """
    image, window, made = sizes
    few, many = sorted(((window, spread), (made, stride)))
    places = np.arange(many[0]) * many[1] - padding[0]
    return sum(
        int(np.count_nonzero((padded | ((at >= 0) & (at < image * holes))) & (at % holes == 0)))
        for at in (places + start * few[1] for start in range(few[0]))
    )


def _sort(op: Op, operands: Values, results: Values) -> float:
    length = operands[0].shape[op.params["dimension"]]
    return operands[0].size * max(math.log2(max(length, 2)), 1.0)


def _fft(op: Op, operands: Values, results: Values) -> float:
    """5 n log2 n for a complex transform (Cooley and Tukey, radix 2), half of that for a real one."""
    lengths = op.params["fft_lengths"]
    points = math.prod(lengths)
    batch = max(operands[0].size, results[0].size) / max(points, 1)
    real = not (operands[0].dtype.startswith("complex") and results[0].dtype.startswith("complex"))
    return batch * 5 * points * math.log2(max(points, 2)) * (0.5 if real else 1.0)


def _matrices(value: Value) -> tuple[int, int, int]:
    """Number, rows and columns of a stack of matrices."""
    *batch, rows, columns = value.shape
    return math.prod(batch), rows, columns


def _factorisation(op: Op, operands: Values, results: Values) -> float:
    """Work of ``cubic * n**3``-like algorithms: ``cubic * max * min**2`` on rectangles."""
    batch, rows, columns = _matrices(operands[0])
    return primitive(op.primitive).cubic * batch * max(rows, columns) * min(rows, columns) ** 2


_FORMULAS: dict[Work, Callable[[Op, Values, Values], float]] = {
    "operand": lambda op, operands, results: operands[0].size,
    "dot": _dot,
    "ragged_dot": _ragged_dot,
    "convolution": _convolution,
    "window": lambda op, operands, results: results[0].size * math.prod(op.params["window_dimensions"]),
    "scattered_window": lambda op, operands, results: operands[0].size * math.prod(op.params["window_dimensions"]),
    "updates": lambda op, operands, results: operands[2].size,
    "comparisons": _sort,
    "heap": lambda op, operands, results: operands[0].size * max(math.log2(max(op.params["k"], 2)), 1.0),
    "butterflies": _fft,
    "factorisation": _factorisation,
    "substitution": lambda op, operands, results: operands[1].size * operands[0].shape[-1],
    "threefry": lambda op, operands, results: THREEFRY_FLOPS * results[0].size,
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of compute on one device; elementwise for numpy arrays."""

    device: Device

    def seconds(
        self, matrix: bool, flops: float | np.ndarray, dtype: str, nbytes: float | np.ndarray, starts: int = 1
    ) -> float | np.ndarray:
        """Seconds of one kernel, or of work that is fused into another.

        Args:
            matrix: whether it runs on the matrix unit.
            flops: its arithmetic on this device.
            dtype: of the arithmetic.
            nbytes: its memory traffic on this device.
            starts: the number of kernel starts; 0 for fused work.
        """
        rate = self.device.matrix_rate(dtype) if matrix else self.device.vector_rate(dtype)
        moved = nbytes / self.device.memory_rate
        return _most(flops / rate, moved) + starts * self.device.kernel_overhead_seconds

    def dot_seconds(
        self,
        batch: float | np.ndarray,
        m: float | np.ndarray,
        n: float | np.ndarray,
        k: float | np.ndarray,
        dtype: str,
        nbytes: float | np.ndarray,
        starts: int = 1,
    ) -> float | np.ndarray:
        """Seconds of ``batch`` products of ``(m, k)`` by ``(k, n)``, padded to the matrix unit's tiles.

        A single unit has a tile of one operand, and the rows of the other stream through it: ``k`` and one of ``m`` and ``n`` are padded
        to the tile, the other one to a block of rows, whichever costs less. On many multiprocessors blocks of the result run in waves,
        the last of which takes as long as a full one (NVIDIA, Matrix Multiplication Background, sections 3.1 and 3.2), or the contracted
        dimension is split, where it is deep. For cuBLAS's times of 24 square products on A100 (triton-lang/triton issue 3551) and XLA's
        of 38 on H100 (matmul_interpolator_data.h) the median error is 8 % and 6 %, without waves and splits 28 % and 26 %.
        """
        tile = self.device.matrix_tile
        if not (processors := self.device.processors):
            return self.seconds(True, 2 * batch * self._padded(m, n, k), dtype, nbytes, starts)
        blocks = [(batch * _parts(m, high) * _parts(n, wide), high * wide) for high, wide in BLOCKS]

        def split(times: float | np.ndarray) -> float | np.ndarray:
            area = reduce(_least, (_pad(count * times, processors) / times * size for count, size in blocks))
            sums = SUM_BYTES * batch * m * n * times * (times > 1)
            return self.seconds(True, 2 * area * _pad(k, tile), dtype, nbytes + sums, starts)

        return _least(split(1), split(_parts(k, SPLIT_DEPTH)))

    def padding(self, m: int, n: int, k: int) -> float:
        """How many times the work of a product of these sizes its tiles are, within one kernel."""
        return float(self._padded(m, n, k)) / max(m * n * k, 1)

    def _padded(self, m: float | np.ndarray, n: float | np.ndarray, k: float | np.ndarray) -> float | np.ndarray:
        tile, rows = self.device.matrix_tile, min(ROWS, self.device.matrix_tile)
        return _least(_pad(m, rows) * _pad(n, tile), _pad(m, tile) * _pad(n, rows)) * _pad(k, tile)


def _least(one: float | np.ndarray, other: float | np.ndarray) -> float | np.ndarray:
    return np.minimum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else min(one, other)


def _most(one: float | np.ndarray, other: float | np.ndarray) -> float | np.ndarray:
    return np.maximum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else max(one, other)


def _parts(size: float | np.ndarray, of: int) -> float | np.ndarray:
    return np.ceil(size / of) if isinstance(size, np.ndarray) else float(math.ceil(size / of))


def _pad(size: float | np.ndarray, to: int) -> float | np.ndarray:
    return _parts(size, to) * to
