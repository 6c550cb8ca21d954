"""The rule and the work of a Pallas kernel, read from its grid, its index maps and its body.

A grid axis is a factor where each program along it computes blocks of its own: the axis alone indexes one dimension of every result, and at
most one of each operand. A dimension of ``G`` blocks of ``w`` elements is the factors ``[gw]``, of which ``w`` stays whole. Where several
programs share a block, as query heads share a key head by the index ``h // 4``, the axis is two factors, ``[g]`` of the shared blocks and
its minor ``[m]``; a result that they share leaves the minor one whole.

An axis stays whole where results would not be equal:

- the body reads its position (`pl.program_id`), which is another one on a shard;
- an index depends on it together with other axes, or on prefetched scalars;
- a block is not read or written evenly along it;
- scratch memory may carry something from one program to the next: the axis is not declared ``"parallel"``, and the body reads the position
  along an axis outside it. Where it reads none, the scratch is initialised whenever the axes inside begin again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from autoshard.ir import Factor, Rule, Value
from autoshard.ir.kernel import Kernel
from autoshard.primitives import is_inlined, primitive
from autoshard.rules import attention
from autoshard.rules.declared import declared_of
from autoshard.rules.registry import Dim, assemble, rule, whole


@dataclass(frozen=True, slots=True)
class _Index:
    """The block index of one dimension of a tensor.

    Attributes:
        size, block: elements of the dimension and of a block.
        axes: the grid axes that it depends on.
        shared: where it depends on one axis and nothing else, how many successive programs along it have the same block; 0 elsewhere.
    """

    size: int
    block: int
    axes: frozenset[int]
    shared: int = 0


@rule("pallas_call")
def pallas_call(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule:
    """Grid axes that index blocks are factors: ``([gw, k], [k, j])->([gw, j]) need_replication={w, k, j}``."""
    mapping = params["grid_mapping"]
    indices = [_indices(block, mapping.grid) for block in mapping.block_mappings]
    ways = _split_ways(indices, params)
    made = [[_dimension(index, ways) for index in tensor] for tensor in indices]
    front = [whole(operand.shape) for operand in operands[: len(operands) - mapping.num_inputs]]
    return assemble([*front, *made[: mapping.num_inputs]], made[mapping.num_inputs :])


def grid_axes(params: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Per grid axis that can be split, a tensor, inputs counted first and then results, and its dimension that the axis indexes alone."""
    mapping = params["grid_mapping"]
    indices = [_indices(block, mapping.grid) for block in mapping.block_mappings]
    ways = _split_ways(indices, params)
    places = [(index.axes, (tensor, dim)) for tensor, dims in enumerate(indices) for dim, index in enumerate(dims)]
    return {axis: next(place for axes, place in reversed(places) if axes == {axis}) for axis in ways}


def _dimension(index: _Index, ways: Mapping[int, Sequence[tuple[int, Factor]]]) -> Dim:
    """The factors of one dimension: those of its axis that it has, then the block."""
    axis = next(iter(index.axes)) if len(index.axes) == 1 else -1
    if axis not in ways:
        return Factor(index.size, "need_replication")
    blocks = [factor for shared, factor in ways[axis] if shared >= index.shared]
    return (*blocks, Factor(index.block, "need_replication"))


def whole_axes(params: Mapping[str, Any]) -> dict[int, str]:
    """Per grid axis of a kernel that cannot be split, why."""
    mapping = params["grid_mapping"]
    indices = [_indices(block, mapping.grid) for block in mapping.block_mappings]
    found = {axis: _reason(axis, indices, params) for axis, size in enumerate(mapping.grid) if size != 1}
    return {axis: reason for axis, reason in found.items() if reason}


def _split_ways(indices: Sequence[Sequence[_Index]], params: Mapping[str, Any]) -> dict[int, list[tuple[int, Factor]]]:
    """Per grid axis that can be split, its factors from major to minor, each with how many programs share what is below it."""
    mapping = params["grid_mapping"]
    ways = {}
    for axis, size in enumerate(mapping.grid):
        if size != 1 and not _reason(axis, indices, params):
            shared = [{index.shared for index in tensor if axis in index.axes} for tensor in indices]
            edges = [*sorted({1}.union(*shared)), size]
            least = max(max(each) for each in shared[mapping.num_inputs :])
            kinds = [(below, above, "pass_through" if below >= least else "need_replication") for below, above in itertools.pairwise(edges)]
            ways[axis] = [(below, Factor(above // below, kind)) for below, above, kind in reversed(kinds)]
    return ways


def _reason(axis: int, indices: Sequence[Sequence[_Index]], params: Mapping[str, Any]) -> str:
    """Why a grid axis cannot be split; empty where it can."""
    mapping, body = params["grid_mapping"], params["jaxpr"]
    own = [each for each in range(len(mapping.grid)) if each not in mapping.vmapped_dims]
    read = {own[each] for each in _read_positions(body)}
    declared = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
    parallel = {own[k] for k, semantics in enumerate(declared) if getattr(semantics, "value", semantics) == "parallel"}
    touched = [[index for index in tensor if axis in index.axes] for tensor in indices]
    shared = sorted({1}.union(index.shared for tensor in touched for index in tensor))
    if params.get("mesh") is not None:
        return "the kernel runs on a mesh of cores"
    if not isinstance(mapping.grid[axis], int):
        return "its length is known when it runs"
    if axis in read:
        return "the kernel reads its position with pl.program_id"
    if not all(touched[mapping.num_inputs :]):
        return "programs along it write the same blocks of a result"
    if (
        0 in shared
        or any(len(tensor) > 1 for tensor in touched)
        or any(b % a for a, b in itertools.pairwise([*shared, mapping.grid[axis]]))
    ):
        return "it is not alone in indexing a dimension, block after block"
    if mapping.scratch_avals and axis not in parallel and any(outer in read for outer in range(axis)):
        return 'scratch memory may pass something along it: dimension_semantics does not say that it is "parallel"'
    return ""


def _read_positions(body: Jaxpr) -> set[int]:
    """The axes whose `pl.program_id` a kernel reads, its inner programs included."""
    found = set()
    for eqn in _equations(body):
        if eqn.primitive.name == "program_id":
            found.add(eqn.params["axis"])
    return found


def _equations(body: Jaxpr) -> Iterator[Any]:
    for eqn in body.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


# -- index maps ------------------------------------------------------------------------------------------------------------


def _indices(mapping: Any, grid: Sequence[Any]) -> list[_Index]:
    """The block index of each dimension of a tensor; one that depends on all axes where the index map is of a kind that is not known."""
    body, shape = mapping.index_map_jaxpr.jaxpr, mapping.array_aval.shape
    blocks = [size for block in mapping.block_shape if (size := _block_size(block)) is not None]
    if not len(blocks) == len(body.outvars) == len(shape):
        return [_Index(size, size, frozenset(range(len(grid)))) for size in shape]
    read = _dependences(body)
    found = []
    for dim, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        axes = frozenset(axis for axis in read[dim] if axis < len(grid))
        shared = _shared(mapping, dim, min(axes), grid, block) if len(read[dim]) == len(axes) == 1 else 0
        found.append(_Index(size, block, axes, shared))
    return found


def _block_size(block: Any) -> int | None:
    """Elements of a block along a dimension, 1 where the kernel does not see the dimension; None for a kind that is not known."""
    match type(block).__name__:
        case "Squeezed":
            return 1
        case "Blocked":
            return block.block_size
        case "Element":
            return block.block_size if tuple(block.padding) == (0, 0) else None
    return None


def _shared(mapping: Any, dim: int, axis: int, grid: Sequence[Any], block: int) -> int:
    """How many successive programs along the one axis that indexes a dimension have the same block; 0 where blocks are not shared so."""
    programs, size = grid[axis], mapping.array_aval.shape[dim]
    if not isinstance(programs, int) or size % block or programs % (size // block):
        return 0
    shared = programs * block // size
    unit = block if type(mapping.block_shape[dim]).__name__ == "Element" else 1
    found = _evaluated(mapping.index_map_jaxpr.jaxpr, dim, axis, programs)
    return shared if found is not None and np.array_equal(found, np.arange(programs) // shared * unit) else 0


def _dependences(body: Jaxpr) -> list[set[int]]:
    """Per result the inputs that it depends on."""
    known: dict[Any, set[int]] = {var: {position} for position, var in enumerate(body.invars)}

    def read(atom: Any) -> set[int]:
        return set() if isinstance(atom, Literal) else known.get(atom, set())

    for eqn in body.eqns:
        known.update(dict.fromkeys(eqn.outvars, set[int]().union(*map(read, eqn.invars))))
    return [read(atom) for atom in body.outvars]


def _evaluated(body: Jaxpr, result: int, axis: int, programs: int) -> np.ndarray | None:
    """A result of an index map for each program along an axis; None where an operation in it is not known."""
    known: dict[Any, Any] = dict.fromkeys(body.invars)
    known[body.invars[axis]] = np.arange(programs)
    _run(body, known)
    atom = body.outvars[result]
    found = atom.val if isinstance(atom, Literal) else known.get(atom)
    return None if found is None else np.broadcast_to(found, (programs,))


def _run(body: Jaxpr, known: dict[Any, Any]) -> None:
    """Computes what follows from the variables that are known; the others are None."""
    for eqn in body.eqns:
        operands = [atom.val if isinstance(atom, Literal) else known.get(atom) for atom in eqn.invars]
        if is_inlined(eqn.primitive.name):
            (inner,) = jaxprs_in_params(eqn.params)
            inside = dict(zip(inner.invars, operands, strict=True))
            _run(inner, inside)
            found = [atom.val if isinstance(atom, Literal) else inside.get(atom) for atom in inner.outvars]
        elif eqn.primitive.name in INTEGER and all(x is not None for x in operands):
            found = [INTEGER[eqn.primitive.name](*operands)]
        else:
            found = [None] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))


def _quotient(a: Any, b: Any) -> Any:
    """Division that rounds toward zero, as XLA's does."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


INTEGER: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.logical_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "rem": lambda a, b: a - b * _quotient(a, b),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "sign": np.sign,
    "sub": np.subtract,
}
"""Operations of index maps, on the indices of all programs at once; their logical ones are of booleans."""


# -- work ------------------------------------------------------------------------------------------------------------------


def kernel_of(eqn: JaxprEqn) -> Kernel | None:
    """The work of a whole call of a kernel; None of another primitive."""
    types = [[v.aval for v in side] for side in (eqn.invars, eqn.outvars)]
    match name := eqn.primitive.name:
        case "custom_partitioning":
            given = getattr(eqn.params["partition"], "declared", None)
            return _composed(eqn.params["call"]) if given is None else given.kernel(*types)
        case attention.FORWARD | attention.BACKWARD:
            return attention.attention_kernel(name, eqn.params, *types)
        case "pallas_call":
            return _pallas(eqn.params)
    given = declared_of(name, eqn.params)
    return given and given.kernel(*types)


def _pallas(params: Mapping[str, Any]) -> Kernel:
    """The work of a `pl.pallas_call`: that of its `pl.CostEstimate`, and without one that of a program times the number of programs.

    A branch counts as its largest one, a loop or a grid axis of a length that is not known once. A block is loaded or stored whenever its
    index changes; the last axis runs fastest.
    """
    mapping = params["grid_mapping"]
    matrix, vector = _flops(params["jaxpr"])
    dtype = _product_dtype(params["jaxpr"]) or max(mapping.block_mappings, key=_block_bytes).array_aval.dtype.name
    if (estimate := params.get("cost_estimate")) is not None:
        total, others = float(estimate.flops), float(estimate.transcendentals)
        return Kernel(
            *((total, others) if matrix else (0.0, total + others)), dtype, float(estimate.bytes_accessed), bool(params["interpret"])
        )
    grid = [size if isinstance(size, int) else 1 for size in mapping.grid]
    programs = math.prod(grid)
    nbytes = sum(_loads(block, grid) * _block_bytes(block) for block in mapping.block_mappings)
    return Kernel(programs * matrix, programs * vector, dtype, nbytes, bool(params["interpret"]))


def _composed(call: Any) -> Kernel:
    """The work of a function that partitions itself: its operations, of which products and kernels read and write memory."""
    body = getattr(call, "jaxpr", call)
    matrix, vector = _flops(body)
    inner = map(kernel_of, _equations(body))
    kernels = [each for each in inner if each is not None]
    products = [eqn for eqn in _equations(body) if eqn.primitive.name == "dot_general"]
    moved = sum(_elements([v]) * v.aval.dtype.itemsize for eqn in products for v in (*eqn.invars, *eqn.outvars))
    outside = sum(_elements([v]) * v.aval.dtype.itemsize for v in (*body.invars, *body.outvars))
    dtype = _product_dtype(body) or (body.invars or body.outvars)[0].aval.dtype.name
    return Kernel(
        matrix + sum(each.matrix_flops for each in kernels),
        vector + sum(each.vector_flops for each in kernels),
        dtype,
        max(outside, moved + sum(each.nbytes for each in kernels)),
        all(each.interpreted for each in kernels),
    )


def _product_dtype(body: Jaxpr) -> str:
    """The dtype of the first product's operands; empty without any."""
    return next((eqn.invars[0].aval.dtype.name for eqn in _equations(body) if eqn.primitive.name == "dot_general"), "")


def _loads(mapping: Any, grid: Sequence[int]) -> int:
    """How often a block of a tensor is loaded or stored."""
    last = max((axis for read in _dependences(mapping.index_map_jaxpr.jaxpr) for axis in read if axis < len(grid)), default=-1)
    return math.prod(grid[: last + 1])


def _block_bytes(mapping: Any) -> float:
    blocks = (_block_size(block) for block in mapping.block_shape)
    elements = math.prod(size if block is None else block for size, block in zip(mapping.array_aval.shape, blocks, strict=True))
    return elements * mapping.array_aval.dtype.itemsize


def _flops(body: Jaxpr) -> tuple[float, float]:
    """Floating point operations of matrix products, and of everything else, in one run of a kernel's body."""
    matrix = vector = 0.0
    for eqn in body.eqns:
        name = eqn.primitive.name
        if inner := [_flops(each) for each in jaxprs_in_params(eqn.params)]:
            times = eqn.params["length"] if name == "scan" else 1
            combine = max if name == "cond" else sum
            matrix += times * combine(each[0] for each in inner)
            vector += times * combine(each[1] for each in inner)
        elif name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            matrix += 2 * _elements(eqn.outvars) * math.prod(_shape(eqn.invars[0])[dim] for dim in contracted)
        elif primitive(name).kind == "elementwise":
            vector += _elements(eqn.outvars)
        elif primitive(name).kind == "reduction":
            vector += _elements(eqn.invars)
    return matrix, vector


def _elements(variables: Sequence[Any]) -> int:
    return math.prod(_shape(variables[0]))


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
