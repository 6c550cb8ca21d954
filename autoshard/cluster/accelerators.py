"""More devices, with figures from datasheets alone: racks of Blackwell, smaller NVIDIA GPUs, Ironwood, and those of AMD and Huawei.

What compilers and measurements say of them is not known here. Programs are planned for all of them, and compiled ahead of time for those in
`COMPUTE_CAPABILITY` and for TPUs; a plan for AMD's and Huawei's takes XLA:GPU as their compiler. Estimates are marked.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster.catalogue import (
    A100_EFFICIENCY,
    B200_EFFICIENCY,
    BLACKWELL_NCCL,
    GIB,
    HOPPER_EFFICIENCY,
    HOPPER_NCCL,
    NCCL_SOURCE,
    SMALL_CUBES,
    Entry,
    G,
    T,
    dcn,
    gpu,
    ici,
    nccl_links,
    spine,
    tpu,
)
from autoshard.cluster.device import Device
from autoshard.cluster.interconnect import Protocol


def _rates(bf16: float, f32: float, f64: float, fp8: float, int8: float | None = None) -> dict[str, float]:
    """Rates by dtype class, as `gpu` takes them; integers of 8 bits as floats of 8 bits where nothing else is said."""
    return {"bf16": bf16, "tf32": f32, "f64": f64, "int8": fp8 if int8 is None else int8, "fp8": fp8}


def _entry(
    device: Device,
    domain: int,
    links: float,
    card: float,
    kinds: tuple[str, ...],
    source: str,
    protocols: tuple[Protocol, ...] = (),
    tray: int = 0,
) -> Entry:
    """Devices in domains of a switch, each with a card of its own between them.

    Args:
        domain: the most devices of one domain.
        links, card: bandwidth of a device there and between domains.
        protocols: NCCL's; others are taken to have its plain ring and its latencies.
    """
    wires = nccl_links(links, card, device.memory_bandwidth_bytes_per_second, protocols, source)
    return Entry(device=device, interconnect=wires, jax_kinds=kinds, beyond=spine(card), per_host=domain, tray=tray)


NVLINK_5 = 18 * 40.1 * G  # 18 NVLinks of 50 GB/s, of which NCCL counts on 40.1 (topo.h)

GB200_SOURCE = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
GB200 = _entry(
    gpu(
        "gb200",
        # NVIDIA GB200 NVL72 datasheet, of a rack of 72 with sparsity: 360 PF bf16, 180 TF32, 720 int8 and fp8; 3,240 TF float64
        **_rates(bf16=2500 * T, f32=1250 * T, f64=45 * T, fp8=5000 * T),
        vector=90 * T,
        memory=186 * G,  # 13.4 TB a rack, 576 TB/s
        bandwidth=8000 * G,
        host=225 * G,  # NVLink-C2C to Grace: 900 GB/s both ways for two GPUs
        efficiency=B200_EFFICIENCY,
        processors=152,  # estimate: cudaDeviceProp of GB200
        source=GB200_SOURCE,
    ),
    domain=72,
    tray=4,
    links=NVLINK_5,
    card=50 * G,  # one ConnectX-7 of 400 Gb/s a GPU
    kinds=("NVIDIA GB200",),
    source=f"NVIDIA GB200 NVL72 datasheet; {NCCL_SOURCE}",
    protocols=BLACKWELL_NCCL,
)

GB300_SOURCE = "https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
GB300 = _entry(
    gpu(
        "gb300",
        # NVIDIA GB300 NVL72 datasheet, of a rack of 72 with sparsity: 360 PF bf16, 180 TF32, 720 fp8; 100 TF float64. Its integer unit has
        # 330 TOPS with sparsity: int8 is widened
        **_rates(bf16=2500 * T, f32=1250 * T, f64=100 / 72 * T, fp8=5000 * T, int8=2500 * T),
        vector=80 * T,
        memory=279 * G,  # 20 TB a rack, 576 TB/s
        bandwidth=8000 * G,
        host=225 * G,  # as GB200
        efficiency=B200_EFFICIENCY,
        processors=160,  # NVIDIA, "Inside NVIDIA Blackwell Ultra": 160 streaming multiprocessors
        source=GB300_SOURCE,
    ),
    domain=72,
    tray=4,
    links=NVLINK_5,
    card=100 * G,  # one ConnectX-8 of 800 Gb/s a GPU
    kinds=("NVIDIA GB300",),
    source=f"NVIDIA GB300 NVL72 datasheet; {NCCL_SOURCE}",
    protocols=BLACKWELL_NCCL,
)

B300 = _entry(
    gpu(
        "b300",
        # NVIDIA HGX B300 datasheet, of 8 with sparsity: 36 PF bf16, 18 TF32, 72 fp8; 10 TF float64; 2 POPS int8, which is widened
        **_rates(bf16=2250 * T, f32=1125 * T, f64=1.25 * T, fp8=4500 * T, int8=2250 * T),
        vector=75 * T,
        memory=270 * G,  # 2.1 TB in 8 GPUs
        bandwidth=8000 * G,
        host=128 * G,  # PCIe of generation 6, x16
        efficiency=B200_EFFICIENCY,
        processors=148,  # estimate: as B200
        source="https://www.nvidia.com/en-us/data-center/dgx-b300/",
    ),
    domain=8,
    links=NVLINK_5,
    card=100 * G,  # eight ConnectX-8 of 800 Gb/s
    kinds=("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
    source=f"NVIDIA DGX B300 datasheet; {NCCL_SOURCE}",
    protocols=BLACKWELL_NCCL,
)

H20 = _entry(
    gpu(
        "h20",
        # NVIDIA H20 product brief, dense: 148 bf16, 74 TF32, 296 int8 and fp8, 44 float32, 1 float64; as several resellers' pages have it
        **_rates(bf16=148 * T, f32=74 * T, f64=1 * T, fp8=296 * T),
        vector=44 * T,
        memory=96 * G,  # 96 GB, 4.0 TB/s
        bandwidth=4000 * G,
        host=64 * G,  # PCIe of generation 5, x16: estimate, as H100
        efficiency=HOPPER_EFFICIENCY,
        processors=78,  # as Geekbench counts them
        source="NVIDIA H20 product brief",
    ),
    domain=8,
    links=18 * 20.6 * G,  # as H100: 900 GB/s both ways
    card=50 * G,  # estimate: 400 Gb/s a GPU
    kinds=("NVIDIA H20",),
    source=f"NVIDIA H20 product brief; {NCCL_SOURCE}",
    protocols=HOPPER_NCCL,
)

L40S = _entry(
    gpu(
        "l40s",
        # NVIDIA L40S datasheet, dense: 362.05 bf16, 183 TF32, 733 int8 and fp8; float64 at a 64th of 91.6 TF float32
        **_rates(bf16=362.05 * T, f32=183 * T, f64=91.6 / 64 * T, fp8=733 * T),
        vector=91.6 * T,
        memory=48 * G,  # 48 GB GDDR6, 864 GB/s
        bandwidth=864 * G,
        host=32 * G,  # PCIe of generation 4, x16
        efficiency=A100_EFFICIENCY,  # estimate
        processors=142,  # datasheet: 142 RT cores, one in each
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    domain=8,
    links=32 * G,  # no NVLink: PCIe of generation 4, x16
    card=25 * G,  # estimate: 200 Gb/s a GPU
    kinds=("NVIDIA L40S",),
    source="NVIDIA L40S datasheet",
)

# The best of many shapes in bfloat16 reach 668 of 1,300 Tflop/s on MI300X (stas00/ml-engineering, as above)
MI300X_EFFICIENCY = 668 / 1300
MI300X = _entry(
    gpu(
        "mi300x",
        # AMD Instinct MI300X data sheet, dense: 1307.4 bf16, 653.7 TF32, 163.4 float64, 2614.9 int8 and fp8. That is 304 compute units at
        # 2.1 GHz of 2048, 1024, 256 and 4096 operations a clock (rocm.docs.amd.com, MI300 microarchitecture)
        **_rates(bf16=1307.4 * T, f32=653.7 * T, f64=163.4 * T, fp8=2614.9 * T),
        vector=163.4 * T,
        memory=192 * G,  # 192 GB, 5.3 TB/s
        bandwidth=5300 * G,
        host=64 * G,  # PCIe of generation 5, x16
        efficiency=MI300X_EFFICIENCY,
        processors=304,  # compute units
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
    domain=8,
    links=7 * 64 * G,  # 7 Infinity Fabric links of 128 GB/s both ways, one to each of the others
    card=50 * G,  # 400 Gb/s a GPU
    kinds=("AMD Instinct MI300X",),
    source="AMD Instinct MI300X platform data sheet; latencies as NCCL's",
)

MI355X = _entry(
    gpu(
        "mi355x",
        # AMD Instinct MI355X data sheet, dense: 2517 bf16, 5033 int8 and fp8, 157.3 float32 (it has no TF32), 78.6 float64. That is 256
        # compute units (rocm.docs.amd.com, AMD GPU specifications) at 2.4 GHz of 4096, 8192 (AMD, ISSCC 2026), 256 and 128 a clock
        **_rates(bf16=2517 * T, f32=157.3 * T, f64=78.6 * T, fp8=5033 * T),
        vector=157.3 * T,
        memory=288 * G,  # 288 GB, 8 TB/s
        bandwidth=8000 * G,
        host=64 * G,  # PCIe of generation 5, x16
        efficiency=MI300X_EFFICIENCY,  # estimate: as MI300X
        processors=256,  # compute units
        source="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html",
    ),
    domain=8,
    links=7 * 76.8 * G,  # 7 Infinity Fabric links of 153.6 GB/s both ways
    card=50 * G,  # 400 Gb/s a GPU
    kinds=("AMD Instinct MI355X",),
    source="AMD Instinct MI355X platform data sheet; latencies as NCCL's",
)

ASCEND_EFFICIENCY = 0.8  # estimate
ASCEND_910B = _entry(
    gpu(
        "ascend-910b",
        # Published figures differ, 280 to 376 Tflop/s of bfloat16, as dies are binned; those of 910B2 in Huawei's CANN: 24 cubes of
        # 16 x 16 x 16 multiplications at 1.8 GHz, twice as many of int8; 48 vector units of 64 float32 (Ascend910B2.ini)
        **_rates(bf16=353.9 * T, f32=88 * T, f64=1 * T, fp8=353.9 * T, int8=707.8 * T),  # float32, float64: estimates; float8 is widened
        vector=11 * T,
        memory=64 * G,  # 64 GB, 1.6 TB/s
        bandwidth=1600 * G,
        host=32 * G,  # PCIe of generation 4, x16: estimate
        efficiency=ASCEND_EFFICIENCY,
        processors=24,  # AI cores
        source="CANN, platform_config/Ascend910B2.ini; 64 GB and 1.6 TB/s: cann/ops-transformer, cross_platform_migration_guide",
    ),
    domain=8,
    links=7 * 28 * G,  # estimate: HCCS joins 8 devices in a full mesh, 392 GB/s both ways
    card=25 * G,  # estimate: 200 Gb/s of RoCE a device
    kinds=("Ascend 910B",),
    source="estimates; latencies as NCCL's",
)

ASCEND_910C = _entry(
    gpu(
        "ascend-910c",
        # CloudMatrix384, of the two dies of a chip: 752 Tflop/s of bfloat16, 1504 int8
        **_rates(bf16=752 * T, f32=188 * T, f64=2 * T, fp8=752 * T, int8=1504 * T),  # float32 and float64: estimates; float8 is widened
        vector=23.5 * T,  # 23.5 of float16 a die (cann/ops-transformer, issue 5487), half of it float32
        memory=128 * G,  # 128 GB, 3.2 TB/s
        bandwidth=3200 * G,
        host=64 * G,  # estimate
        efficiency=ASCEND_EFFICIENCY,
        processors=48,  # AI cores of two dies
        source="Zuo et al., Serving LLMs on Huawei CloudMatrix384, 2025 (arXiv 2506.12708)",
    ),
    domain=384,
    tray=8,
    links=392 * G,  # unified bus, one way
    card=50 * G,  # RDMA plane: 400 Gb/s a chip
    kinds=("Ascend 910C",),
    source="Zuo et al., 2025 (arXiv 2506.12708); latencies as NCCL's",
)

TPU7X_SOURCE = "https://cloud.google.com/tpu/docs/tpu7x"
_TPU7X = tpu(
    "tpu7x",
    bf16=2307 / 2 * T,  # Cloud TPU docs, TPU7x: 2307 TFLOPs bf16 and 4614 fp8 a chip, of which each of its two cores is a device of JAX
    int8=2307 / 2 * T,  # estimate: widened
    clock=2.2 * G,  # from the peak: that of 4 MXUs of 256 x 256
    cores=1,
    memory=96 * GIB,  # 192 GiB, 7380 GBps a chip
    bandwidth=7380 / 2 * G,
    tile=256,
    source=TPU7X_SOURCE,
)
TPU7X = Entry(
    device=replace(_TPU7X, flops_per_second=tuple((k, 4614 / 2 * T if k == "fp8" else rate) for k, rate in _TPU7X.flops_per_second)),
    # 1200 GBps a chip, both ways, over 6 links, which the chip's two devices share; between them six times a link's ("die-to-die")
    interconnect=replace(
        ici(50 * G, wrap_multiple=4, wrap_whole=True), chip_bandwidth_bytes_per_second=600 * G, source=f"{TPU7X_SOURCE}; wraps as v5p"
    ),
    jax_kinds=("TPU7x",),
    beyond=dcn(50 * G, 8),  # 100 Gb/s a chip, of which a host has 4 with 8 devices
    cores=1,
    topologies=SMALL_CUBES,
    cube=4,
    most=9216,
    chip_devices=2,
)

ENTRIES = (TPU7X, GB200, GB300, B300, H20, L40S, MI300X, MI355X, ASCEND_910B, ASCEND_910C)
