"""Grouped products of megablox's kernels as those of `jax.lax.ragged_dot_general`, so that their rows are packed like any others.

A call is found as those of `trace.library_kernels` are: by the source of its function, which has the same kernel when it is traced again.
One of another release, or with a part of the groups, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from autoshard.rules.avals import aval_of
from autoshard.trace import Traced, rebuilt, subjaxprs
from autoshard.trace.library_kernels import same, source_of
from autoshard.trace.structure import around, as_call, opened

_MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"


def with_grouped_products(traced: Traced) -> Traced:
    """The program with `jax.lax.ragged_dot_general` in place of kernels that compute it; itself where there are none."""
    jaxpr = _replaced(traced.jaxpr.jaxpr)
    return traced if jaxpr is traced.jaxpr.jaxpr else rebuilt(traced, ClosedJaxpr(jaxpr, traced.jaxpr.consts))


def _replaced(jaxpr: Jaxpr) -> Jaxpr:
    """A program with the products in it and in its bodies replaced; the same object where there are none."""
    eqns = [_equation(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns) if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr


def _equation(eqn: JaxprEqn) -> JaxprEqn:
    name, file = source_of(eqn)
    call = _call(eqn) if name in ("gmm", "tgmm") and file.endswith(_MODULE) else None
    found = None if call is None else same(call.kernel, _tries(call, name), call.operands)
    if call is not None and found is not None:
        numbers = _numbers(name, **found.keywords)
        return as_call(eqn, partial(_grouped, numbers=numbers, dtype=aval_of(eqn.outvars[0]).dtype), call.operands)
    bodies = subjaxprs(eqn)
    return around(eqn, [_replaced(opened(body)[0]) for body in bodies]) if bodies else eqn


@dataclass(frozen=True)
class _Call:
    """A call of a function with one kernel, and its operands that are the rows, the weights or their gradients' rows, and the sizes.

    Loops are handed what does not change as further operands, such as constants of the blocks' order.
    """

    kernel: JaxprEqn
    operands: tuple[Any, Any, Any]


def _call(eqn: JaxprEqn) -> _Call | None:
    """The parts of a call; None where its kernel is not of all groups."""
    body, _ = opened(eqn.params["jaxpr"])
    kernels = [each for each in body.eqns if each.primitive.name == "pallas_call"]
    if len(kernels) != 1 or len(eqn.outvars) != 1 or body.outvars[0] not in kernels[0].outvars:
        return None
    (kernel,), mapping = kernels, kernels[0].params["grid_mapping"]
    scalars = kernel.invars[mapping.num_dynamic_grid_bounds :]
    read = scalars[0], *scalars[mapping.num_index_operands : mapping.num_index_operands + 2]
    ends, left, right = (_read(body, v) for v in read)
    weights = aval_of(eqn.outvars[0] if len(aval_of(eqn.outvars[0]).shape) == 3 else read[2]).shape
    sizes = [k for k in ends if aval_of(body.invars[k]).shape == (weights[0],)]
    if any(len(each) != 1 for each in (left, right, sizes)) or aval_of(read[0]).shape != (weights[0] + 1,):
        return None
    return _Call(kernel, (eqn.invars[left[0]], eqn.invars[right[0]], eqn.invars[sizes[0]]))


def _read(body: Jaxpr, v: Any) -> list[int]:
    """The numbers of the inputs of which a value is made."""
    needed = {v}
    for eqn in reversed(body.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return [k for k, x in enumerate(body.invars) if x in needed]


def _tries(call: _Call, name: str) -> Iterator[partial]:
    """The function with the arguments that a call may have had beside arrays."""
    module = import_module(_MODULE)
    kernel, mapping = call.kernel, call.kernel.params["grid_mapping"]
    rows, inner = (d.block_size for d in mapping.block_mappings[0].block_shape)
    tiling = rows, inner, mapping.block_mappings[-1].block_shape[-1].block_size
    known = {"preferred_element_type": aval_of(kernel.outvars[0]).dtype, "tiling": tiling, "interpret": kernel.params["interpret"]}
    if name == "tgmm":
        yield partial(module.tgmm, **known)
    else:
        yield from (partial(module.gmm, **known, transpose_rhs=transposed) for transposed in (False, True))


def _numbers(name: str, transpose_rhs: bool = False, **_: Any) -> lax.RaggedDotDimensionNumbers:
    if name == "tgmm":
        return lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
    return lax.RaggedDotDimensionNumbers((((1,), (2 if transpose_rhs else 1,)), ((), ())), (0,), (0,))


def _grouped(left: Any, right: Any, sizes: Any, numbers: lax.RaggedDotDimensionNumbers, dtype: Any) -> Any:
    """Products with the kernel's types: those of its operands where both have one, else float32."""
    both = left.dtype if left.dtype == right.dtype else jnp.float32
    return lax.ragged_dot_general(left.astype(both), right.astype(both), sizes, numbers, preferred_element_type=dtype)
