"""Are the plans that `plan="full"` finds at least as fast as those that others published for the same model and cluster?

``python -m benchmarks.plans [NAME ...]``: both plans are evaluated by this library's cost model, by the costs of the model's own layers
(`autoshard.pipeline.plan_search`). Of a published plan its stages, its number of microbatches, the mesh of a stage and the weights' specs,
where it says these, are fixed; all that it leaves open is chosen best, the stages' borders and the sharding of optimizer state among it, so
that it is evaluated no slower than it is.

Sources. *Megatron-LM*: Narayanan et al., SC 2021 (arXiv 2104.04473), with the scripts of its runs, `run_table_1.sh` and `run_figure_12.sh`
of github.com/NVIDIA/Megatron-LM, examples/sc21: layers, width, heads, tensor and pipeline parallel sizes, batch, examples of a microbatch,
nodes of eight A100, and whether the schedule is interleaved; it may have more than our two chunks. Activations are computed again. *Alpa*:
Zheng et al., OSDI 2022 (arXiv 2201.12023): the solutions that its artifact lists for p3.16xlarge hosts, `suite_auto_gpt.py` and
`suite_auto_moe.py` of github.com/alpa-projects/alpa, benchmark/alpa; mixtures of experts with Adafactor, as `benchmark_one_case_moe.py` has
them. *Galvatron*: Miao et al., VLDB 2022 (arXiv 2211.13878): plans found by it, `galvatron_config_*.json` of
github.com/AFDWang/Hetu-Galvatron, galvatron/models; the files name the memory and not the device, which is taken to be an A100. *Aceso*:
Liu et al., EuroSys 2024: the one plan in its README has stages of 1, 1 and 2 GPUs, and ours have equal parts; nothing else that it
publishes is a plan.

``python -m benchmarks.plans --search [NAME ...]``: what ``autoshard.search(plan="full")`` finds for large models, and in how many seconds
of one core, tracing included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import optax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.ir import Mesh
from autoshard.pipeline.plan_search import search_plans
from autoshard.pipeline.plans import FILL, Asked, Estimate, Plans
from autoshard.plan.full_search import problems_on
from autoshard.plan.prepared import RESERVE, traced_of
from autoshard.plan.user_pins import Asked as Pins
from autoshard.plan.user_pins import user_pins
from autoshard.render import Report, Table, format_bytes, format_percent, format_seconds
from autoshard.trace import Traced
from benchmarks import models


@dataclass(frozen=True, slots=True)
class Published:
    """A published plan.

    Attributes:
        name: of the model, with the number of GPUs.
        source: of the plan.
        make: the model's train step.
        cluster: the devices.
        stages, microbatches: the plan's.
        mesh: of a stage's devices: over ``data`` the batch is split.
        schedule: the plan's.
        pins: the specs of weights; what is not among them is chosen best.
    """

    name: str
    source: str
    make: Callable[[], models.Program]
    cluster: Cluster
    stages: int
    microbatches: int
    mesh: Mapping[str, int]
    schedule: str = "1f1b"
    pins: Mapping[str, P] | None = None


# -- devices --------------------------------------------------------------------------------------------------------------


def _v100(hosts: int, per_host: int = 8, memory: float = 16.0) -> Cluster:
    """AWS p3.16xlarge: V100 SXM2 of 16 GB, 25 Gb/s a host. An A100's figures for what NVIDIA's datasheet does not say.

    Float16 products (125 TFLOP/s) stand for bfloat16, which it lacks. A ninth of the memory is left to the allocator, as Alpa does
    (`xla_client_mem_fraction`).
    """
    like = Cluster.parse(f"a100:{per_host}x{hosts}")
    device = replace(
        like.device,
        name="v100",
        flops_per_second=(("bf16", 125e12), ("fp16", 125e12), ("f32", 15.7e12), ("f64", 7.8e12)),  # NVIDIA V100 datasheet
        vector_flops_per_second=15.7e12,
        memory_bytes=memory * 1e9,
        memory_bandwidth_bytes_per_second=900e9,
        processors=80,
        source="NVIDIA V100 datasheet",
    )
    links = replace(
        like.interconnect,
        bandwidth_bytes_per_second=like.interconnect.bandwidth_bytes_per_second / 2,  # 6 NVLinks of 25 GB/s, an A100 has 12
        network_bandwidth_bytes_per_second=25e9 / 8 / 8,  # 25 Gb/s a host of eight GPUs
        copy_bandwidth_bytes_per_second=900e9 / 2,
        source="NVIDIA V100 datasheet; AWS p3.16xlarge",
    )
    name = f"v100:{per_host}x{hosts}"
    return replace(like, name=name, device=device, interconnect=links, memory_limit_bytes=0.9 * memory * 1e9)


def _a100_40(hosts: int, gigabytes: float) -> Cluster:
    """DGX A100 of 40 GB, of which a plan has so much."""
    return replace(Cluster.parse(f"a100-40g:8x{hosts}"), memory_limit_bytes=gigabytes * 1e9)


# -- plans ----------------------------------------------------------------------------------------------------------------

_GPT = models.language(models.GPT)
_LENGTH, _VOCABULARY = 2048, 51_200  # Megatron-LM's README


def _megatron(
    name: str, source: str, layers: int, width: int, heads: int, nodes: int, stages: int, batch: int, micro: int, interleaved: bool = False
) -> Published:
    """One of Megatron-LM's runs, all of tensor parallel size 8."""
    data = nodes // stages
    return Published(
        f"GPT {name}, {8 * nodes} A100",
        f"Megatron-LM, {source}",
        partial(models.gpt, layers, width, heads, _VOCABULARY, batch, _LENGTH, remat=True),
        Cluster.parse(f"a100:8x{nodes}"),
        stages,
        batch // data // micro,
        {"data": data, "model": 8},
        "interleaved" if interleaved else "1f1b",
        _GPT,
    )


def _alpa(name: str, make: Callable[[], models.Program], hosts: int, stages: int, microbatches: int, data: int, model: int) -> Published:
    """One of Alpa's solutions with equal stages: the logical mesh of each, whose first axis splits the batch."""
    mesh = {"data": data, "model": model}
    n = stages * data * model
    return Published(f"{name}, {n} V100", "Alpa, artifact", make, _v100(hosts, min(n, 8)), stages, microbatches, mesh)


def _alpa_gpt(layers: int, width: int, heads: int) -> Callable[[], models.Program]:
    return partial(models.gpt, layers, width, heads, 51_200, 1024, 1024, remat=True)


def _alpa_moe(layers: int, width: int, experts: int) -> Callable[[], models.Program]:
    return partial(models.moe, layers, width, 16, experts, 32_000, 1024, 1024, remat=True, optimizer=optax.adafactor(1e-2))


PLANS: Sequence[Published] = (
    _megatron("18B", "table 1", 40, 6144, 48, 32, 1, 1024, 8),
    _megatron("39B", "table 1", 48, 8192, 64, 64, 2, 1536, 4),
    _megatron("76B", "table 1", 60, 10240, 80, 128, 4, 1792, 2, True),
    _megatron("145B", "table 1", 80, 12288, 96, 192, 8, 2304, 2, True),
    _megatron("175B", "figure 12", 96, 12288, 96, 12, 12, 60, 1, True),
    _alpa("GPT 1.3B", _alpa_gpt(24, 2048, 32), 1, 2, 128, 2, 1),
    _alpa("GPT 6.7B", _alpa_gpt(32, 4096, 32), 2, 2, 64, 2, 4),
    _alpa("GPT 15B", _alpa_gpt(48, 5120, 40), 4, 4, 128, 2, 4),
    _alpa("GPT 39B", _alpa_gpt(48, 8192, 64), 8, 16, 1024, 1, 4),
    _alpa("MoE 2.4B", _alpa_moe(16, 1024, 16), 1, 2, 32, 4, 1),
    _alpa("MoE 10B", _alpa_moe(16, 1536, 32), 2, 2, 16, 8, 1),
    _alpa("MoE 27B", _alpa_moe(16, 2048, 48), 4, 8, 128, 4, 1),
    _alpa("MoE 70B", _alpa_moe(32, 2048, 64), 8, 8, 64, 8, 1),
    Published("GPT 2.7B, 8 A100", "Galvatron, gpt_hf", partial(models.gpt, 32, 2560, 32, 50_257, 64, 2048), _a100_40(1, 40.0), 2, 4,
              {"data": 2, "model": 2}),
    Published("Llama 7B, 8 A100", "Galvatron, llama_hf", partial(models.llama, 32, 4096, 32, 32, 11_008, 32_000, 64, 2048),
              _a100_40(1, 36.0), 1, 8, {"data": 8}),
    Published("Llama 6.7B of width 5120, 16 A100", "Galvatron, llama_hf",
              partial(models.llama, 20, 5120, 40, 40, 13_824, 32_000, 64, 2048, remat=False), _a100_40(2, 30.0), 4, 16, {"data": 4}),
)  # fmt: skip


_gpt3 = partial(models.gpt, 96, width=12_288, heads=96, vocabulary=50_304, batch=1536, length=2048, remat=True)
SEARCHES: Mapping[str, tuple[Callable[[], models.Program], str]] = {
    "Llama-3-8B, 64 A100": (partial(models.llama, 32), "a100:8x8"),
    "Llama-3-8B, 64 H100": (partial(models.llama, 32), "h100:8x8"),
    "Llama-3-8B, 64 v5p": (partial(models.llama, 32), "v5p:4x4x4"),
    "GPT-3 175B, 512 A100": (_gpt3, "a100:8x64"),
    "GPT-3 175B, 768 A100": (_gpt3, "a100:8x96"),
    "GPT-3 175B, 1,024 A100": (_gpt3, "a100:8x128"),
}
"""Per name a model, whose layers are unrolled, and its devices."""


# -- evaluation -----------------------------------------------------------------------------------------------------------


def theirs(plan: Published, traced: Traced) -> Estimate | None:
    """The published plan under our cost model: the fastest way to fill in what it leaves open; None where it does not fit."""
    mesh = Mesh(tuple(plan.mesh.items()))
    specs = dict(plan.pins or {}) | {"batch*": P("data")}
    asked = Asked(_limit(plan), (plan.schedule,), [plan.stages], plan.microbatches)
    problems = partial(problems_on, user_pins(Pins.of(specs, None), traced.graph, [], False), mesh)
    return next(iter(_found(search_plans(traced, plan.cluster, problems, asked)).ranked), None)


def ours(plan: Published, traced: Traced) -> Plans:
    """What the search of all plans finds."""
    problems = partial(problems_on, user_pins(Pins.of({}, None), traced.graph, [], True), None)
    return _found(search_plans(traced, plan.cluster, problems, Asked(_limit(plan), tuple(FILL))))


def _limit(plan: Published) -> float:
    return plan.cluster.memory_limit_bytes * (1 - RESERVE)


def _found(plans: Plans | None) -> Plans:
    assert plans is not None, "the model's layers are equal"
    return plans


COLUMNS = ("model, devices", "plan of", "its plan", ">predicted", ">peak", "our plan", ">predicted", ">peak", ">ratio", ">gap",
           ">found in")  # fmt: skip
SEARCH_COLUMNS = ("model, devices", "mesh", ">microbatches", ">predicted", ">peak", ">gap", ">found in")


def row(plan: Published) -> tuple[str, ...]:
    """Both plans, beside each other."""
    fn, args = plan.make()
    traced = traced_of(fn, args, 0, (), plan.cluster)[0]
    other = theirs(plan, traced)
    started = time.process_time()
    plans = ours(plan, traced)
    seconds = time.process_time() - started
    best = plans.ranked[0] if plans.ranked else None
    ratio = "" if other is None or best is None else f"{best.makespan_seconds / other.makespan_seconds:.2f}"
    mesh = "x".join(map(str, plan.mesh.values()))
    named = f"{plan.stages} stages of {mesh}, {plan.microbatches} microbatches, {plan.schedule}"
    gap = format_percent(plans.gap)
    return plan.name, plan.source, named, *_figures(other), _named(best), *_figures(best), ratio, gap, format_seconds(seconds)


def _figures(found: Estimate | None) -> tuple[str, str]:
    if found is None:
        return "does not fit", ""
    return format_seconds(found.makespan_seconds), format_bytes(max(found.layering.peak_bytes))


def _named(found: Estimate | None) -> str:
    if found is None:
        return ""
    mesh, (stages, n) = "x".join(map(str, found.mesh.sizes)), (found.candidate.n_stages, found.candidate.n_microbatches)
    what = f"{stages} stages of {mesh}" if stages > 1 else f"no stages, {mesh}"
    again = ", recomputes" if any(each is not None for each in found.again) else ""
    return f"{what}, {n} microbatches{f', {found.schedule}' if stages > 1 else ''}{again}"


def searched(name: str) -> tuple[str, ...]:
    """What `autoshard.search` finds."""
    make, cluster = SEARCHES[name]
    fn, args = make()
    started = time.process_time()
    strategy = autoshard.search(fn, *args, cluster=cluster, plan="full", donate_argnums=0)
    seconds = time.process_time() - started
    mesh = " x ".join(f"{size} {axis}" for axis, size in strategy.mesh_shape.items())
    cost, gap = strategy.cost, strategy.record.stats["plan_gap"]
    figures = format_seconds(cost.makespan_seconds), format_bytes(cost.peak_bytes), format_percent(gap), format_seconds(seconds)
    return name, mesh, str(strategy.microbatches), *figures


def main(names: Sequence[str], search: bool = False) -> Report:
    """The table, of searches or beside published plans; of the rows with a name in theirs, if names are given."""
    if search:
        rows = tuple(searched(each) for each in SEARCHES if not names or any(name in each for name in names))
        return Report('autoshard.search(plan="full")', (Table(SEARCH_COLUMNS, rows),))
    chosen = [plan for plan in PLANS if not names or any(name in f"{plan.name} {plan.source}" for name in names)]
    return Report("Published plans and ours, predicted by one cost model", (Table(COLUMNS, tuple(map(row, chosen))),))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of models, devices or sources")
    parser.add_argument("--search", action="store_true", help="search large models, without published plans")
    options = parser.parse_args()
    print(main(options.names, options.search))
