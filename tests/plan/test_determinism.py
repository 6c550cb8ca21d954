"""Two searches of one program write the same file, and Ctrl-C ends a search at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from programs import PROGRAMS

import autoshard
from autoshard.search import SEARCHERS

SCRIPT = """
import os, sys, jax, autoshard
from programs import PROGRAMS
from autoshard.search import SEARCHERS
fn, args = PROGRAMS["mlp"]()
if sys.argv[2] == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
default = autoshard.search(fn, *args, cluster="v5e:2x4")
for share in (1.0, 0.9, 0.8):
    found = autoshard.search(fn, *args, cluster="v5e:2x4", memory_limit_bytes=share * default.cost.peak_bytes)
    assert share == 1.0 or len(found.record.trail) > 1
    found.save(f"{sys.argv[1]}/default_{share}.json")
asked = {"cluster": "v5e:2x4", "mesh": {"data": 4, "model": 2}}
for name in sorted(set(SEARCHERS) - {"brute_force"}):
    pins = {"batch*": jax.sharding.PartitionSpec("data")} if name in ("sharding_propagation", "manual") else None
    found = autoshard.search(fn, *args, searcher=name, pins=pins, **asked)
    found.save(f"{sys.argv[1]}/{name}.json")
    if name in ("auto", "dynamic_programming", "recursive_programming"):
        limited = autoshard.search(fn, *args, searcher=name, memory_limit_bytes=0.97 * found.cost.peak_bytes, **asked)
        limited.save(f"{sys.argv[1]}/{name}_limited.json")
for number, strategy in enumerate(autoshard.frontier(fn, *args, **asked)):
    strategy.save(f"{sys.argv[1]}/frontier_{number}.json")
"""


@pytest.mark.slow
def test_files_do_not_depend_on_the_hash_seed_nor_on_cores(tmp_path):
    """Files of processes with other hash seeds and cores are equal, byte for byte: every searcher, limits with all forms, frontiers."""
    found = []
    for seed, cores in (("1", "all cores"), ("2", "one core")):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", SCRIPT, folder, cores], env=environment, check=True)
        found.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert len(found[0]) >= len(SEARCHERS) + 6
    assert found[0] == found[1]


@pytest.mark.parametrize("searcher", ["dynamic_programming", "recursive_programming", "auto"])
def test_ctrl_c_stops_a_search(searcher):
    """An interrupt in the middle of a search comes out as such, and the next search is not harmed."""
    fn, args = PROGRAMS["mlp"]()
    calls = []

    def interrupted(what, fraction):
        calls.append(what)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        autoshard.search(fn, *args, cluster="v5e:2x4", searcher=searcher, progress=interrupted)
    assert autoshard.search(fn, *args, cluster="v5e:2x4", searcher=searcher).cost.makespan_seconds > 0
