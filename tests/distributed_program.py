"""A program for one process or several: trains, searches what each process searches differently, and fails in the last one if it is to."""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autoshard


def train_step(params, batch):
    def loss(params):
        return jnp.mean((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(seed: int = 0) -> tuple:
    """Parameters and a batch, equal in every process."""
    normal = np.random.default_rng(seed).normal
    params = {"up": normal(size=(32, 64)) / 8, "down": normal(size=(64, 32)) / 8}
    batch = {"x": normal(size=(16, 32)), "y": normal(size=(16, 32))}
    return jax.tree.map(np.float32, (params, batch))


def losses(n_devices: int, steps: int = 4) -> list[float]:
    """The losses of some steps, whose batch and whose first product's columns are split."""
    mesh = {"data": n_devices // 2, "model": 2}
    pins = {"batch*": P("data"), "params['up']": P(None, "model")}
    step = autoshard.parallelize(train_step, cluster=f"cpu:{n_devices}", mesh=mesh, pins=pins, progress=False)
    params, found = arguments()[0], []
    for seed in range(steps):
        params, loss = step(params, arguments(seed)[1])
        found.append(float(loss))
    assert step.strategy.cost.collectives and len(params["up"].sharding.device_set) == n_devices
    return found


def refusal(fn, args, **options) -> str:
    """What a search says that is refused."""
    try:
        autoshard.search(fn, *args, **options)
    except Exception as error:
        return str(error)
    return ""


def verified(n_devices: int) -> list[dict]:
    """What each target says of a strategy with collectives."""
    args, mesh = arguments(), {"data": n_devices // 2, "model": 2}
    strategy = autoshard.search(train_step, *args, cluster=f"cpu:{n_devices}", mesh=mesh, searcher="tensor_parallel")
    return [autoshard.verify(strategy, train_step, *args, target=target).to_json() for target in ("shardy", "cpu")]


def timed(n_devices: int, is_slow: bool) -> list:
    """What confirms a search whose finalists are timed; one process has less time than that takes it."""

    def progress(doing: str, _: float) -> None:
        if is_slow and "timing on" in doing:
            time.sleep(limit)

    limit, options = 2.0, {"confirm": "devices", "time_limit_seconds": 60.0, "progress": progress}
    if is_slow:
        options["time_limit_seconds"] = limit
    found = autoshard.search(train_step, *arguments(), cluster=f"cpu:{n_devices}", **options)
    return [found.mesh_shape, found.confirmation is None, found.notes[-1]]


def main(n_devices: int, code: int) -> None:
    """Prints what this process finds as a line of JSON; the last process then exits with the code."""
    processes = autoshard.distributed.initialize()
    is_first, args, cluster = processes.index == 0, arguments(), f"cpu:{n_devices}"
    mesh = {"data": n_devices} if is_first else {"data": n_devices // 2, "model": 2}
    agreed = autoshard.search(train_step, *args, cluster=cluster, mesh=mesh, pins={"batch*": P("data")})
    found = {
        "processes": [processes.index, processes.count],
        "again": autoshard.distributed.initialize() == processes,
        "losses": losses(n_devices),
        "agreed": [agreed.mesh_shape, str(agreed.in_specs), float(agreed.apply(train_step)(*args)[1])],
        "another program": refusal(train_step if is_first else lambda *args: train_step(*args)[1], args, cluster=cluster),
        "verified": verified(n_devices),
        "timed": timed(n_devices, False),
        "out of time": timed(n_devices, processes.index == 1),
        "failed in one": refusal(train_step, args, cluster=cluster if is_first else "cpu:none"),
    }
    print(f"found {json.dumps(found)}")
    if processes.index == processes.count - 1:
        sys.exit(code)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
