"""Simplifications of a traced program that compilers make later anyway: mapped loops, branches by platform, duplicates, dead code.

- Primitives that JAX does not own become calls of their implementations (`autoshard.trace.implementations`).
- A loop that `jax.vmap` maps over different trip counts has an array of conditions. It becomes a loop that runs while any of them is true,
  and selects the old carry where its own condition is false.
- Functions that partition themselves, by a rule that splits nothing, become calls, whose operations have rules of their own.
- Branches for platforms that are no devices, such as kernel languages, are removed; a single remaining branch becomes a call.
- Equal casts, transposes and reversals of one array are made once, so that a weight that is cast for each use is gathered once. Reversals
  of dimensions of size one, as of the kernel in the gradient of a 1 x 1 convolution, are removed, and pads by nothing, as of frequencies.
- What a call or a loop only passes on is read where it enters: carries that no trip changes, and slices that are stacked up again as they
  are, such as the weights of a Flax NNX module that is scanned with rematerialisation.
- Counted coordinates of gathers and scatters become batching dimensions (`autoshard.trace.batched_indexing`).
- Fourier transforms over several dimensions become one after another (`autoshard.trace.transforms`).
- Dead code is removed at any depth, unread carries and slices of loops included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.source_info_util import user_context
from jax.interpreters.partial_eval import dce_jaxpr

from autoshard.compilers import PLATFORMS
from autoshard.ir.scan import num_carry, num_consts
from autoshard.rules import splits
from autoshard.trace.batched_indexing import batched
from autoshard.trace.implementations import implemented
from autoshard.trace.library_kernels import known_kernel
from autoshard.trace.structure import around, as_call, opened, subjaxprs, types_of
from autoshard.trace.transforms import by_dimension

REARRANGING = frozenset({"convert_element_type", "rev", "transpose"})
"""Operations of one array whose duplicates are removed."""


def simplified(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The simplified program, at any depth."""
    indexed = batched(ClosedJaxpr(_simplified(closed.jaxpr), closed.consts))
    return ClosedJaxpr(_live(indexed.jaxpr), closed.consts)


def _live(jaxpr: Jaxpr) -> Jaxpr:
    return dce_jaxpr(jaxpr, True, instantiate=True)[0]


def _simplified(jaxpr: Jaxpr, within: tuple[JaxprEqn, ...] = ()) -> Jaxpr:
    """The simplified jaxpr; it and its bodies are the same objects where nothing changes. ``within``: as of `implemented`."""
    live = _live(jaxpr)
    jaxpr = jaxpr if len(live.eqns) == len(jaxpr.eqns) else live
    jaxpr = _deduplicated(jaxpr)
    eqns = [_equation(eqn, within) for eqn in jaxpr.eqns]
    changes = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return _forwarded(jaxpr.replace(eqns=eqns) if changes else jaxpr)


def _forwarded(jaxpr: Jaxpr) -> Jaxpr:
    """The program that reads what its calls and loops only pass on where it enters them; their bodies are simplified."""
    same: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=_renamed(eqn.invars, same)) if same else eqn)
        same.update(_passed_on(eqns[-1]))
    return jaxpr.replace(eqns=eqns, outvars=_renamed(jaxpr.outvars, same)) if same else jaxpr


def _passed_on(eqn: JaxprEqn) -> Iterator[tuple[Any, Any]]:
    """The results of a call or a loop that are operands of it, each with the operand."""
    if eqn.primitive.name not in ("jit", "remat2", "scan"):
        return
    (body,), is_loop = subjaxprs(eqn), eqn.primitive.name == "scan"
    inputs, outputs = opened(body)[0].invars, opened(body)[0].outvars
    first, n_carry = (num_consts(eqn.params), num_carry(eqn.params)) if is_loop else (0, 0)
    entering = {variable: at for at, variable in enumerate(inputs)}
    for k, (made, result) in enumerate(zip(outputs, eqn.outvars, strict=True)):
        at = None if isinstance(made, Literal) else entering.get(made)
        passes = at is not None and (at == first + k if k < n_carry else at >= first + n_carry)
        if at is not None and passes and result.aval == eqn.invars[at].aval:
            yield result, eqn.invars[at]


def _renamed(atoms: Sequence[Any], same: Mapping[Any, Any]) -> list[Any]:
    return [atom if isinstance(atom, Literal) else same.get(atom, atom) for atom in atoms]


def _deduplicated(jaxpr: Jaxpr) -> Jaxpr:
    """The program without duplicates among casts, transposes and reversals, reversals of dimensions of size one, and pads by nothing."""
    same: dict[Any, Any] = {}
    made: dict[tuple[Any, ...], Any] = {}

    eqns = []
    for eqn in jaxpr.eqns:
        invars, name = _renamed(eqn.invars, same), eqn.primitive.name
        if name == "pad" and not any(map(any, eqn.params["padding_config"])) and not isinstance(invars[0], Literal):
            same[eqn.outvars[0]] = invars[0]
            continue
        if name in REARRANGING and not isinstance(invars[0], Literal):
            params = tuple(sorted(eqn.params.items(), key=lambda each: each[0]))
            if name == "rev":
                params = tuple(dim for dim in eqn.params["dimensions"] if invars[0].aval.shape[dim] > 1)
            identity = name == "rev" and not params
            first = invars[0] if identity else made.setdefault((name, invars[0], eqn.outvars[0].aval, params), eqn.outvars[0])
            if first is not eqn.outvars[0]:
                same[eqn.outvars[0]] = first
                continue
        eqns.append(eqn.replace(invars=invars) if same else eqn)
    return jaxpr.replace(eqns=eqns, outvars=_renamed(jaxpr.outvars, same)) if same else jaxpr


def _equation(eqn: JaxprEqn, within: tuple[JaxprEqn, ...]) -> JaxprEqn:
    called = implemented(known_kernel(_opened(eqn)), within)
    within = within if called is eqn else (*within, eqn)
    eqn = around(called, [_simplified(opened(body)[0], within) for body in subjaxprs(called)])
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return _loop(eqn)
    if eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        return _branch(eqn)
    return by_dimension(eqn)


def _opened(eqn: JaxprEqn) -> JaxprEqn:
    """A function that partitions itself as a call of the function, where its author's rule splits nothing."""
    if eqn.primitive.name != "custom_partitioning" or splits(eqn.params):
        return eqn
    return as_call(eqn, jaxpr_as_fun(eqn.params["call"]), eqn.invars)


def _branch(eqn: JaxprEqn) -> JaxprEqn:
    """A branch by platform as a call of the only branch for devices; unchanged where there are several."""
    both = zip(eqn.params["branches"], eqn.params["branches_platforms"], strict=True)
    taken = [branch for branch, platforms in both if platforms is None or not PLATFORMS.isdisjoint(platforms)]
    return as_call(eqn, jaxpr_as_fun(taken[0]), eqn.invars[1:]) if len(taken) == 1 else eqn


def _loop(eqn: JaxprEqn) -> JaxprEqn:
    """A mapped loop as an ordinary one: its body evaluates the condition as well, and so has the constants of both."""
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]

    def any_true(*operands: Any) -> Any:
        (true,) = jaxpr_as_fun(condition)(*operands)
        return jax.lax.reduce_or(true, range(true.ndim))

    def advance(*operands: Any) -> list[Any]:
        constants, carry = operands[:n_cond], operands[n_cond + n_body :]
        (true,) = jaxpr_as_fun(condition)(*constants, *carry)
        results = jaxpr_as_fun(body)(*operands[n_cond:])
        return [
            jax.lax.select(jax.lax.broadcast_in_dim(true, new.shape, range(true.ndim)), new, old)
            for new, old in zip(results, carry, strict=True)
        ]

    types = types_of(eqn.invars)
    constants, carry = types[:n_cond], types[n_cond + n_body :]
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        new_condition = jax.make_jaxpr(any_true)(*constants, *carry)
        new_body = jax.make_jaxpr(advance)(*constants, *types[n_cond:])
    return eqn.replace(
        invars=[*eqn.invars[:n_cond], *eqn.invars],
        params={**eqn.params, "cond_jaxpr": new_condition, "body_jaxpr": new_body, "body_nconsts": n_cond + n_body},
    )
