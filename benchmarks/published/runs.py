"""Published runs: a table of figures with their sources, and the models and devices that it names.

Left out are rows whose models are not here (mixtures of experts with their own routing, multimodal models, adapters), contexts split over
devices, chips that the catalogue does not have, and runs of which the batch is not published.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cluster.device import Device

TABLE = Path(__file__).with_name("runs.csv")


@dataclass(frozen=True, slots=True)
class Run:
    """One published run.

    Attributes:
        release: the set of runs of one software that it is published in; only plans of one are compared with each other.
        framework, source, note: where it comes from, and what was inferred.
        model: a name of `SIZES`.
        chip, topology: of one slice of devices, as of a `Cluster`; ``VARIANTS`` has chips that differ from the catalogue's.
        devices: all of them; several slices compute as one does with its share of the batch.
        precision: ``bf16``, ``fp16``, ``bf16 pure`` (gradients are combined in it too), ``fp8`` (of layers' products).
        length, batch: tokens of a sequence, sequences of a step.
        microbatches: one after the other.
        state: how state is sharded over the devices that share a batch: ``replicated``, ``zero1``, ``zero2``, ``fsdp``, ``fsdp in hosts``.
        tensor, stages, schedule: of a pipeline with ``stages`` above 1.
        keeps: what a layer keeps for its backward pass: ``all``, ``none``, or names of `benchmarks.models.decoder.PRODUCTS`.
        kernels: ``eager`` or ``fused`` by a compiler.
        attention: ``plain``, or in one kernel: ``fused``, or ``triton``, the first one that was written in Triton.
        overlap: ``yes``, or ``no`` where every collective waits for compute, and is waited for.
        seconds: measured, of a step.
        peak_gib: measured, of one device; 0.0 where it is not published.
    """

    release: str
    framework: str
    model: str
    chip: str
    topology: str
    devices: int
    precision: str
    length: int
    batch: int
    microbatches: int
    state: str
    tensor: int
    stages: int
    schedule: str
    keeps: str
    kernels: str
    attention: str
    overlap: str
    seconds: float
    peak_gib: float
    source: str
    note: str

    @property
    def family(self) -> str:
        """The catalogue's chip."""
        return VARIANTS[self.chip][0] if self.chip in VARIANTS else self.chip

    @property
    def cluster(self) -> Cluster:
        """The devices of one slice."""
        return self.of(Cluster.parse(f"{self.family}:{self.topology}"))

    def of(self, cluster: Cluster) -> Cluster:
        """The devices of one slice, by those of the catalogue, or of other figures, as the run has them."""
        device = cluster.device
        if self.chip in VARIANTS:
            device = VARIANTS[self.chip][1](device)
        if self.attention == "triton":
            device = replace(device, kernel_efficiency=TRITON[self.family])
        return replace(cluster, device=device, overlap=cluster.overlap and self.overlap == "yes")

    @property
    def plan(self) -> str:
        """The plan in a few words."""
        data = self.devices // (self.tensor * self.stages)
        parts = [f"{self.state} {data}", *([f"tensor {self.tensor}"] if self.tensor > 1 else [])]
        parts += [f"{self.stages} stages"] if self.stages > 1 else []
        parts += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        return ", ".join([*parts, *({"none": ["recomputed"], "all": []}.get(self.keeps, ["recomputed in part"]))])

    def __str__(self) -> str:
        return f"{self.model}, {self.devices} {self.chip}, {self.batch} x {self.length}, {self.precision}: {self.plan}"


# The kernel_efficiency of the first attention in Triton, which llm-foundry's runs have; later kernels are faster. Fitted by ``--fit``.
TRITON: Mapping[str, float] = {"a100": 0.39, "a100-40g": 0.39, "h100": 0.28}


def _h100_of_500_watts(device: Device) -> Device:
    """The H100 of torchtitan's runs, of 96 GB at 2.4 TB/s and 500 W, by its own account; a chip's power grows as the cube of its clock."""
    efficiency = device.matrix_efficiency * (500 / 700) ** (1 / 3)
    return replace(device, memory_bytes=96e9, memory_bandwidth_bytes_per_second=2.4e12, matrix_efficiency=efficiency)


VARIANTS: Mapping[str, tuple[str, Callable[[Device], Device]]] = {"h100-96g": ("h100", _h100_of_500_watts)}


def _gpt(layers: int, width: int, heads: int, vocabulary: int, tied: bool = True) -> dict[str, Any]:
    return {"layers": layers, "width": width, "heads": heads, "ffn": 4 * width, "vocabulary": vocabulary, "tied": tied}


def _llama(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocabulary": vocabulary}
    return {**sizes, "gated": True}


def _maxtext(scale: int) -> dict[str, Any]:
    """MaxText's default model, ``global_parameter_scale`` 2 to this power: heads and networks grow first, then width, then layers."""
    whole, rest = divmod(scale, 3)
    heads = 16 * 2 ** (whole + (rest > 0))
    return {**_llama(16 * 2**whole, 2048 * 2 ** (whole + (rest > 1)), heads, heads, 448 * heads, 32_000), "head": 128}


_MPT = 50_368  # llm-foundry, scripts/train/benchmarking: the vocabulary of all sizes
_MEGATRON = 51_200  # SC 2021, section 5.1

SIZES: Mapping[str, Mapping[str, Any]] = {
    "MPT 125M": _gpt(12, 768, 12, _MPT),
    "MPT 350M": _gpt(24, 1024, 16, _MPT),
    "MPT 760M": _gpt(24, 1536, 12, _MPT),
    "MPT 1B": _gpt(24, 2048, 16, _MPT),
    "MPT 3B": _gpt(32, 2560, 20, _MPT),
    "MPT 7B": _gpt(32, 4096, 32, _MPT),
    "MPT 13B": _gpt(40, 5120, 40, _MPT),
    "MPT 30B": _gpt(48, 7168, 56, _MPT),
    "MPT 70B": _gpt(80, 8192, 64, _MPT),
    "GPT 1.7B": _gpt(24, 2304, 24, _MEGATRON),  # SC 2021, table 1
    "GPT 3.6B": _gpt(30, 3072, 32, _MEGATRON),
    "GPT 7.5B": _gpt(36, 4096, 32, _MEGATRON),
    "GPT 18.4B": _gpt(40, 6144, 48, _MEGATRON),
    "GPT 39.1B": _gpt(48, 8192, 64, _MEGATRON),
    "GPT 76.1B": _gpt(60, 10_240, 80, _MEGATRON),
    "GPT 145.6B": _gpt(80, 12_288, 96, _MEGATRON),
    "GPT 174.6B": _gpt(96, 12_288, 96, _MEGATRON),
    "GPT 529.6B": _gpt(105, 20_480, 128, _MEGATRON),
    "GPT 1008.0B": _gpt(128, 25_600, 160, _MEGATRON),
    "GPT-3 175B": {**_gpt(96, 12_288, 96, 50_304), "head": 128},
    "Llama-2 7B": _llama(32, 4096, 32, 32, 11_008, 32_000),
    "Llama-2 70B": _llama(80, 8192, 64, 8, 28_672, 32_000),
    "Llama-3 8B": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "Llama-3 70B": _llama(80, 8192, 64, 8, 28_672, 128_256),
    "Llama-3 405B": _llama(126, 16_384, 128, 8, 53_248, 128_256),
    "MaxText 22B": {**_gpt(48, 6144, 24, 32_000, tied=False), "head": 256},
    "MaxText 52B": {**_gpt(32, 12_288, 32, 32_000, tied=False), "head": 256},
    **{f"MaxText {2**power}B": _maxtext(power) for power in range(4, 11)},
}
"""Per model the arguments of `benchmarks.models.decoder`, as its source has them."""


def read(path: Path = TABLE) -> list[Run]:
    """The runs of the table.

    Raises:
        ValueError: a row has a field that is missing or no number.
    """
    kinds = {field.name: {"int": int, "float": lambda text: float(text or 0)}.get(str(field.type), str) for field in fields(Run)}
    with path.open(encoding="utf-8", newline="") as file:
        return [Run(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]
