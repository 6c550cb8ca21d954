"""The ends of a user's `jax.shard_map` in the program: ops that take its operands apart into shards and put its results together.

The equations of its body are part of the program around it (`autoshard.trace.build`). Of a shard_map at ``path`` the op of operand ``k``
has the path ``(*path, ENTERING, k)`` and that of result ``k`` ``(*path, LEAVING, k)``; paths in the body begin with ``(*path, BODY)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from autoshard.ir import entry_axes

BODY, ENTERING, LEAVING = 0, 1, 2

MAPPED = "shard_map"

Axes = tuple[tuple[str, int], ...]


class _Named(NamedTuple):
    name: str


_PRIMITIVE = _Named(MAPPED)


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """What stands for the equation of an op at a shard_map's end.

    Attributes:
        params: ``enters``, whether it is of an operand; ``entries``, per dimension of the whole array the names of the axes that split it;
            and ``mesh``, the shard_map's.
        source_info: the shard_map's.
    """

    params: Mapping[str, Any]
    source_info: Any
    primitive: _Named = _PRIMITIVE
    effects: frozenset[Any] = frozenset()


def boundaries(eqn: JaxprEqn, enters: bool) -> Iterator[Boundary]:
    """What stands for the equations of a shard_map's operands, or of its results."""
    specs, atoms = (eqn.params["in_specs"], eqn.invars) if enters else (eqn.params["out_specs"], eqn.outvars)
    for spec, atom in zip(specs, atoms, strict=True):
        entries = _entries(spec, len(getattr(atom.aval, "shape", ())))
        yield Boundary({"enters": enters, "entries": entries, "mesh": eqn.params["mesh"]}, eqn.source_info)


def _entries(spec: Sequence[Any], rank: int) -> tuple[tuple[str, ...], ...]:
    """Per dimension the names of the axes that split it."""
    named = tuple(map(entry_axes, spec))
    return named + ((),) * (rank - len(named))


def has_effects(eqn: JaxprEqn | Boundary) -> bool:
    """Whether an equation is kept although nothing reads its results; that it names a mesh axis is no reason."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
