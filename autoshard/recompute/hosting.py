"""Kept values in the memory of hosts, from their last reader in the forward pass to the first in the backward pass.

Compilers run transfers beside compute and start each as soon as its operand is there: what goes to a host would come back at once.
Barriers say where they are to wait, and `autoshard.lower.transfers` makes them do so. One on a value that crosses into a segment of the
forward pass: what was sent before is on its host then. One on a value on the host: it comes back once the gradients before it are
computed. The trips of a loop hold its transfers back by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from autoshard.primitives import is_loop
from autoshard.recompute.block import Block, nbytes, segment_of, variables
from autoshard.recompute.flat import Atom
from autoshard.recompute.offload import LEAST_BYTES, moved, on_host


def hostable(block: Block, places: Sequence[int], kept: Iterable[Var], results: Sequence[Atom], trips: int = 1) -> list[Var]:
    """Those of the kept values that may be on hosts between the passes, in the order in which they are made.

    Results stay where they are, as do the stacks of loops and what loops read, and what the last segment of the forward pass reads, which
    would come back at once.

    Args:
        results: what is read beside the two passes.
        trips: of the loop whose trip the block is.
    """
    last: dict[Var, int] = {}
    for k, eqn in enumerate(block.eqns[: block.turn]):
        last.update((v, k) for v in variables(eqn.invars))
    stay = set(variables(results)).union(*(variables(eqn.invars) for eqn in block.eqns[block.turn :] if is_loop(eqn.primitive.name)))

    def moves(v: Var) -> bool:
        k = block.made[v]
        is_early = trips > 1 or segment_of(places, last.get(v, k)) < len(places)
        of_loop = k >= 0 and is_loop(block.eqns[k].primitive.name)
        return is_early and not of_loop and v not in stay and v in block.needed and trips * nbytes(v) >= LEAST_BYTES and _is_float(v)

    return sorted(filter(moves, kept), key=lambda v: block.number(v))


def _is_float(var: Var) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.floating)


def sent(eqns: Sequence[JaxprEqn], places: Sequence[int], hosted: Collection[Var]) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """A forward pass that moves values to hosts; per value the one there."""
    maker, last = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}, dict[Var, int]()
    for k, eqn in enumerate(eqns):
        last.update((v, k) for v in variables(eqn.invars))
    hosts = {v: on_host(v) for v in hosted}
    ends = {places[number] for v in hosted if (number := segment_of(places, last.get(v, maker[v]))) < len(places)}
    names: dict[Var, Var] = {}
    found: list[JaxprEqn] = []
    for k, eqn in enumerate(eqns):
        crossing = [v for v, by in maker.items() if by < k <= last.get(v, -1) and _is_float(v)] if k in ends else []
        if crossing:
            largest = max(crossing, key=nbytes)
            before, names[largest] = names.get(largest, largest), Var(largest.aval)
            found.append(_barrier(before, names[largest]))
        found.append(_renamed(eqn, names))
        found += (moved(v, hosts[v]) for v in eqn.outvars if v in hosts)
    return found, hosts


def fetched(eqns: Sequence[JaxprEqn], hosts: Mapping[Var, Var]) -> list[JaxprEqn]:
    """A backward pass that moves values from hosts where it reads them first.

    Args:
        hosts: per value the one on the host.
    """
    names: dict[Var, Var] = {}
    found: list[JaxprEqn] = []
    for eqn in eqns:
        for v in dict.fromkeys(v for v in variables(eqn.invars) if v in hosts and v not in names):
            held, names[v] = Var(hosts[v].aval), Var(v.aval)
            found += [_barrier(hosts[v], held), moved(held, names[v])]
        found.append(_renamed(eqn, names))
    return found


def _renamed(eqn: JaxprEqn, names: Mapping[Var, Var]) -> JaxprEqn:
    if not any(v in names for v in variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[names.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars])


def _barrier(operand: Var, result: Var) -> JaxprEqn:
    return _template().replace(invars=[operand], outvars=[result])


@cache
def _template() -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns
    return eqn
