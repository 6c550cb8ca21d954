"""Train steps (AdamW) of a loss, with abstract arguments: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

BF16, F32 = jnp.bfloat16, jnp.float32

Program = tuple[Callable, tuple]
"""A train step and its arguments ``(state, *batch)``."""


@dataclass(frozen=True, slots=True)
class Model:
    """A train step's maker.

    Attributes:
        make: called with sizes, all of which have defaults, gives the program.
        tensor_parallel: `PartitionSpec` by pattern of argument paths on axes ``data`` and ``model``: contraction pairs are split
            over ``model`` (column, then row: Megatron-LM, arXiv 1909.08053), the batch over ``data``.
    """

    make: Callable[..., Program]
    tensor_parallel: Mapping[str, P]


def leaf(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """An array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cast(weights: Any, dtype: Any) -> Any:
    """Weights as a layer computes with them."""
    return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def _train_step(
    loss: Callable, weights: Any, *batch: jax.ShapeDtypeStruct, params: Any = None, optimizer: Any = None, frozen: Any = None
) -> Program:
    """The program of a loss: its weights are kept as ``params``, a dtype, or as they are, and updated by an optimizer, or AdamW.

    ``frozen`` weights, if there are any, are part of the state that no gradient is made of; the loss takes them after the others.
    """
    if params is not None:
        weights = jax.tree.map(lambda weight: leaf(*weight.shape, dtype=params), weights)
    optimizer = optimizer or optax.adamw(1e-3)
    held = {} if frozen is None else {"frozen": frozen}
    state = {"params": weights, "optimizer": jax.eval_shape(optimizer.init, weights)} | held

    def train_step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        kept = {name: state[name] for name in held}
        value, gradients = jax.value_and_grad(loss)(state["params"], *kept.values(), *batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments} | kept, value

    return train_step, (state, *batch)
