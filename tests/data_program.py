"""A program for several processes: reads batches in every way there is, and prints what was not as in one process."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autoshard

BATCH, N = 16, 40
X = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32)
Y = np.arange(N, dtype=np.int32)


def train_step(params, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(((batch["x"] @ w).sum(1) - batch["y"]) ** 2))(params)
    return params - 0.01 * gradient, value


def cut(rows):
    return {"x": X[rows], "y": Y[rows]}


ARGUMENTS = np.ones((8, 8), np.float32), cut(slice(BATCH))
SPLITS = {  # mesh, and the specs of x and y
    "rows": ({"data": 8}, P("data"), P("data")),
    "replicated": ({"model": 8}, P(), P()),
    "shared by processes": ({"data": 2, "model": 4}, P("data"), P("data")),
    "in turns": ({"data": 8}, P("data"), P("data")),
    "columns": ({"data": 2, "model": 4}, P(None, ("data", "model")), P()),
    "two ways": ({"data": 2, "model": 4}, P("data", "model"), P(("data", "model"))),
}


def of(split):
    mesh, x, y = SPLITS[split]
    return autoshard.evaluate(train_step, *ARGUMENTS, cluster="cpu:8", mesh=mesh, in_specs=(P(), {"x": x, "y": y}))


def devices_of(split):
    """All, process after process, or in turns."""
    return sorted(jax.devices(), key=lambda device: (device.id % 2, device.id)) if split == "in turns" else None


def positions(number, shard=None):
    """Rows of the data that a batch has, or a process's shard of it."""
    rows = range(BATCH) if shard is None else shard.rows
    return np.array([(number * BATCH + row) % N for row in rows])


class Examples:
    def __len__(self):
        return N

    def __getitem__(self, row):
        return cut(row)


def is_right(batch, number) -> bool:
    """Whether what this process has of a global batch is what it is to have."""
    expected = cut(positions(number))
    return all(np.array_equal(s.data, expected[name][s.index]) for name, x in batch.items() for s in x.addressable_shards)


def read_everywhere(split) -> dict:
    """For each way to read whether all batches are right."""
    strategy, devices = of(split), devices_of(split)
    shard = strategy.data_shard(1, devices)
    ways = {
        "examples": Examples(),
        "own rows": [cut(positions(number, shard)) for number in range(3)],
        "whole batches": [cut(slice(start, start + BATCH)) for start in range(0, N, BATCH)],
    }
    found = {}
    for way, loader in ways.items():
        batches = list(strategy.data(loader, devices=devices))
        found[way] = [is_right(batch, number) for number, batch in enumerate(batches)]
    resumed, before = strategy.data(Examples(), devices=devices), strategy.data(Examples(), devices=devices)
    next(before)
    resumed.set_state(json.loads(json.dumps(before.get_state())))
    found["state"] = before.get_state()
    found["resumed"] = [is_right(batch, number) for number, batch in enumerate(resumed, 1)]
    return {"shard": [shard.num_shards, shard.shard_id, shard.n_rows], **found}


def losses(split) -> list[float]:
    strategy = of(split)
    step, params, found = strategy.apply(train_step), ARGUMENTS[0], []
    for batch in strategy.data(Examples()):
        params, loss = step(params, batch)
        found.append(float(loss))
    return found


def outcome(strategy, loader, **options) -> list:
    """How many batches there are, and the error that ends them."""
    n = 0
    try:
        for _ in strategy.data(loader, **options):
            n += 1
    except (autoshard.AutoshardError, OSError) as error:
        return [n, f"{type(error).__name__}: {error}"]
    return [n, ""]


def failing(strategy, index):
    for number in range(3):
        if (number, index) == (2, 1):
            raise OSError("the disk is gone")
        yield cut(positions(number, strategy.data_shard(1)))


def refused(index, count) -> dict:
    """What each process says where one reads other rows, fails, or ends before the others."""
    rows, whole = of("rows"), of("replicated")
    n_rows, is_last = BATCH // count, index == count - 1

    def lines(n):
        return [cut(np.arange(start, min(start + n_rows, n)) + n * index % N) for start in range(0, n, n_rows)]

    return {
        "other rows": outcome(whole, [cut(slice(BATCH)), cut(np.arange(BATCH) + is_last)]),
        "fails": outcome(rows, failing(rows, index)),
        "one row less": outcome(rows, lines(2 * n_rows + 1 - is_last)),
        "less": outcome(rows, lines(3 * n_rows - 2 * n_rows * is_last)),
        "dropped": outcome(rows, lines(3 * n_rows - 2 * n_rows * is_last), at_end="drop"),
    }


def main() -> None:
    processes = autoshard.distributed.initialize()
    found = {split: read_everywhere(split) for split in SPLITS}
    found["losses"] = {split: losses(split) for split in ("rows", "two ways")}
    found["refused"] = refused(processes.index, processes.count)
    print(f"found {json.dumps(found)}")


if __name__ == "__main__":
    main()
