"""Optimizer state in the memory of hosts: a step rewritten so that such leaves are moved to the device for their update, and back.

Optimizer state is what a step replaces and no product or loop reads, directly or by what is computed of it: moments, averages of weights.
XLA runs the transfers beside compute, and as early as the device's memory has room.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autoshard.ir.rewrites import Offload
from autoshard.lower import ops_by_path
from autoshard.recompute.block import awaited, nbytes, variables
from autoshard.recompute.flat import flat
from autoshard.trace import Traced, rebuilt

LEAST_BYTES = 2**20  # smaller leaves stay: a transfer of so much takes as long as it takes to start a few


def optimizer_state(traced: Traced, least: int = LEAST_BYTES) -> tuple[int, ...]:
    """The argument leaves of so many bytes at least, by their positions, that are optimizer state."""
    whole = flat(traced.jaxpr, ops_by_path(traced.graph))
    heavy = zip(whole.eqns, awaited(whole.eqns, whole.ops), strict=True)
    kept = {v for eqn, is_awaited in heavy if is_awaited for v in variables(eqn.invars)}.union(variables(whole.outputs))
    made = {v for eqn in whole.eqns for v in eqn.outvars}
    return tuple(
        argument
        for result, argument in sorted(traced.graph.aliases, key=lambda pair: pair[1])
        if (v := whole.inputs[argument]) not in kept and nbytes(v) >= least and whole.outputs[result] in made
    )


def offloaded(rewrite: Offload, traced: Traced) -> Traced:
    """The program that takes and returns these leaves in the memory of hosts."""
    return rebuilt(traced, _offloaded(traced, rewrite.leaves), rewrite)


def _offloaded(traced: Traced, leaves: Collection[int]) -> ClosedJaxpr:
    whole = flat(traced.jaxpr, ops_by_path(traced.graph))
    inputs = list(whole.inputs)
    entering: dict[Var, JaxprEqn] = {}
    for leaf in leaves:
        inputs[leaf] = on_host(whole.inputs[leaf])
        entering[whole.inputs[leaf]] = moved(inputs[leaf], whole.inputs[leaf])
    outputs, leaving = list(whole.outputs), {}
    for result, argument in traced.graph.aliases:
        if argument in leaves:
            made = whole.outputs[result]
            outputs[result] = on_host(made)
            leaving.setdefault(made, []).append(moved(made, outputs[result]))
    eqns: list[JaxprEqn] = []
    for eqn in whole.eqns:
        eqns += (entering.pop(v) for v in dict.fromkeys(variables(eqn.invars)) if v in entering)
        eqns.append(eqn)
        eqns += (move for v in eqn.outvars for move in leaving.get(v, ()))
    return replace(whole, inputs=tuple(inputs), outputs=tuple(outputs), eqns=tuple(eqns)).closed()


def on_host(var: Any) -> Var:
    """A variable for a value in the memory of hosts."""
    return Var(var.aval.update(memory_space=jax.memory.Space.Host))


def moved(source: Any, target: Any) -> JaxprEqn:
    """The transfer of a value to the memory in which the target is."""
    return _template(target.aval.memory_space).replace(invars=[source], outvars=[target])


@cache
def _template(to: Any) -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(lambda x: jax.device_put(x, to))(0.0).eqns
    return eqn
