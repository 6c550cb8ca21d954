"""Which server holds which leaves of the parameters, with the optimizer's state for them, and the optimizer's update of these alone."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

if TYPE_CHECKING:
    import optax  # loaded only for programs that use it


@dataclass(frozen=True, slots=True)
class Part:
    """What one server holds: positions of leaves of the parameters, and of leaves of the optimizer's state."""

    leaves: tuple[int, ...]
    state: tuple[int, ...]


def partition(optimizer: optax.GradientTransformation, params: Any, servers: int) -> tuple[Part, ...]:
    """The part of each server: whole leaves, balanced by bytes, where each part's update reads nothing of another part.

    An optimizer whose update of one leaf reads another, such as one with `optax.clip_by_global_norm`, has all on the first server, and a
    warning says so.

    Args:
        params: the parameters, abstract or concrete.

    >>> import optax
    >>> params = [jax.ShapeDtypeStruct((rows, 4), "float32") for rows in (3, 2, 1)]
    >>> [part.leaves for part in partition(optax.adam(1e-3), params, servers=2)]
    [(0,), (1, 2)]
    """
    leaves = jax.tree.leaves(params)
    state_of = _state_read(optimizer, params)
    balanced = _balanced([math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves], servers)
    states = [state_of(each) for each in balanced]
    parts = tuple(Part(each, state) for each, state in zip(balanced, states, strict=True) if state is not None)
    if len(parts) == servers:
        return parts
    together = tuple(range(len(leaves)))
    warnings.warn(
        f"the optimizer's update of some parameters reads others, as a global norm does, so that all {len(leaves)} arrays of parameters "
        f"are on the first of {servers} servers. Take an optimizer that updates each array by itself to spread them, or pass servers=1.",
        stacklevel=2,
    )
    return (Part(together, state_of(together) or ()), *(Part((), ()) for _ in range(servers - 1)))


def _balanced(sizes: Sequence[int], servers: int) -> list[tuple[int, ...]]:
    """Positions of each server: the largest first, each to the server that has the least."""
    heap, found = [(0, server) for server in range(servers)], [[] for _ in range(servers)]
    for position in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        total, server = heapq.heappop(heap)
        found[server].append(position)
        heapq.heappush(heap, (total + sizes[position], server))
    return [tuple(sorted(each)) for each in found]


def _state_read(optimizer: optax.GradientTransformation, params: Any) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:
    """A function from leaves to the leaves of the state that their update reads; None where the update reads parameters of others."""
    state = jax.eval_shape(optimizer.init, params)
    n, n_state = len(jax.tree.leaves(params)), len(jax.tree.leaves(state))
    first = jax.make_jaxpr(optimizer.init)(params).jaxpr
    later = jax.make_jaxpr(lambda params, state, gradients: _updated(optimizer, params, state, gradients))(params, state, params).jaxpr

    def read(leaves: tuple[int, ...]) -> tuple[int, ...] | None:
        own, kept = set(leaves), set()
        while leaves:
            used = dce_jaxpr(later, [i in own for i in range(n)] + [j in kept for j in range(n_state)])[1]
            by_init = dce_jaxpr(first, [j in kept for j in range(n_state)])[1]
            foreign = [*used[:n], *used[n + n_state :], *by_init]
            if any(is_used and position % n not in own for position, is_used in enumerate(foreign)):
                return None
            needed = {j for j in range(n_state) if used[n + j]}
            if needed <= kept:
                break
            kept |= needed
        return tuple(sorted(kept))

    return read


def _updated(optimizer: optax.GradientTransformation, params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return added(params, updates), state


def added(params: Any, updates: Any) -> Any:
    """The parameters after an optimizer's updates, in the types that they have."""
    return jax.tree.map(lambda value, update: (value + update).astype(value.dtype), params, updates)


def part_optimizer(optimizer: optax.GradientTransformation, params: Any, part: Part) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two jitted functions of lists of the part's leaves: ``init(leaves) -> state`` and ``update(leaves, state, gradients of each worker)
    -> (leaves, state)``, which averages the gradients.

    The optimizer sees the whole tree, so that masks and labels by path mean what they say. The other leaves are zeros, which nothing of
    the part reads: the compiled functions do not have them.
    """
    state = jax.eval_shape(optimizer.init, params)

    def whole(tree: Any, positions: tuple[int, ...], own: Sequence[jax.Array]) -> Any:
        found = dict(zip(positions, own, strict=True))
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([found[i] if i in found else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)])

    def own(tree: Any, positions: tuple[int, ...]) -> list[jax.Array]:
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in positions]

    @jax.jit
    def init(leaves: list[jax.Array]) -> list[jax.Array]:
        return own(optimizer.init(whole(params, part.leaves, leaves)), part.state)

    @jax.jit
    def update(leaves: list[jax.Array], old: list[jax.Array], gradients: list[list[jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
        mean = [jnp.asarray(sum(each[1:], each[0]) / len(each)) for each in zip(*gradients, strict=True)]
        after, new = _updated(
            optimizer, whole(params, part.leaves, leaves), whole(state, part.state, old), whole(params, part.leaves, mean)
        )
        return own(after, part.leaves), own(new, part.state)

    return init, update
