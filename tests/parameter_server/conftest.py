"""One Ray for all tests of the parameter server that need it, with few resources, sending no statistics, and gone after them."""

import os

import pytest
from sockets import descendants

from autoshard.ray_cluster import cluster

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def ray():
    import ray

    with cluster(ray, num_cpus=4, log_to_driver=False, object_store_memory=200 * 2**20):
        started = descendants()
        yield ray
    assert not {pid: name for pid, name in descendants().items() if pid in started and "ray" in name}
