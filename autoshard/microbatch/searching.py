"""Binary searches in sorted keys, as `jnp.searchsorted` writes them: how many keys come before each of some numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard.ir import Graph, Op
from autoshard.ir.scan import num_consts
from autoshard.trace import subjaxprs
from autoshard.trace.structure import opened

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Search:
    """A search: the value that has the sorted keys, that with the numbers, and on which side of equal keys these are."""

    keys: int
    numbers: int
    side: Side


def search_of(op: Op, graph: Graph) -> Search | None:
    """The search that a loop is: the one that JAX writes for arrays of these types; None for other ops."""
    if op.primitive != "scan" or num_consts(op.params) != 2 or len(op.operands) != 4 or len(op.results) != 2:
        return None
    keys, numbers, low, high = op.operands
    written = dict(zip(graph.literals, graph.written, strict=True))
    makers = {value: each for each in graph.walk() for value in each.results}
    shape, types = graph.values[keys].shape, [(graph.values[v].shape, graph.values[v].dtype) for v in (keys, numbers)]
    bounds = [makers.get(value) for value in (low, high)]
    filled = [written.get(each.operands[0]) if each is not None and each.primitive == "broadcast_in_dim" else None for each in bounds]
    if len(shape) != 1 or filled[0] is None or filled[1] is None or (int(filled[0]), int(filled[1])) != (0, shape[0]):
        return None
    sides: tuple[Side, Side] = ("left", "right")
    return next((Search(keys, numbers, side) for side in sides if _written(*types, side) == _text(op.equation)), None)


def searched(keys: jax.Array, numbers: jax.Array, side: Side) -> jax.Array:
    """How many of the sorted keys come before each number."""
    return jnp.searchsorted(keys, numbers, side=side)


@cache
def _written(keys: tuple, numbers: tuple, side: Side) -> str:
    """The loop that JAX writes."""
    made = jax.make_jaxpr(lambda a, v: jnp.searchsorted(a, v, side=side))(*(jax.ShapeDtypeStruct(*each) for each in (keys, numbers)))
    return next(map(_text, _loops(made)), "")


def _text(eqn: JaxprEqn) -> str:
    return f"{eqn.params['length']} {eqn.params['reverse']} {eqn.params['jaxpr']}"


def _loops(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        else:
            for inner in subjaxprs(eqn):
                yield from _loops(inner)
