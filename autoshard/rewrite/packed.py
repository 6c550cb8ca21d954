"""Equations on packed rows: ``(experts, ...)`` arrays whose row dimension, behind that of experts, has the slots of one expert.

Slots without a row have zeros where rows enter, and anything after that: they are set to zero where rows are summed, and nowhere read else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.lower import bind_unplaced
from autoshard.rewrite.region import Step
from autoshard.rewrite.slots import Slots

PROBE = 3  # slots of an expert, of which it is found out whether an equation runs on packed rows
DROPPED = lax.GatherScatterMode.FILL_OR_DROP


def enter(x: Any, dim: int, slots: Slots) -> Any:
    """The rows of a value in their slots."""
    return jnp.moveaxis(_rows(x, dim, slots.index), dim, 0)


def leave(x: Any, dim: int, slots: Slots) -> Any:
    """The rows of a packed value in the order in which they are sorted; zeros for those that have no slot in this round."""
    return _rows(_joined(x, dim), dim, slots.slot)


def _rows(x: Any, dim: int, index: Any) -> Any:
    """The rows at an index; zeros where that is none."""
    return x.at[(*[slice(None)] * dim, index)].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def evaluated(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> list[Any]:
    """The results of an equation on operands that are packed where its step says so."""
    match step.kind:
        case "row":
            return _by_row(eqn, step, operands, slots)
        case "product":
            return [_product(eqn, operands[0], operands[1], slots)]
        case "weights":
            return [_weights(eqn, step, operands, slots)]
        case "sum":
            both = zip(operands, step.reads, strict=True)
            return bind_unplaced(eqn, [x if dim is None else _joined(_masked(x, dim, slots.filled), dim) for x, dim in both])
        case "scatter":
            return [_scatter(eqn, step, operands, slots)]
        case "gather":
            return [_gather(eqn, step, operands, slots)]
    return [_into(eqn, step, operands, slots)]


def combined(eqn: Any, step: Step, before: Any, now: Any, operands: Sequence[Any], slots: Slots) -> Any:
    """A result of all rows after one more round; that of a scatter has been scattered into what was ``before``."""
    match step.kind:
        case "scatter":
            return now
        case "gather":
            found = _places(eqn, operands[1], slots) < slots.experts * slots.capacity
            return jnp.where(jnp.expand_dims(found, eqn.params["dimension_numbers"].offset_dims), now, before)
    return before + now


def left(before: Any, now: Any, dim: int, slots: Slots) -> Any:
    """Sorted rows after one more round."""
    mine = slots.slot < slots.experts * slots.capacity
    return jnp.where(lax.broadcast_in_dim(mine, now.shape, (dim,)), now, before)


def _masked(x: Any, dim: int, where: Any) -> Any:
    """A packed value with zeros in all other slots."""
    return jnp.where(lax.broadcast_in_dim(where, x.shape, (0, dim + 1)), x, jnp.zeros((), x.dtype))


def _joined(x: Any, dim: int) -> Any:
    """A packed value whose row dimension has all experts' slots."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _by_row(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> list[Any]:
    replaced = _resized(eqn, step, slots.capacity)
    if eqn.primitive.name == "gather" and step.reads == (None, step.reads[1]):
        operands, more = _looked_up(eqn, step.reads[1], operands, slots)
        replaced |= more

    def one(*parts: Any) -> list[Any]:
        return bind_unplaced(eqn, parts, **replaced)

    return jax.vmap(one, tuple(None if dim is None else 0 for dim in step.reads), axis_size=slots.experts)(*operands)


def _resized(eqn: Any, step: Step, size: int) -> dict[str, Any]:
    """Those of an equation's parameters in which its number of rows is another."""
    name, out = eqn.primitive.name, step.makes[0]
    assert out is not None, "all results have rows"

    def at(sizes: Sequence[int], dim: int | None) -> tuple[int, ...]:
        return tuple(size if d == dim else n for d, n in enumerate(sizes))

    match name:
        case "broadcast_in_dim" | "iota" | "empty":
            return {"shape": at(eqn.params["shape"], out)}
        case "reshape":
            return {"new_sizes": at(eqn.params["new_sizes"], out)}
        case "slice":
            return {"limit_indices": at(eqn.params["limit_indices"], step.reads[0])}
        case "dynamic_slice":
            return {"slice_sizes": at(eqn.params["slice_sizes"], step.reads[0])}
        case "gather" if step.reads[0] not in (None, *eqn.params["dimension_numbers"].operand_batching_dims):
            return {"slice_sizes": at(eqn.params["slice_sizes"], step.reads[0])}
    return {}


def _looked_up(eqn: Any, dim: int, operands: Sequence[Any], slots: Slots) -> tuple[list[Any], dict[str, Any]]:
    """The operands and parameters of rows that are looked up; zeros where a slot has none, unless it fills what is not found otherwise."""
    x, indices = operands
    mode, numbers, sizes = (eqn.params[name] for name in ("mode", "dimension_numbers", "slice_sizes"))
    mode = lax.GatherScatterMode.from_any(mode)
    if mode == DROPPED and eqn.params["fill_value"] != 0:
        return [x, indices], {"indices_are_sorted": False}
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, jnp.array([x.shape[d] - sizes[d] for d in numbers.start_index_map], indices.dtype))
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    where = lax.broadcast_in_dim(slots.filled, indices.shape, (0, dim + 1))
    return [x, jnp.where(where, indices, -1)], {"mode": DROPPED, "fill_value": 0, "indices_are_sorted": False, "unique_indices": False}


def _product(eqn: Any, lhs: Any, rhs: Any, slots: Slots) -> Any:
    """Packed rows by their expert's weights."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, others), (batch, batch_others) = numbers.dot_dimension_numbers
    (group,) = numbers.rhs_group_dimensions
    others, batch_others = (tuple(d - (d > group) for d in dims) for dims in (others, batch_others))
    found = _dot(eqn, lhs, rhs, group, ((tuple(contracted), others), (tuple(batch), batch_others)))
    return found if slots.round is None else jnp.where(slots.is_over, jnp.zeros((), found.dtype), found)


def _weights(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> Any:
    """The sums over the rows of each expert."""
    mine = slots.filled if slots.round is None else slots.filled & ~slots.is_over
    lhs, rhs = (_masked(x, dim, mine) for x, dim in zip(operands[:2], step.reads[:2], strict=True))
    return _dot(eqn, lhs, rhs, 0, eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers)


def _dot(eqn: Any, lhs: Any, rhs: Any, group: int, numbers: Any) -> Any:
    precision, dtype = eqn.params["precision"], eqn.outvars[0].aval.dtype

    def one(left: Any, right: Any) -> Any:
        return lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=dtype)

    return jax.vmap(one, (0, group))(lhs, rhs)


def _scatter(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> Any:
    """The rows that have slots scattered into an array; others are dropped."""
    x, indices, updates = operands
    indices = _clipped(eqn, x, indices)
    where = lax.broadcast_in_dim(slots.filled, indices.shape, (0, step.reads[1] + 1))
    joined = _joined(jnp.where(where, indices, -1), step.reads[1]), _joined(updates, step.reads[2])
    return bind_unplaced(eqn, [x, *joined], mode=DROPPED, indices_are_sorted=False, unique_indices=False)[0]


def _clipped(eqn: Any, x: Any, indices: Any) -> Any:
    """The indices of a scatter as signed integers, clamped where it says so."""
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    if lax.GatherScatterMode.from_any(eqn.params["mode"]) != lax.GatherScatterMode.CLIP:
        return indices
    numbers = eqn.params["dimension_numbers"]
    absent = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = iter(eqn.invars[2].aval.shape[d] for d in numbers.update_window_dims)
    taken = [1 if d in absent else next(windows) for d in range(x.ndim)]
    most = [x.shape[d] - taken[d] for d in numbers.scatter_dims_to_operand_dims]
    return jnp.clip(indices, 0, jnp.array(most, indices.dtype))


def _places(eqn: Any, indices: Any, slots: Slots) -> Any:
    """The slots, of all experts, at which a gather looks rows up by their sorted position; without one none is found."""
    row = indices[..., 0].astype(jnp.promote_types(indices.dtype, jnp.int32))
    if lax.GatherScatterMode.from_any(eqn.params["mode"]) == lax.GatherScatterMode.CLIP:
        row = jnp.clip(row, 0, slots.rows - 1)
    nowhere = slots.experts * slots.capacity
    return jnp.where((row >= 0) & (row < slots.rows), slots.slot.at[row].get(mode="clip", wrap_negative_indices=False), nowhere)


def _gather(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> Any:
    """Packed rows at sorted positions."""
    x, indices = operands
    mode = lax.GatherScatterMode.from_any(eqn.params["mode"])
    filling = eqn.params["fill_value"] if mode == DROPPED else 0
    replaced = {"mode": DROPPED, "fill_value": filling, "indices_are_sorted": False, "unique_indices": False}
    return bind_unplaced(eqn, [_joined(x, step.reads[0]), _places(eqn, indices, slots)[..., None]], **replaced)[0]


def _into(eqn: Any, step: Step, operands: Sequence[Any], slots: Slots) -> Any:
    """Rows scattered to their slots."""
    x, indices, updates = operands
    dim = step.reads[0]
    places = _places(eqn, indices, slots)[..., None]
    found = bind_unplaced(eqn, [_joined(x, dim), places, updates], mode=DROPPED, indices_are_sorted=False)[0]
    found = found.reshape(*found.shape[:dim], slots.experts, slots.capacity, *found.shape[dim + 1 :])
    return jnp.moveaxis(found, dim, 0)


def is_packable(eqn: Any, step: Step, sizes: Any, rows: int) -> bool:
    """Whether an equation gives what its step says on fewer rows; so sizes among its parameters that are not known are found."""
    def type_of(v: Any, dim: int | None) -> Any:
        return v.aval if dim is None else packed_type(v, sizes.aval.shape[0], PROBE, dim)

    def function(sizes: Any, *operands: Any) -> list[Any]:
        return evaluated(eqn, step, operands, Slots(sizes, rows, PROBE))

    given = [sizes.aval, *(type_of(v, dim) for v, dim in zip(eqn.invars, step.reads, strict=True))]
    try:
        made = jax.eval_shape(function, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given))
    except (TypeError, ValueError, NotImplementedError):  # what JAX raises for parameters that are not of these shapes
        return False
    wanted = [type_of(v, dim) for v, dim in zip(eqn.outvars, step.makes, strict=True)]
    return [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in wanted]


def packed_type(v: Any, experts: int, capacity: int, dim: int) -> Any:
    """The type of a value that is packed along a dimension."""
    shape = tuple(capacity if d == dim else n for d, n in enumerate(v.aval.shape))
    return v.aval.update(shape=(experts, *shape))
