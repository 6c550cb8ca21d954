"""A program that trains and saves as fast as it can, from its newest checkpoint on, until it is killed: a child for each line of stdin."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401

import autoshard
from autoshard.checkpoint import Checkpoints


def make_state():
    return {"step": jnp.int32(0), "w": jnp.zeros((64, 1024)), "v": jnp.zeros(1024)}


def train_step(state, x):
    """Every element of a state is a function of its step."""
    step = state["step"] + 1
    return {"step": step, "w": jnp.full_like(state["w"], step) + 0 * x.sum(), "v": state["v"] + 2}, x.mean()


def main(folder: str) -> None:
    x = np.ones((8, 8), np.float32)
    strategy = autoshard.search(train_step, jax.eval_shape(make_state), x, cluster="cpu:2", mesh={"data": 2}, searcher="fully_sharded")
    step_fn = strategy.apply(train_step)
    with Checkpoints(folder, keep=2) as checkpoints:
        step, state = checkpoints.restore(strategy) or (0, strategy.init(make_state))
        while True:
            state, _ = step_fn(state, x)
            step += 1
            checkpoints.save(step, state, strategy, extra={"step": step})
            print("saving", step, flush=True)


if __name__ == "__main__":  # JAX is imported once, and started in each child
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print("child", os.getpid(), flush=True)
            main(line.strip())
        os.waitpid(child, 0)
        print("ended", flush=True)
