"""The figures of an accelerator: arithmetic rates, memory size and bandwidth, kernel overhead."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import ClusterError

KINDS = ("tpu", "gpu", "cpu")
LANES = 8 * 128 * 4  # vector operations a cycle of a TPU's core: (8 x 128) lanes x 4 units (scaling book, appendix A)
DTYPE_CLASSES = ("bf16", "fp16", "f32", "f64", "int8", "fp8")

_CLASS_OF = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64", "complex64": "f32", "complex128": "f64"}
_COMPLEX_WORK = 4  # real multiply-adds in one complex multiply-add


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator's figures.

    Attributes:
        name: as in the catalogue, ``v5e``.
        kind: ``tpu``, ``gpu`` or ``cpu``.
        flops_per_second: dense peak of the matrix unit, as pairs (dtype class, rate). ``f32`` is the rate of a float32 product at
            JAX's default precision: one bfloat16 pass on a TPU, TF32 on a GPU.
        vector_flops_per_second: float32 peak outside the matrix unit.
        memory_bytes: size of its main memory.
        memory_bandwidth_bytes_per_second: peak bandwidth of that memory.
        kernel_overhead_seconds: fixed cost of one compiled kernel.
        matrix_tile: a matrix product's sides are padded to multiples of this.
        processors: multiprocessors, which compute blocks of a product in waves; 0 for a single matrix unit.
        matrix_efficiency: the share of the matrix unit's peak that large, aligned products reach.
        memory_efficiency: the share of the memory's peak that large kernels reach.
        kernel_efficiency: the share of the rate of large products that those within a fused kernel reach, as attention's do, which wait for
            other work of the kernel.
        clock_hertz: the clock in which a compiler estimates cycles; 0 where none does.
        low_share, high_share: between these multiples of the predicted step time eight in ten published runs on it took; 0.0: none is
            published.
        late_share: by how many times the communication that is predicted to be hidden a step may take longer than that; 0.0: by none.
        pair_error: how far the predicted ratio of two plans' step times is off, in half of the pairs of published runs of one model: plans
            whose predicted times are nearer are equal; 0.0: none is published.
        host_bandwidth_bytes_per_second: one way, of the device's own link to its host's memory; 0 where it has none, or it is not known.
        source: where the figures come from.
    """

    name: str
    kind: str
    flops_per_second: tuple[tuple[str, float], ...]
    vector_flops_per_second: float
    memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    kernel_overhead_seconds: float
    matrix_tile: int
    source: str
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    kernel_efficiency: float = 1.0
    clock_hertz: float = 0.0
    processors: int = 0
    host_bandwidth_bytes_per_second: float = 0.0
    low_share: float = 0.0
    high_share: float = 0.0
    late_share: float = 0.0
    pair_error: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ClusterError(f"a device's kind is one of {KINDS}, got {self.kind!r} for {self.name!r}.")
        unknown = [name for name, _ in self.flops_per_second if name not in DTYPE_CLASSES]
        if unknown or "f32" not in dict(self.flops_per_second):
            raise ClusterError(
                f"flops_per_second of device {self.name!r} gives a rate for 'f32' and for any of {DTYPE_CLASSES}, "
                f"got {self.flops_per_second}."
            )
        rates = (*(rate for _, rate in self.flops_per_second), self.vector_flops_per_second, self.memory_bandwidth_bytes_per_second)
        least = min(self.kernel_overhead_seconds, self.clock_hertz, self.processors, self.host_bandwidth_bytes_per_second)
        if any(rate <= 0 for rate in rates) or self.memory_bytes <= 0 or least < 0 or self.matrix_tile < 1:
            raise ClusterError(f"rates, memory and tile of device {self.name!r} are positive, got {self}.")
        if not 0 <= self.low_share <= self.high_share:
            raise ClusterError(
                f"measured step times of device {self.name!r} are between low_share and high_share of the predicted ones, the lower one "
                f"first, got {self.low_share} and {self.high_share}."
            )
        if self.late_share < 0:
            raise ClusterError(f"late_share of device {self.name!r} counts hidden communication, 0 times or more, got {self.late_share}.")
        if not 0 <= self.pair_error < 1:
            raise ClusterError(f"pair_error of device {self.name!r} is a share of a step time, from 0 up to 1, got {self.pair_error}.")
        shares = self.matrix_efficiency, self.memory_efficiency, self.kernel_efficiency
        if not all(0 < share <= 1 for share in shares):
            raise ClusterError(
                f"efficiencies of device {self.name!r} are shares of its peaks, above 0 and up to 1, got {', '.join(map(str, shares))}."
            )

    @property
    def memory_rate(self) -> float:
        """Memory bandwidth that large kernels reach, in bytes per second."""
        return self.memory_bandwidth_bytes_per_second * self.memory_efficiency

    def matrix_rate(self, dtype: str) -> float:
        """Flops per second of large products of a dtype (``float32``); the vector rate where the matrix unit does not support it."""
        rates = dict(self.flops_per_second)
        name = "fp8" if dtype.startswith("float8") else "int8" if dtype in ("int8", "uint8", "int4", "uint4") else _CLASS_OF.get(dtype, "")
        if name not in rates:
            return self.vector_rate(dtype)
        return rates[name] * self.matrix_efficiency / (_COMPLEX_WORK if dtype.startswith("complex") else 1)

    def vector_rate(self, dtype: str) -> float:
        """Flops per second of elementwise work of a dtype; float64 never runs faster than its matrix products."""
        rate = self.vector_flops_per_second
        if _CLASS_OF.get(dtype) == "f64":
            rate = min(rate, dict(self.flops_per_second).get("f64", rate))
        return rate / (_COMPLEX_WORK if dtype.startswith("complex") else 1)
