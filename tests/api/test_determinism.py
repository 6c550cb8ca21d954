"""Two searches of one program write the same file, and Ctrl-C ends a search at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from programs import PROGRAMS

import autoshard

SCRIPT = """
import sys, autoshard
from programs import PROGRAMS
fn, args = PROGRAMS["mlp"]()
autoshard.search(fn, *args, cluster="v5e:2x4", searcher=sys.argv[1]).save(sys.argv[2])
"""


@pytest.mark.parametrize("searcher", ["dynamic_programming", "recursive_programming", "integer_programming"])
def test_files_do_not_depend_on_the_hash_seed(searcher, tmp_path):
    """Files of two processes with different hash seeds are equal, but for what was timed and when."""
    found = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", SCRIPT, searcher, path], env=environment, check=True)
        entry = json.loads(path.read_text())
        entry["stats"] = {key: value for key, value in entry["stats"].items() if not key.endswith("_seconds")}
        entry.pop("provenance", None)
        found.append(json.dumps(entry))
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
