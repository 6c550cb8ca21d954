"""The Ray that a training starts is reached from this machine alone, and with a token; one that it joins is told of."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from sockets import descendants, listening

import autoshard
from autoshard import ray_cluster as cluster

ROOT = Path(__file__).resolve().parents[2]


def run(script, **variables):
    """The errors of a script, run with variables of the environment and none of Ray's own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_ray_that_is_started_listens_on_the_loopback_alone(ray):
    """None of its processes accepts connections from a network: scheduler, object stores, agents, workers and this one."""

    @ray.remote
    class Actor:
        def process(self):
            return os.getpid()

    actor = Actor.remote()
    process = ray.get(actor.process.remote())
    processes = descendants()
    assert process in processes and listening([os.getpid(), *processes]) == {cluster.LOOPBACK}
    ray.kill(actor)


@pytest.mark.slow
def test_a_ray_that_is_started_asks_for_a_token_of_this_user(ray):
    """Its processes have the mode, and the token is in a file that nobody else can read."""

    def variables():
        return os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN_PATH")

    mode, path = ray.get(ray.remote(num_cpus=0)(variables).remote())
    assert mode == "token" and stat.S_IMODE(os.stat(path).st_mode) == 0o600 and len(Path(path).read_text()) == 64


@pytest.mark.slow
def test_one_that_is_joined_is_asked(ray):
    """A cluster of another's is asked whether it wants a token, and is not ended with the training."""
    with cluster.cluster(ray) as authenticated:
        assert authenticated
    assert ray.is_initialized()


@pytest.mark.slow
def test_without_the_token_nobody_comes_in(ray):
    """A client that has no token, or another one, is refused."""
    address = ray.get_runtime_context().gcs_address
    joins = f"import ray; ray.init(address={address!r}, log_to_driver=False)"
    for variables in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        code, err = run(joins, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", **variables)
        assert code != 0 and "uthenticat" in err


@pytest.mark.slow
def test_a_ray_that_another_program_has_for_itself_is_not_joined(ray):
    """One is started beside it: that of another `ray.init` on this machine is no cluster."""
    script = f"""
import ray
from autoshard.ray_cluster import cluster
with cluster(ray, num_cpus=1, log_to_driver=False, object_store_memory=100 * 2**20):
    assert ray.get_runtime_context().gcs_address != {ray.get_runtime_context().gcs_address!r}
"""
    code, err = run(script)
    assert code == 0, err


@pytest.mark.slow
def test_a_cluster_without_a_token_is_warned_of():
    """A training that joins one says what that means, and goes on."""
    script = """
import ray
from autoshard.ray_cluster import cluster
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
with cluster(ray) as authenticated:
    assert not authenticated
"""
    code, err = run(script, RAY_AUTH_MODE="disabled")
    assert code == 0 and "joins a Ray cluster without token authentication" in err


def _product(weights, x):
    return jnp.tanh(x @ weights)


def _arguments(batch):
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((batch, 64), jnp.float32)


def test_a_sweep_on_ray_has_the_points_of_one_here(ray, tmp_path):
    """In their order, a refusal included; what is saved is not searched again."""
    asked = {"clusters": ["cpu:2", "cpu:4"], "batches": [64], "searcher": "data_parallel", "memory_limit_bytes": 28e3}
    here, there = autoshard.sweep(_product, _arguments, **asked), autoshard.sweep(_product, _arguments, on="ray", save=tmp_path, **asked)
    assert there.points == here.points and [point.strategy for point in there] == [point.strategy for point in here]
    assert "must fit" in here[0].refusal and here[1].strategy is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.ask.sweep.results_on_ray", None)
        assert autoshard.sweep(_product, _arguments, on="ray", save=tmp_path, **asked).points == here.points
