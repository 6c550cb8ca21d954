"""A program for one process or several that trains from its newest checkpoint on, and in which a rank kills itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard

ADAM = optax.adam(1e-2)


def make_state(key):
    up, down, kept = jax.random.split(key, 3)
    params = {"up": jax.random.normal(up, (24, 48)) / 5, "down": jax.random.normal(down, (48, 24)) / 5}
    return {"params": params, "optimizer": ADAM.init(params), "key": kept, "step": 0}


def train_step(state, batch):
    key, noise = jax.random.split(state["key"])

    def loss(params):
        x = batch + jax.random.normal(noise, batch.shape) / 10
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = ADAM.update(gradients, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "key": key, "step": state["step"] + 1}, value


def batch_of(step: int):
    return np.float32(np.random.default_rng(step).normal(size=(24, 24)))


def train(folder, n_devices: int, until: int, every: int = 2, kill=lambda step: False):
    """Where it began, the losses from there on, and the strategy; `kill` says whether this process dies after a step."""
    state_shape = jax.eval_shape(make_state, jax.random.key(0))
    with autoshard.checkpoint.Checkpoints(folder, every=every) as checkpoints:
        cluster = f"cpu:{n_devices}"
        strategy = autoshard.search(train_step, state_shape, batch_of(0), cluster=cluster, searcher="auto", start=checkpoints.strategy())
        begun, state = checkpoints.restore(strategy) or (0, strategy.init(make_state, jax.random.key(0)))
        step_fn, losses = strategy.apply(train_step), []
        for step in range(begun, until):
            state, loss = step_fn(state, batch_of(step))
            losses.append(float(loss))
            checkpoints.save(step + 1, state, strategy, extra={"rows": 24 * (step + 1)})
            if kill(step + 1):
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return begun, losses, strategy


def main(folder: str, until: int, kills: str) -> None:
    """Prints what this process finds as a line of JSON; ``kills`` lists (processes, rank, step, how often to die there)."""
    processes = autoshard.distributed.initialize()
    when = {(count, rank): (step, times) for count, rank, step, times in json.loads(kills)}
    at, times = when.get((processes.count, processes.index), (-1, 0))
    died = Path(f"{folder}-died-{processes.count}")

    def kill(step: int) -> bool:
        before = len(died.read_text()) if died.exists() else 0
        if step == at and before < times:
            died.write_text("x" * (before + 1))
            return True
        return False

    begun, losses, strategy = train(folder, jax.device_count(), until, kill=kill)
    newest = autoshard.checkpoint.Checkpoints(folder).latest()
    found = {"rank": processes.index, "begun": begun, "losses": losses, "mesh": strategy.mesh_shape, "newest": newest}
    print(f"found {json.dumps(found)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
