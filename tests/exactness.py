"""Every program of the tests with a strategy of every searcher, held against the partitioner and the compiler."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec
from problems import eager_cluster
from programs import PROGRAMS, gpt

import autoshard
from autoshard import DataParallel, DynamicProgramming, FullySharded, RecursiveProgramming
from autoshard.ir import Mesh
from autoshard.lower import jax_mesh
from autoshard.search import Searcher
from autoshard.verify import collectives_of

MESHES = ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
# Brute force is left out: it finds what recursive programming does, on programs of a few operations.
SEARCHERS: dict[str, Searcher] = {
    "data_parallel": DataParallel(),
    "fully_sharded 1": FullySharded(stage=1),
    "fully_sharded 2": FullySharded(stage=2),
    "fully_sharded 3": FullySharded(stage=3),
    "recursive_programming": RecursiveProgramming(),
    "dynamic_programming": DynamicProgramming(),
}


@dataclass(frozen=True)
class Pair:
    """A program, a searcher, a mesh."""

    program: str
    searcher: str
    mesh: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.program}, {self.searcher}, {' x '.join(str(size) for _, size in self.mesh)}"

    def verified(self, *targets: str) -> list[autoshard.Verification]:
        """The pair's strategy, on links fast enough that sharding pays, next to what each target makes of it."""
        fn, args = PROGRAMS[self.program]()
        strategy = autoshard.search(fn, *args, cluster=eager_cluster(), searcher=SEARCHERS[self.searcher], mesh=dict(self.mesh))
        return [autoshard.verify(strategy, fn, *args, target=target) for target in targets]


def pairs(meshes=MESHES) -> list[Pair]:
    """All of them, program by program."""
    return [Pair(program, searcher, tuple(mesh.items())) for program in PROGRAMS for searcher in SEARCHERS for mesh in meshes]


# --- next to a program sharded by hand -----------------------------------------------------------------------------------

MEGATRON = {
    "qkv": PartitionSpec(None, None, "model", None),
    "out": PartitionSpec("model", None, None),
    "up": PartitionSpec(None, "model"),
    "up_bias": PartitionSpec("model"),
    "down": PartitionSpec("model", None),
}
EMBEDDINGS = {"replicated": PartitionSpec(), "vocabulary-parallel": PartitionSpec("model", None)}


@dataclass(frozen=True)
class Compiled:
    """What a compiled step is made of: counts, bytes of a device, and bytes sent by kind and mesh axes."""

    fusions: int
    instructions: int
    temporary_bytes: int
    reused_bytes: int
    sent_bytes: dict[tuple, float]


def by_hand_and_by_strategy(embedding: PartitionSpec, n_layers: int = 1) -> tuple[Compiled, Compiled]:
    """A GPT train step with Megatron's shardings, state donated: jitted with its arguments' shardings alone, and as a strategy applied."""
    fn, args = gpt(n_layers=n_layers, d_model=64, heads=8, ffn=256, vocab=256, batch=16, seq=32)
    mesh = Mesh.of({"data": 2, "model": 4})
    specs = {**MEGATRON, "embed": embedding}

    def spec(path, leaf) -> PartitionSpec:
        names = [key.key for key in path if hasattr(key, "key")]
        return specs.get(names[-1], PartitionSpec()) if names and leaf.shape else PartitionSpec()

    in_specs = (jax.tree_util.tree_map_with_path(spec, args[0]), PartitionSpec("data", None), PartitionSpec("data", None))
    devices = jax_mesh(mesh)
    shardings = jax.tree.map(lambda s: NamedSharding(devices, s), in_specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    out_shardings = (shardings[0], NamedSharding(devices, PartitionSpec()))
    by_hand = jax.jit(fn, in_shardings=shardings, out_shardings=out_shardings, donate_argnums=0).lower(*args).compile()
    strategy = autoshard.evaluate(fn, *args, cluster="cpu:8", mesh=dict(mesh.axes), in_specs=in_specs, donate_argnums=0)
    return _measured(by_hand, mesh), _measured(strategy.apply(fn).lower(*args).compile(), mesh)


def _measured(compiled, mesh: Mesh) -> Compiled:
    text, memory = compiled.as_text(), compiled.memory_analysis()
    sent: dict[tuple, float] = {}
    for found in collectives_of(text, mesh):
        sent[found.kind, found.mesh_axes] = sent.get((found.kind, found.mesh_axes), 0.0) + found.count * found.bytes
    fusions = len(re.findall(r" fusion\(", text))
    return Compiled(fusions, text.count(" = "), memory.temp_size_in_bytes, memory.alias_size_in_bytes, sent)
