"""The catalogue of devices, each figure with its source. A new device is one entry, in `ENTRIES` here or in `accelerators`.

Rates are dense datasheet peaks, bandwidths in one direction; estimates are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.device import LANES, Device
from autoshard.cluster.interconnect import Interconnect, Protocol
from autoshard.cluster.level import Level

T = 1e12
G = 1e9
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Entry:
    """A device, its interconnect, and the topologies that exist.

    Attributes:
        device, interconnect: the figures.
        jax_kinds: the names jax gives it (``Device.device_kind``).
        beyond: the network that joins several slices, or groups of hosts.
        topologies: the slices that exist; empty where any number of devices does.
        cube: larger slices have dimensions that are multiples of this, in rising order; 0 where there are none.
        most: the most devices of a slice.
        per_host: devices per host, or of a domain of NVLink that is larger.
        tray: devices of a host, where a domain of NVLink is several.
        counts_cores: whether the vendor's names of slices count two cores per chip.
        chip_devices: how many devices of JAX a chip is; their number is the last of a topology.
        cores: that JAX counts in a device (jax/_src/pallas/mosaic/tpu_info.py); 0 where it is not asked.
    """

    device: Device
    interconnect: Interconnect
    jax_kinds: tuple[str, ...]
    beyond: Level
    topologies: tuple[tuple[int, ...], ...] = ()
    cube: int = 0
    most: int = 0
    per_host: int = 0
    counts_cores: bool = False
    cores: int = 0
    chip_devices: int = 1
    tray: int = 0

    @property
    def available_bytes(self) -> int:
        """The part of a device's memory that a program may use."""
        return AVAILABLE_BYTES.get(self.device.name, int(self.device.memory_bytes * MEMORY_FRACTION[self.device.kind]))

    @property
    def overlap(self) -> bool:
        """Whether collectives run while the device computes."""
        return self.device.kind != "cpu"  # XLA:CPU runs a collective and the ops around it one after the other


# The part of a device's memory that a program may use. GPU: jax allocates three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise (docs.jax.dev, "GPU memory allocation"). TPU: from the message with which XLA:TPU (libtpu 0.0.42) refuses a program, "exceeds
# available HBM (15.75G)" on v5e; v4 has two cores per chip with 15.25G each. Other TPUs are assumed to reserve the share that a v4 does.
MEMORY_FRACTION = {"tpu": 30.5 / 32, "gpu": 0.75, "cpu": 1.0}
AVAILABLE_BYTES = {"v4": int(30.5 * 2**30), "v5e": int(15.75 * 2**30), "v5p": int(95.74 * 2**30), "v6e": int(31.25 * 2**30)}
AVAILABLE_BYTES["tpu7x"] = int(94.74 * 2**30)

# The part of a TPU core's own memory that a user's kernel gets, unless it sets vmem_limit_bytes: "Scoped allocation with size 24.00M and
# limit 16.00M exceeded scoped vmem limit", with which XLA:TPU (libtpu 0.0.52) refuses one; v4 refuses one of 20 MiB as more than 16 MiB.
KERNEL_MEMORY_BYTES = {"v4": 16 * 2**20, "v5e": 16 * 2**20, "v5p": 16 * 2**20, "v6e": 32 * 2**20}

SCALING_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
TPU_HOP_SECONDS = 1e-6  # about 1 us a hop: How to Scale Your Model, "Sharded Matrices and How to Multiply Them"
TPU_LAUNCH_SECONDS = 1e-6  # estimate: as long as one hop
# XLA:TPU (libtpu 0.0.42) schedules 1,957 cycles on v5e, 2,169 on v5p and 2,196 on v6e for the smallest elementwise kernel
TPU_KERNEL_SECONDS = 1.2e-6
# The share of the memory's peak in its schedules of elementwise kernels on 64 Mi float32: 662, 1,990 and 1,324 GB/s on v5e, v5p and v6e
TPU_MEMORY_EFFICIENCY = {"v5e": 0.81, "v5p": 0.72, "v6e": 0.81}
TPU_F64_SLOWDOWN = 50  # estimate: XLA emulates float64 on the vector unit with pairs of float32

# PCIe, one way: 16 GB/s a TPU, 32 on v6e (scaling book, "How to Think About TPUs"); NVIDIA's datasheets give both ways of x16: 64 GB/s of
# generation 4 (A100), 128 of 5 (H100, H200, B200). XLA:CPU copies from pinned_host to device in one memory: half of its bandwidth.
HOST_BANDWIDTH = {"v6e": 32 * G, "a100": 32 * G, "a100-40g": 32 * G, "h100": 64 * G, "h200": 64 * G, "b200": 64 * G}
TPU_HOST_BANDWIDTH = 16 * G

DCN_SECONDS = 50e-6  # estimate: from a device to its host, to another host and to the device there
DCN_SOURCE = "https://cloud.google.com/tpu/docs/tpu7x"  # "DCN bandwidth per chip (Gbps)": v5p 50, v6e 100, TPU7x 100


def dcn(bandwidth: float, per_host: int, source: str = DCN_SOURCE) -> Level:
    """The data-centre network between slices, which the devices of a host enter through its network cards together."""
    return Level("slices", 1, bandwidth, DCN_SECONDS, per_host, source=source)


FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))  # Cloud TPU docs, v5e and v6e: supported configurations
SMALL_CUBES = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # Cloud TPU docs, v4 and v5p: slices below one 4x4x4 cube


# The share of the peak that products reach in steps of published runs, clocks under load and waits that no figure here has included
# (`python -m benchmarks.published --fit`: MaxText's runs, 4 on v4, 12 on v5e, 6 on v5p, and 7 on v6e). On v6e products alone reached 0.79
# (public experiment log "Qwen3 JAX v129", 2026-06-04: 1.82 PFLOP a step and chip took 2.51 s).
TPU_EFFICIENCY = {"v4": 0.72, "v5e": 0.845, "v5p": 0.88, "v6e": 0.69}
OTHER_TPU_EFFICIENCY = 0.8  # estimate: as these
TPU_KERNEL_EFFICIENCY = {"v4": 0.89, "v5e": 0.92, "v5p": 0.8}  # of that rate, products in splash attention; the same fits
# Eight in ten published runs took between these multiples of the predicted time (`python -m benchmarks.published`: 46 and 51 runs on A100
# of 80 and 40 GB, 49 on H100, 12 on v5e, 6 on v5p, 7 on v6e; 4 on v4, all within 5 %)
SHARES = {
    "a100": (0.92, 1.14),
    "a100-40g": (0.89, 1.14),
    "h100": (0.90, 1.28),
    "v4": (0.95, 1.05),
    "v5e": (0.97, 1.08),
    "v5p": (0.94, 1.07),
    "v6e": (0.96, 1.05),
}
UNKNOWN_SHARES = (0.0, 0.0)
# Of 59 runs on GPUs, those of several hosts and every twelfth other, nine in ten took no longer than that and so many times the
# communication that is predicted to be hidden: gathers that are late, many and small, as of DeepSpeed's ZeRO-3 on 768 GPUs and more, or on
# a network that is not published. MaxText's runs on up to 4,096 TPUs hide as much, and are within the shares.
GPU_LATE_SHARE = 1.85
# How far the predicted ratio of two runs' times is off in half of the pairs of one model, release and precision, on chips of these families
# (the same command). What a family has in common cancels there.
PAIR_ERROR = 0.025


def tpu(
    name: str,
    bf16: float,
    int8: float,
    clock: float,
    cores: int,
    memory: float,
    bandwidth: float,
    tile: int,
    source: str,
) -> Device:
    vector = cores * LANES * clock
    return Device(
        name=name,
        kind="tpu",
        # float32 products are one bfloat16 pass at default precision (docs.jax.dev, "Matmul precision"); float8 is widened to bfloat16
        flops_per_second=(
            ("bf16", bf16),
            ("fp16", bf16),
            ("f32", bf16),
            ("f64", vector / TPU_F64_SLOWDOWN),
            ("int8", int8),
            ("fp8", bf16),
        ),
        vector_flops_per_second=vector,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_second=bandwidth,
        kernel_overhead_seconds=TPU_KERNEL_SECONDS,
        matrix_tile=tile,
        source=source,
        matrix_efficiency=TPU_EFFICIENCY.get(name, OTHER_TPU_EFFICIENCY),
        kernel_efficiency=TPU_KERNEL_EFFICIENCY.get(name, 1.0),
        memory_efficiency=TPU_MEMORY_EFFICIENCY.get(name, TPU_MEMORY_EFFICIENCY["v5e"]),
        clock_hertz=clock,
        host_bandwidth_bytes_per_second=HOST_BANDWIDTH.get(name, TPU_HOST_BANDWIDTH),
        low_share=SHARES.get(name, UNKNOWN_SHARES)[0],
        high_share=SHARES.get(name, UNKNOWN_SHARES)[1],
        pair_error=PAIR_ERROR if name in SHARES else 0.0,
    )


def ici(bandwidth: float, wrap_multiple: int, wrap_whole: bool) -> Interconnect:
    return Interconnect(
        kind="torus",
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=TPU_HOP_SECONDS,
        launch_seconds=TPU_LAUNCH_SECONDS,
        wrap_multiple=wrap_multiple,
        wrap_whole=wrap_whole,
        source=SCALING_BOOK,
    )


V4 = Entry(
    device=tpu(
        "v4",
        bf16=275 * T,  # Cloud TPU docs, v4: 275 teraflops (bf16 or int8)
        int8=275 * T,
        clock=1.05 * G,  # Jouppi et al., TPU v4 (ISCA 2023), table 4: 1050 MHz; 2 cores of 4 MXUs of 128 x 128 then reach the peak
        cores=2,
        memory=32 * GIB,  # Cloud TPU docs, v4: 32 GiB, 1200 GBps
        bandwidth=1200 * G,
        tile=128,  # 128 x 128 MXU
        source="https://cloud.google.com/tpu/docs/v4",
    ),
    interconnect=ici(45 * G, wrap_multiple=4, wrap_whole=True),  # scaling book, TPU specs: 4.5e10 B/s a link one way; 4x4x4 cubes wrap
    jax_kinds=("TPU v4",),
    beyond=dcn(25 * G, 4, "estimate: as v5p"),
    cores=2,
    topologies=SMALL_CUBES,
    cube=4,
    most=4096,  # Cloud TPU docs, v4: pod size
    counts_cores=True,
)

V5E = Entry(
    device=tpu(
        "v5e",
        bf16=197 * T,  # Cloud TPU docs, v5e: 197 TFLOPs bf16, 393 TOPs int8
        int8=393 * T,
        clock=1.5 * G,  # scaling book, TPUs: 1.5 GHz; 4 MXUs of 128 x 128 then reach the peak
        cores=1,
        memory=16 * GIB,  # Cloud TPU docs, v5e: 16 GB, 819 GBps
        bandwidth=819 * G,
        tile=128,  # 128 x 128 MXU
        source="https://cloud.google.com/tpu/docs/v5e",
    ),
    interconnect=ici(45 * G, wrap_multiple=16, wrap_whole=False),  # scaling book, TPU specs: 4.5e10 B/s a link one way; axes of 16 wrap
    jax_kinds=("TPU v5 lite", "TPU v5e"),
    beyond=dcn(25 * G, 8, "https://cloud.google.com/tpu/docs/v5e"),  # Cloud TPU docs, v5e: 2 x 100 Gb/s a host of 8 chips
    cores=1,
    topologies=FLAT_SLICES,
    most=256,
)

V5P = Entry(
    device=tpu(
        "v5p",
        bf16=459 * T,  # Cloud TPU docs, v5p: 459 TFLOPs bf16
        int8=918 * T,  # scaling book, TPU specs: 9.18e14
        clock=1.75 * G,  # from the peak: that of 2 cores of 4 MXUs of 128 x 128
        cores=2,
        memory=95 * GIB,  # Cloud TPU docs, v5p: 95 GiB, 2765 GBps
        bandwidth=2765 * G,
        tile=128,  # 128 x 128 MXU
        source="https://cloud.google.com/tpu/docs/v5p",
    ),
    interconnect=ici(90 * G, wrap_multiple=4, wrap_whole=True),  # scaling book, TPU specs: 9e10 B/s a link one way; 4x4x4 cubes wrap
    jax_kinds=("TPU v5", "TPU v5p"),
    beyond=dcn(25 * G, 4),  # 200 Gb/s a host of 4 chips
    cores=2,
    topologies=SMALL_CUBES,
    cube=4,
    most=6144,  # Cloud TPU docs, v5p: the largest job is 96 cubes, 16x16x24
    counts_cores=True,
)

V6E = Entry(
    device=tpu(
        "v6e",
        bf16=918 * T,  # Cloud TPU docs, v6e: 918 TFLOPs bf16, 1836 TOPs int8
        int8=1836 * T,
        clock=1.75 * G,  # from the peak: that of 4 MXUs of 256 x 256
        cores=1,
        memory=32 * GIB,  # Cloud TPU docs, v6e: 32 GB, 1640 GBps
        bandwidth=1640 * G,
        tile=256,  # 256 x 256 MXU (scaling book, TPUs)
        source="https://cloud.google.com/tpu/docs/v6e",
    ),
    interconnect=ici(90 * G, wrap_multiple=16, wrap_whole=False),  # scaling book, TPU specs: 9e10 B/s a link one way; axes of 16 wrap
    jax_kinds=("TPU v6 lite", "TPU v6e"),
    beyond=dcn(100 * G, 8),  # 4 x 200 Gb/s a host of 8 chips
    cores=1,
    topologies=FLAT_SLICES,
    most=256,
)

# NCCL's tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc, 2.30): base latency, latency of a step over NVLink and over the
# network, in microseconds, and the share of the bandwidth
US = 1e-6
NCCL_LAUNCH_SECONDS = 8.4 * US  # baseLatencies: ring, Simple
NCCL_STEP_SECONDS = 3.4 * US  # hwLatencies: NVLink, ring, Simple
NCCL_NETWORK_STEP_SECONDS = 14 * US  # hwLatencies: network, ring, Simple
NCCL_LL = 0.5  # ring, LL: every 4 bytes come with a flag of 4
NCCL_LL128 = 0.92  # ring, LL128: 120 of 128 bytes are data
NCCL_TREE = 0.92  # tree
NCCL_TREE_LL = 0.92 / 3.8 * 0.4  # tree, LL; times the least treeCorrectionFactor, that of 256 KiB to 1 MiB
NCCL_TREE_LL128 = 0.92 * 7 / 9 * 0.6  # tree, LL128; the same


def _nccl(ll: float, network_ll: float, switch: float) -> tuple[Protocol, ...]:
    """NCCL's protocols and algorithms except the plain ring.

    Args:
        ll, network_ll: llMaxBws of one host, and of four or more.
        switch: nvlsEfficiency; 0 where the switch does not reduce.
    """
    protocols = (
        Protocol("ring", 6.6 * US, 0.6 * US, 2.7 * US, NCCL_LL, ll, network_ll),
        Protocol("ring", 14 * US, 1.9 * US, 4 * US, NCCL_LL128),
        Protocol("tree", 6.8 * US, 0.6 * US, 5 * US, NCCL_TREE_LL, ll, network_ll),
        Protocol("tree", 14 * US, 1.25 * US, 8.5 * US, NCCL_TREE_LL128),
        Protocol("tree", 8.4 * US, 4 * US, 14 * US, NCCL_TREE),
    )
    return (*protocols, Protocol("switch", 0.0, 25 * US, 20.9 * US, switch)) if switch else protocols


# The share of its line rate that a network card reaches: NCCL, src/graph/search.cc, speedArrayInter: 24 GB/s of 200 Gb/s, 48 of 400; one of
# its authors expects 46 to 48 (NVIDIA/nccl-tests issue 290)
CARD_EFFICIENCY = 0.96
# XLA's measured products on H100 (openxla/xla, service/gpu/model/matmul_interpolator_data.h, sm_90): the smallest take 6.2 us, of which
# arithmetic is a fifth at most; cuBLAS's of 256**3 on A100 took 11 us with its launch (triton-lang/triton issue 3551)
GPU_KERNEL_SECONDS = 5e-6
# The share of the peak that matrix products reach in full waves, such that predictions of measured large ones (2 x 2048**3 and up, 10 and
# 13 of them) have no bias: cuBLAS, float16, A100 SXM (triton-lang/triton issue 3551), and XLA's table for H100 (as above). The best of many
# shapes reach 271 of 312 Tflop/s on A100, 794 of 989 on H100 ("H200 is the same") and 1745 of 2250 on B200, the only figure of B200
# (stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS comparison table").
A100_EFFICIENCY, HOPPER_EFFICIENCY, B200_EFFICIENCY = 0.83, 0.82, 1745 / 2250
# The same in steps of published runs on H100, whose clocks are lower under the load of all GPUs for hours than in such a table (`python -m
# benchmarks.published --fit`: 0.678 on half of 49 runs; the median error of the other half is 6 %, with 0.82 it is 18 %). The steps that
# were measured on one H200 agree with the table (docs/predictions.md).
H100_EFFICIENCY = 0.68
# Of the rate of products that of those within fused attention, which wait for its softmax: FlashAttention-2 reaches 50 to 73 % of an A100's
# peak (Dao 2023, arXiv 2307.08691, abstract); on Hopper, cuDNN's reaches 500 to 570 of 989 TFLOP/s, forward and backward (an estimate from
# Shah et al. 2024, arXiv 2407.08608, figures 5 and 6).
KERNEL_EFFICIENCY = {"a100": 0.75, "a100-40g": 0.75, "h100": 0.8, "h200": 0.66}
GPU_MEMORY_EFFICIENCY = 0.9  # kernels that move over 100 MB: calculon-ai/calculon, systems/a100_80g.json (Isaev et al., SC 2023)
GPU_TILE = 64  # rows of one Hopper wgmma instruction (PTX ISA); smaller blocks leave tensor cores idle


def gpu(
    name: str,
    bf16: float,
    tf32: float,
    f64: float,
    int8: float,
    fp8: float,
    vector: float,
    memory: float,
    bandwidth: float,
    host: float,
    efficiency: float,
    processors: int,
    source: str,
) -> Device:
    """A GPU, or what is planned like one."""
    return Device(
        name=name,
        kind="gpu",
        # float32 products use TF32 at default precision (docs.jax.dev, "Matmul precision")
        flops_per_second=(("bf16", bf16), ("fp16", bf16), ("f32", tf32), ("f64", f64), ("int8", int8), ("fp8", fp8)),
        vector_flops_per_second=vector,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_second=bandwidth,
        kernel_overhead_seconds=GPU_KERNEL_SECONDS,
        matrix_tile=GPU_TILE,
        source=source,
        matrix_efficiency=efficiency,
        memory_efficiency=GPU_MEMORY_EFFICIENCY,
        kernel_efficiency=KERNEL_EFFICIENCY.get(name, 1.0),
        processors=processors,
        host_bandwidth_bytes_per_second=host,
        low_share=SHARES.get(name, UNKNOWN_SHARES)[0],
        high_share=SHARES.get(name, UNKNOWN_SHARES)[1],
        late_share=GPU_LATE_SHARE if name in SHARES else 0.0,
        pair_error=PAIR_ERROR if name in SHARES else 0.0,
    )


def nccl_links(bandwidth: float, network: float, memory: float, protocols: tuple[Protocol, ...], source: str) -> Interconnect:
    return Interconnect(
        kind="switch",
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=NCCL_STEP_SECONDS,
        launch_seconds=NCCL_LAUNCH_SECONDS,
        network_bandwidth_bytes_per_second=network * CARD_EFFICIENCY,
        network_latency_seconds=NCCL_NETWORK_STEP_SECONDS,
        copy_bandwidth_bytes_per_second=memory / 2,  # read and written
        protocols=protocols,
        source=source,
    )


def spine(network: float) -> Level:
    """The network between groups of hosts, each device with its own card; not oversubscribed, unless a cluster file says so."""
    return Level("pods", 1, network * CARD_EFFICIENCY, NCCL_NETWORK_STEP_SECONDS, kind="rails", source=NCCL_SOURCE)


NCCL_SOURCE = "NCCL 2.30, src/graph/tuning.cc, topo.h and search.cc"
AMPERE_NCCL = _nccl(87.7 * G, 19 * G, switch=0.0)
HOPPER_NCCL = _nccl(141 * G, 35 * G, switch=0.85)
BLACKWELL_NCCL = _nccl(282 * G, 70 * G, switch=0.74)


def _ampere_links(memory: float) -> Interconnect:
    """12 NVLinks of 25 GB/s, of which NCCL counts on 20 (topo.h); DGX A100 datasheet: eight 200 Gb/s HDR cards, one a GPU."""
    return nccl_links(12 * 20 * G, 25 * G, memory, AMPERE_NCCL, f"NVIDIA A100 and DGX A100 datasheets; {NCCL_SOURCE}")


def _hopper_links(memory: float) -> Interconnect:
    """18 NVLinks of 25 GB/s, of which NCCL counts on 20.6 (topo.h); DGX H100 datasheet: eight 400 Gb/s NDR cards, one a GPU."""
    return nccl_links(18 * 20.6 * G, 50 * G, memory, HOPPER_NCCL, f"NVIDIA H100 and DGX H100 datasheets; {NCCL_SOURCE}")


A100_SOURCE = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"

A100 = Entry(
    device=gpu(
        "a100",
        bf16=312 * T,  # NVIDIA A100 datasheet, dense tensor cores: 312 bf16, 156 TF32, 19.5 float64, 624 int8
        tf32=156 * T,
        f64=19.5 * T,
        int8=624 * T,
        fp8=312 * T,  # no float8 unit: widened to float16
        vector=19.5 * T,  # float32 outside tensor cores
        memory=80 * G,  # A100 80GB SXM: 80 GB, 2039 GB/s
        bandwidth=2039 * G,
        host=HOST_BANDWIDTH["a100"],
        efficiency=A100_EFFICIENCY,
        processors=108,  # streaming multiprocessors: NVIDIA A100 architecture whitepaper
        source=A100_SOURCE,
    ),
    interconnect=_ampere_links(2039 * G),
    jax_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"),
    beyond=spine(25 * G),
    per_host=8,
)

A100_40G = Entry(
    device=gpu(
        "a100-40g",
        bf16=312 * T,  # as the 80 GB model
        tf32=156 * T,
        f64=19.5 * T,
        int8=624 * T,
        fp8=312 * T,
        vector=19.5 * T,
        memory=40 * G,  # A100 40GB SXM: 40 GB, 1555 GB/s
        bandwidth=1555 * G,
        host=HOST_BANDWIDTH["a100-40g"],
        efficiency=A100_EFFICIENCY,
        processors=108,  # streaming multiprocessors: NVIDIA A100 architecture whitepaper
        source=A100_SOURCE,
    ),
    interconnect=_ampere_links(1555 * G),
    jax_kinds=("NVIDIA A100-SXM4-40GB",),
    beyond=spine(25 * G),
    per_host=8,
)

H100 = Entry(
    device=gpu(
        "h100",
        bf16=989 * T,  # NVIDIA H100 SXM datasheet, tensor cores without sparsity: 989 bf16, 495 TF32, 67 float64, 1979 int8 and fp8
        tf32=495 * T,
        f64=67 * T,
        int8=1979 * T,
        fp8=1979 * T,
        vector=67 * T,  # float32 outside tensor cores
        memory=80 * G,  # 80 GB, 3.35 TB/s
        bandwidth=3350 * G,
        host=HOST_BANDWIDTH["h100"],
        efficiency=H100_EFFICIENCY,
        processors=132,  # streaming multiprocessors: NVIDIA H100 architecture whitepaper, SXM5
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    interconnect=_hopper_links(3350 * G),
    jax_kinds=("NVIDIA H100 80GB HBM3",),
    beyond=spine(50 * G),
    per_host=8,
)

H200 = Entry(
    device=gpu(
        "h200",
        bf16=989 * T,  # NVIDIA H200 SXM datasheet: compute as H100
        tf32=495 * T,
        f64=67 * T,
        int8=1979 * T,
        fp8=1979 * T,
        vector=67 * T,
        memory=141 * G,  # 141 GB, 4.8 TB/s
        bandwidth=4800 * G,
        host=HOST_BANDWIDTH["h200"],
        efficiency=HOPPER_EFFICIENCY,
        processors=132,  # streaming multiprocessors: NVIDIA H100 architecture whitepaper, SXM5
        source="https://www.nvidia.com/en-us/data-center/h200/",
    ),
    interconnect=_hopper_links(4800 * G),
    jax_kinds=("NVIDIA H200",),
    beyond=spine(50 * G),
    per_host=8,
)

B200 = Entry(
    device=gpu(
        "b200",
        bf16=2250 * T,  # NVIDIA Blackwell datasheet, HGX B200, dense: 2.25 PF bf16, 1.1 TF32, 4.5 int8 and fp8, 37 TF float64
        tf32=1100 * T,
        f64=37 * T,
        int8=4500 * T,
        fp8=4500 * T,
        vector=75 * T,  # float32 outside tensor cores
        memory=180 * G,  # DGX B200 datasheet: 1,440 GB in 8 GPUs; 8 TB/s each
        bandwidth=8000 * G,
        host=HOST_BANDWIDTH["b200"],
        efficiency=B200_EFFICIENCY,
        processors=148,  # streaming multiprocessors: cudaDeviceProp of B200
        source="https://www.nvidia.com/en-us/data-center/dgx-b200/",
    ),
    # 18 NVLinks of 50 GB/s, of which NCCL counts on 40.1 (topo.h); DGX B200 datasheet: eight 400 Gb/s cards
    interconnect=nccl_links(18 * 40.1 * G, 50 * G, 8000 * G, BLACKWELL_NCCL, f"NVIDIA DGX B200 datasheet; {NCCL_SOURCE}"),
    jax_kinds=("NVIDIA B200",),
    beyond=spine(50 * G),
    per_host=8,
)

CPU_SOURCE = "measured with jax 0.10 on 2 cores of an AMD EPYC that ran 8 virtual devices at once; figures are for one of the 8"

CPU = Entry(
    device=Device(
        name="cpu",
        kind="cpu",
        # 512 x 512 products on all devices at once: 24 (float32), 23 (bfloat16), 12 (float64) Gflop/s each; the rest follows float32
        flops_per_second=(("bf16", 23 * G), ("fp16", 23 * G), ("f32", 24 * G), ("f64", 12 * G), ("int8", 24 * G), ("fp8", 23 * G)),
        vector_flops_per_second=1 * G,  # between x * 2 + 1 (0.9 G flops/s, memory-bound) and tanh (0.3 G elements/s of some 20 flops)
        memory_bytes=8 * GIB,  # convention: a host of 8 virtual devices has 64 GiB
        memory_bandwidth_bytes_per_second=3.5 * G,  # x * 2 + 1 on 8 MiB a device
        kernel_overhead_seconds=5e-6,  # 35 us to dispatch one kernel to all 8, on 2 cores
        matrix_tile=1,
        source=CPU_SOURCE,
        host_bandwidth_bytes_per_second=3.5 / 2 * G,
    ),
    interconnect=Interconnect(
        kind="host",
        # collectives of 16 MiB: all_reduce 3.3, permute 1.9, reduce_scatter 1.1, all_to_all 0.6, all_gather 0.5 GB/s; 1.5 between them
        bandwidth_bytes_per_second=1.5 * G,
        latency_seconds=5e-6,
        launch_seconds=100e-6,  # a small all_reduce takes 140 us: launch and 7 steps
        source=CPU_SOURCE,
    ),
    jax_kinds=("cpu",),
    beyond=Level("slices", 1, 1.5 * G, 5e-6, source="as within one: all virtual devices share one memory"),
)

ENTRIES = (V4, V5E, V5P, V6E, A100, A100_40G, H100, H200, B200, CPU)

COMPUTE_CAPABILITY = {"a100": 8, "a100-40g": 8, "h100": 9, "h200": 9, "h20": 9, "b200": 10, "gb200": 10, "b300": 10, "gb300": 10}
"""CUDA's compute capability of each GPU's architecture (developer.nvidia.com/cuda-gpus)."""

OTHER_NAMES = {"v5litepod": "v5e"}
"""Names of devices in other tools."""

LIKE = {"tpu": "v5e", "": "a100"}
"""Per JAX platform, the device whose figures an unknown one starts from; ``""`` for other platforms."""
