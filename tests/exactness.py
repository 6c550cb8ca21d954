"""Every program of the tests with a strategy of every searcher, held against the partitioner and the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from problems import eager_cluster
from programs import PROGRAMS

import autoshard
from autoshard import DataParallel, FullySharded, RecursiveProgramming
from autoshard.search import Searcher

MESHES = ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
# Brute force is left out: it finds what recursive programming does, on programs of a few operations.
SEARCHERS: dict[str, Searcher] = {
    "data_parallel": DataParallel(),
    "fully_sharded 1": FullySharded(stage=1),
    "fully_sharded 2": FullySharded(stage=2),
    "fully_sharded 3": FullySharded(stage=3),
    "recursive_programming": RecursiveProgramming(),
}


@dataclass(frozen=True)
class Pair:
    """A program, a searcher, a mesh."""

    program: str
    searcher: str
    mesh: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.program}, {self.searcher}, {' x '.join(str(size) for _, size in self.mesh)}"

    def verified(self, target: str) -> autoshard.Verification:
        """The pair's strategy, on links fast enough that sharding pays, next to what the target makes of it."""
        fn, args = PROGRAMS[self.program]()
        strategy = autoshard.search(fn, *args, cluster=eager_cluster(), searcher=SEARCHERS[self.searcher], mesh=dict(self.mesh))
        return autoshard.verify(strategy, fn, *args, target=target)


def pairs(meshes=MESHES) -> Iterator[Pair]:
    """All of them, program by program."""
    for program in PROGRAMS:
        for searcher in SEARCHERS:
            for mesh in meshes:
                yield Pair(program, searcher, tuple(mesh.items()))
