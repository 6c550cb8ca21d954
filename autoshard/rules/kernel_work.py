"""The work of kernels: what a call computes, moves and holds, from its grid and its body, or as its author says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from autoshard.ir import Rule
from autoshard.ir.kernel import Kernel
from autoshard.rules import attention, ring
from autoshard.rules.avals import aval_of
from autoshard.rules.declared import declared_of
from autoshard.rules.kernel_body import LARGEST, NOTHING, Walk
from autoshard.rules.kernels import Grid, block_size, counted, grid_of, has_numbers, kernel_rule


def kernel_of(eqn: JaxprEqn, unread: tuple[int, ...] = (), constants: Mapping[int, Any] | None = None) -> Kernel | None:
    """The work of a whole call of a kernel, and its rule where that depends on which results nobody reads; None of another primitive.

    Args:
        unread: the numbers of these results.
        constants: by number of an operand its array, where that is one of the program's constants.
    """
    types = [[*map(aval_of, side)] for side in (eqn.invars, eqn.outvars)]
    match name := eqn.primitive.name:
        case "custom_partitioning":
            given = getattr(eqn.params["partition"], "declared", None)
            return _composed(eqn.params["call"]) if given is None else given.kernel(*types)
        case attention.FORWARD | attention.BACKWARD:
            return attention.attention_kernel(name, eqn.params, *types)
        case ring.FORWARD | ring.BACKWARD:
            return ring.work(name, eqn.params, types[0])
        case "pallas_call":
            rule = kernel_rule(eqn.params, [aval.shape for aval in types[0]], unread)
            return _pallas(eqn.params, rule, unread, _integers(eqn, constants or {}))
        case "mpmd_map":
            return _on_cores(eqn)
    given = declared_of(name, eqn.params)
    return given and given.kernel(*types)


def _integers(eqn: JaxprEqn, constants: Mapping[int, Any]) -> dict[int, np.ndarray]:
    """By argument of a kernel's body its integers, of constants such as the blocks of a mask."""
    mapping = eqn.params["grid_mapping"]
    first = len(eqn.invars) - mapping.num_inputs - mapping.num_index_operands
    return {n - first: np.asarray(x) for n, x in constants.items() if n >= first and x.dtype.kind in "iub" and 0 < x.size <= LARGEST}


def _pallas(params: Mapping[str, Any], rule: Rule, unread: tuple[int, ...], values: Mapping[int, np.ndarray]) -> Kernel:
    """The work of a `pl.pallas_call`: that of its `pl.CostEstimate`, and without one that of a program times the number of programs.

    A loop or a grid axis of a length that is not known counts once, and a branch that depends on data as its largest.
    """
    mapping, grid = params["grid_mapping"], grid_of(params, unread)
    bytes_of = [_block_bytes(block) for block in mapping.block_mappings]
    programs = math.prod(size for size in mapping.grid if isinstance(size, int))
    loads, walk = counted(params, values) if values else (grid.loads, grid.walk)
    matrix, vector = programs * walk.matrix_flops, programs * walk.vector_flops
    nbytes = float(sum(map(math.prod, zip(loads, bytes_of, strict=True))))
    dtype = _product_dtype(params["jaxpr"]) or max(mapping.block_mappings, key=_block_bytes).array_aval.dtype.name
    guessed = tuple(sorted(walk.guessed))
    if not all(isinstance(size, int) for size in mapping.grid):
        guessed = (*guessed, "an axis of the grid whose length is known when it runs counts as one program")
    if (estimate := params.get("cost_estimate")) is not None:
        total, others, guessed = float(estimate.flops), float(estimate.transcendentals), ()
        (matrix, vector), nbytes = (total, others) if matrix else (0.0, total + others), float(estimate.bytes_accessed)
    whole = tuple(f"grid axis {axis} is not split, since {reason}" for axis, reason in grid.whole.items())
    if not grid.ways and not whole:
        whole = ("it is one program, without a grid",)
    total = walk.matrix_flops
    products = tuple((flops / total, sizes) for sizes, flops in sorted(walk.products.items())) if total else ()
    limit = getattr(params.get("compiler_params"), "vmem_limit_bytes", None) or 0.0
    near = _near_bytes(params, grid), limit
    return Kernel(matrix, vector, dtype, nbytes, bool(params["interpret"]), rule, whole, unread, guessed, products, *near)


def _near_bytes(params: Mapping[str, Any], grid: Grid) -> float:
    """The bytes of a core's own memory: each block that changes from program to program twice, the others and scratch once.

    XLA:TPU says so where it refuses a kernel (libtpu 0.0.52); with `pl.Buffered` the author gives the number.
    """
    mapping, total = params["grid_mapping"], 0.0
    for block, dims in zip(mapping.block_mappings, grid.indices, strict=True):
        if _is_near(block.transformed_block_aval):
            changes = any(index.axes for index in dims) or len(dims) != len(block.block_shape)
            total += _block_bytes(block) * getattr(block.pipeline_mode, "buffer_count", 2 if changes else 1)
    scratch = (aval for aval in mapping.scratch_avals or () if _is_near(aval) and has_numbers(aval))
    return total + sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in scratch)


def _is_near(aval: Any) -> bool:
    """Whether memory is a core's own: where nothing else is said, blocks are."""
    return str(getattr(getattr(aval, "memory_space", None), "value", None) or "default").lower() in ("default", "vmem")


def _on_cores(eqn: JaxprEqn) -> Kernel:
    """The work of a `pl.kernel`: that of its `pl.CostEstimate`, and without one that of a core times their number, arrays moved once."""
    matrix = vector = 0.0
    for body, mesh in zip(eqn.params["jaxprs"], eqn.params["meshes"], strict=True):
        walk = Walk({})
        walk.run(body, [NOTHING] * len(body.invars), np.ones(()))
        cores = math.prod(dict(mesh.shape).values())
        matrix, vector = matrix + cores * walk.matrix_flops, vector + cores * walk.vector_flops
    dtype = next(filter(None, map(_product_dtype, eqn.params["jaxprs"])), aval_of((eqn.invars or eqn.outvars)[0]).dtype.name)
    guessed: tuple[str, ...] = ("each core counts as doing all of the body, and a GPU's own product instructions as nothing",)
    nbytes = float(sum(map(_bytes, (*eqn.invars, *eqn.outvars))))
    if (estimate := eqn.params.get("cost_estimate")) is not None:
        matrix, vector, guessed = float(estimate.flops), float(estimate.transcendentals), ()
        nbytes = float(estimate.bytes_accessed)
    whole = ("its cores copy by themselves what they compute on",)
    return Kernel(matrix, vector, dtype, nbytes, bool(eqn.params["interpret"]), whole=whole, guessed=guessed)


def _composed(call: Any) -> Kernel:
    """The work of a function that partitions itself: its operations, of which products and kernels read and write memory."""
    body = getattr(call, "jaxpr", call)
    walk = Walk({})
    walk.run(body, [NOTHING] * len(body.invars), np.ones(()))
    kernels = [each for each in map(kernel_of, equations(body)) if each is not None]
    products = [eqn for eqn in equations(body) if eqn.primitive.name == "dot_general"]
    moved = sum(_bytes(v) for eqn in products for v in (*eqn.invars, *eqn.outvars))
    outside = sum(_bytes(v) for v in (*body.invars, *body.outvars))
    dtype = _product_dtype(body) or (body.invars or body.outvars)[0].aval.dtype.name
    return Kernel(
        walk.matrix_flops + sum(each.matrix_flops for each in kernels),
        walk.vector_flops + sum(each.vector_flops for each in kernels),
        dtype,
        max(outside, moved + sum(each.nbytes for each in kernels)),
        all(each.interpreted for each in kernels),
    )


def equations(body: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, those of its inner programs included, without those of kernels."""
    for eqn in body.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from equations(inner)


def _product_dtype(body: Jaxpr) -> str:
    """The dtype of the first product's operands; empty without any."""
    return next((aval_of(eqn.invars[0]).dtype.name for eqn in equations(body) if eqn.primitive.name == "dot_general"), "")


def _bytes(variable: Any) -> float:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize


def _block_bytes(mapping: Any) -> float:
    blocks = map(block_size, mapping.block_shape)
    elements = math.prod(size if block is None else block for size, block in zip(mapping.array_aval.shape, blocks, strict=True))
    return elements * mapping.array_aval.dtype.itemsize
