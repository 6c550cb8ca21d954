"""DiLoCo: each slice trains a copy of the state for some steps, then an outer optimizer moves the parameters by what all copies learned.

With parameters ``p`` that all slices start from, and ``p_i`` those of slice i after ``every`` steps of its own, the outer gradient is
``p - mean(p_i)``; an optimizer computes the next ``p`` of it, from which every slice goes on (Douillard et al., DiLoCo, 2023,
algorithm 1). Inner optimizers' states stay with their slices. Streaming divides the parameters into fragments, each of which is exchanged
every so many steps too, at a time of its own, so that no step moves them all (Douillard et al., Streaming DiLoCo, 2025, section 2.2; what
is exchanged is there before the next step, without their delay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import ShardingError


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """The outer optimization of loosely coupled slices, for `autoshard.parallelize`.

    Attributes:
        every: after how many steps a parameter is exchanged.
        optimizer: an `optax.GradientTransformation` of outer gradients; None: SGD with a rate of 0.7 and Nesterov momentum of 0.9, as in
            both papers.
        fragments: in how many parts parameters are exchanged, one after the other; 1: all in the same step.
        parameters: the argument leaves that are exchanged, by path or pattern (``"state.params"``, ``"params*"``), or several. None: those
            leaves of floats that the step replaces and a product or a loop reads, so no moments or averages.

    >>> DiLoCo(every=4, fragments=2).offsets
    (0, 2)
    """

    every: int = 100
    optimizer: Any = None
    fragments: int = 1
    parameters: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("every", "fragments"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShardingError(f"{name} of DiLoCo is a whole number, 1 or more, got {value!r}. Use every=100, fragments=1, say.")
        if self.fragments > self.every:
            raise ShardingError(
                f"fragments are exchanged in different steps of every {self.every}, got {self.fragments} of them. Use at most {self.every}."
            )
        if self.optimizer is not None and not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ShardingError(
                f"the outer optimizer is an optax.GradientTransformation, got {self.optimizer!r:.80}. Use optax.sgd(0.7, momentum=0.9, "
                "nesterov=True), for instance."
            )

    @classmethod
    def of(cls, given: DiLoCo | str) -> DiLoCo:
        """The outer optimization given as itself or as ``"diloco"``, with its defaults.

        Raises:
            ShardingError: it is neither.
        """
        if given == "diloco":
            return cls()
        if not isinstance(given, cls):
            raise ShardingError(f"outer is 'diloco' or an autoshard.DiLoCo, got {given!r:.80}. Use autoshard.DiLoCo(every=100), say.")
        return given

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per fragment the remainder, by `every`, of the steps after which it is exchanged."""
        return tuple(self.every * fragment // self.fragments for fragment in range(self.fragments))

    @property
    def transformation(self) -> Any:
        """The outer optimizer."""
        import optax

        return optax.sgd(0.7, momentum=0.9, nesterov=True) if self.optimizer is None else self.optimizer

    def fragments_of(self, nbytes: Sequence[float]) -> list[list[int]]:
        """The positions in each fragment of parameters of these bytes: the largest first, each into the smallest fragment so far.

        Raises:
            ShardingError: there are fewer parameters than fragments.

        >>> DiLoCo(fragments=2).fragments_of([1, 5, 3, 1])
        [[1], [0, 2, 3]]
        """
        if len(nbytes) < self.fragments:
            raise ShardingError(
                f"a fragment is some of the parameters' arrays, of which there are {len(nbytes)}, got fragments={self.fragments}. Use "
                f"at most {len(nbytes)}."
            )
        found: list[list[int]] = [[] for _ in range(self.fragments)]
        for at in sorted(range(len(nbytes)), key=lambda at: -nbytes[at]):
            min(found, key=lambda fragment: (sum(nbytes[k] for k in fragment), len(fragment))).append(at)
        return [sorted(fragment) for fragment in found]


@partial(jax.tree_util.register_dataclass, data_fields=("inner", "parameters", "optimizer", "count"), meta_fields=("places",))
@dataclass(frozen=True, slots=True)
class OuterState:
    """The argument with the parameters, between steps of loosely coupled slices: a pytree of arrays, saved and restored as any.

    Attributes:
        inner: the argument, each array with a first dimension more: a copy for each slice.
        parameters: the outer optimizer's parameters, in the order of the arguments' leaves.
        optimizer: its state, for each fragment.
        count: the steps done.
        places: per leaf of ``inner`` its place in ``parameters``; -1 where it is none of them.
    """

    inner: Any
    parameters: list[jax.Array]
    optimizer: list[Any]
    count: jax.Array
    places: tuple[int, ...]

    @property
    def merged(self) -> Any:
        """The argument as the step was written for it: with the outer parameters, and else what the first slice has."""
        leaves, structure = jax.tree.flatten(self.inner)
        found = [self.parameters[k] if k >= 0 else x[0] for k, x in zip(self.places, leaves, strict=True)]
        return structure.unflatten(found)


def exchanged(diloco: DiLoCo, parameters: list[Any], copies: list[Any], state: Any) -> tuple[list[Any], list[Any], Any]:
    """The parameters of a fragment after an outer step, each slice's copies of them, and the outer optimizer's state.

    Args:
        parameters: as all slices started from.
        copies: per parameter those of the slices, along a first dimension.
        state: the outer optimizer's.
    """
    import optax

    gradients = [jnp.mean(before - own, axis=0) for before, own in zip(parameters, copies, strict=True)]
    updates, state = diloco.transformation.update(gradients, state, parameters)
    after = list(optax.apply_updates(parameters, updates))  # pyright: ignore[reportArgumentType]
    return after, [jnp.broadcast_to(x, own.shape) for x, own in zip(after, copies, strict=True)], state
