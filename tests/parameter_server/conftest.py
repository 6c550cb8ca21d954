"""One Ray for all tests of the parameter server that need it, with few resources, sending no statistics, and gone after them."""

import os
import warnings
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def descendants() -> dict[int, str]:
    """The command lines of the processes that this one started, and those that they started."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            parents[int(entry.name)] = int(fields[1]) if fields[0] != "Z" else -1
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, level = {}, {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= {pid: names[pid] for pid in level}
    return found


@pytest.fixture(scope="session")
def ray():
    import ray

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # as in training.py
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    started = descendants()
    yield ray
    ray.shutdown()
    assert not {pid: name for pid, name in descendants().items() if pid in started and "ray" in name}
