"""Gathers and scatters whose coordinates count a batch, as batched ones.

``x[jnp.arange(n), labels]`` looks ``labels[i]`` up in ``x[i]``. JAX traces it as a gather of pairs ``(i, labels[i])``: by its rule any
shard of the batch may need any other's. XLA looks into the coordinates, finds that they count, and leaves each shard with its own; so the
counted coordinate goes, and its dimension becomes a batching dimension, which says the same to every reader.

Single elements are looked up as `jnp.take_along_axis` does, along a dimension of one more index: XLA:TPU compares positions for those,
and fills and scatters for others (a gathering loss of 4 x 1024 x 50,304 takes 9.4 for 16.3 ms of kernels, libtpu 0.0.42).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autoshard.primitives import is_call, is_inlined, is_scatter
from autoshard.trace.structure import around, as_call, called_with, opened, subjaxprs

LARGEST = 1 << 20  # elements of a captured constant that is looked at


@dataclass(frozen=True, slots=True)
class _Counts:
    """An array of integers whose every element is its own position along a dimension."""

    dim: int

    def shifted(self, by: int) -> _Counts | None:
        return _Counts(self.dim + by) if self.dim + by >= 0 else None


@dataclass(frozen=True, slots=True)
class _Columns:
    """An array whose last dimension holds coordinates, and per coordinate the dimension that it counts, if it does."""

    dims: tuple[int | None, ...]

    def shifted(self, by: int) -> _Columns:
        return _Columns(tuple(None if dim is None or dim + by < 0 else dim + by for dim in self.dims))


@dataclass(frozen=True, slots=True)
class _False:
    """An array of booleans that are all false."""

    def shifted(self, by: int) -> _False:
        return self


Fact = _Counts | _Columns | _False | None


def batched(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with counted batches, at any depth, as batching dimensions."""
    jaxpr, _ = _read(closed, [None] * len(closed.jaxpr.invars))
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def _read(body: ClosedJaxpr | Jaxpr, entering: Sequence[Fact]) -> tuple[Jaxpr, list[Fact]]:
    """A jaxpr with batches, the same object where there is none, and what is known of its results, from what is known of its inputs."""
    jaxpr, consts = opened(body)
    known: dict[Var, Fact] = dict(zip(jaxpr.invars, entering, strict=True))
    known |= {var: _of_constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def facts(atoms: Sequence[Any]) -> list[Fact]:
        return [None if isinstance(atom, Literal) else known.get(atom) for atom in atoms]

    eqns = []
    made: dict[Var, Sequence[Any]] = {}
    for old in jaxpr.eqns:
        eqn, leaving = _equation(old, facts(old.invars), made)
        eqns.append(eqn)
        if eqn.primitive.name == "concatenate":
            made[eqn.outvars[0]] = eqn.invars
        known.update((var, fact) for var, fact in zip(eqn.outvars, leaving, strict=True) if fact is not None)
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr, facts(jaxpr.outvars)


def _equation(eqn: JaxprEqn, facts: list[Fact], made: Mapping[Var, Sequence[Any]]) -> tuple[JaxprEqn, list[Fact]]:
    """An equation with batches, and what is known of its results; ``made``: what was put together beside it."""
    nothing: list[Fact] = [None] * len(eqn.outvars)
    old = subjaxprs(eqn)
    if not old:
        name = eqn.primitive.name
        if name == "gather" or is_scatter(name):
            return _batched(eqn, facts[1], made), nothing
        return eqn, [_result(eqn, facts)] if len(nothing) == 1 and (any(facts) or name == "iota") else nothing
    read = [_read(body, entering) for body, entering in zip(old, _entering(eqn, facts), strict=True)]
    eqn = around(eqn, [new for new, _ in read])
    if is_inlined(eqn.primitive.name) or is_call(eqn.primitive.name):
        return eqn, read[0][1]
    if eqn.primitive.name == "scan":
        n_carry = eqn.params["num_carry"]
        return eqn, nothing[:n_carry] + [fact and fact.shifted(1) for fact in read[0][1][n_carry:]]
    return eqn, nothing


def _entering(eqn: JaxprEqn, facts: list[Fact]) -> list[list[Fact]]:
    """Per body of an equation what is known of its inputs; nothing is of what a loop carries."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            constant, sliced = params["num_consts"], params["num_consts"] + params["num_carry"]
            return [facts[:constant] + [None] * params["num_carry"] + [fact and fact.shifted(-1) for fact in facts[sliced:]]]
        case "while":
            n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
            carried: list[Fact] = [None] * len(eqn.outvars)
            return [facts[:n_cond] + carried, facts[n_cond : n_cond + n_body] + carried]
        case "cond":
            return [facts[1:]] * len(params["branches"])
    return [[facts[k] for k in called_with(eqn.primitive.name, params, len(facts))]]


def _result(eqn: JaxprEqn, facts: list[Fact]) -> Fact:
    """What is known of the result of an equation without bodies."""
    params, shape = eqn.params, _shape(eqn.outvars[0])
    match eqn.primitive.name, facts:
        case "iota", _:
            return _counting(eqn.outvars[0].aval, params["dimension"])
        case "convert_element_type", [_Counts(dim)]:
            return _counting(eqn.outvars[0].aval, dim)
        case "broadcast_in_dim", [_Counts(dim), *_]:
            to = params["broadcast_dimensions"][dim]
            return _Counts(to) if shape[to] == _shape(eqn.invars[0])[dim] else None
        case "transpose", [_Counts(dim)]:
            return _Counts(params["permutation"].index(dim))
        case "squeeze", [_Counts(dim)] if dim not in params["dimensions"]:
            return _Counts(dim - sum(d < dim for d in params["dimensions"]))
        case "reshape", [_Counts(dim), *_]:
            return _reshaped(_shape(eqn.invars[0]), shape, dim)
        case "concatenate", _ if params["dimension"] == len(shape) - 1:
            return _columns(facts, [_shape(atom)[-1] for atom in eqn.invars], len(shape) - 1)
        case "lt", [_Counts(), None] if isinstance(eqn.invars[1], Literal) and np.all(eqn.invars[1].val <= 0):
            return _False()
        case "select_n", [_False(), chosen, *_]:
            return chosen
        case "copy", [fact]:
            return fact
    return None


def _counting(aval: Any, dim: int) -> Fact:
    """An array that counts, if its type holds all positions."""
    integers = jax.numpy.issubdtype(aval.dtype, np.integer)
    return _Counts(dim) if integers and aval.shape[dim] - 1 <= jax.numpy.iinfo(aval.dtype).max else None


def _reshaped(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> Fact:
    """An array that counts, of which only dimensions of size one came or went."""
    if [n for n in old if n > 1] != [n for n in new if n > 1] or old[dim] == 1:
        return None
    place = sum(n > 1 for n in old[:dim])
    return _Counts([d for d, n in enumerate(new) if n > 1][place])


def _columns(facts: list[Fact], widths: list[int], last: int) -> Fact:
    """The coordinates put together from single ones, and from others."""
    dims: list[int | None] = []
    for fact, width in zip(facts, widths, strict=True):
        match fact:
            case _Columns(several):
                dims += several
            case _Counts(dim) if width == 1 and dim != last:
                dims.append(dim)
            case _:
                dims += [None] * width
    return _Columns(tuple(dims)) if any(dim is not None for dim in dims) else None


def _of_constant(value: Any) -> Fact:
    """What a captured array counts, or that it is false."""
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if dtype is None or not 1 < np.size(value) <= LARGEST:
        return None
    if np.issubdtype(dtype, np.bool_):
        return None if np.any(value) else _False()
    if not jax.numpy.issubdtype(dtype, np.integer):
        return None
    array = np.asarray(value)
    counted = (d for d, n in enumerate(shape) if n > 1 and (array == np.arange(n).reshape([-1] + [1] * (len(shape) - d - 1))).all())
    return next(map(_Counts, counted), None)


def _batched(eqn: JaxprEqn, coordinates: Fact, made: Mapping[Var, Sequence[Any]]) -> JaxprEqn:
    """A gather or scatter without the coordinates that count, but for one that has to stay, and of single elements as said above."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, *updates = eqn.invars
    gathers = eqn.primitive.name == "gather"
    indexed = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    single = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    batching = numbers.start_indices_batching_dims if gathers else numbers.scatter_indices_batching_dims
    batches = dict(zip(numbers.operand_batching_dims, batching, strict=True))
    dropped = []
    counting = coordinates.dims if isinstance(coordinates, _Columns) else (None,) * len(indexed)
    for column, (dim, counted) in enumerate(zip(indexed, counting, strict=True)):
        fits = counted is not None and _shape(operand)[dim] == _shape(indices)[counted] and dim in single
        if fits and counted not in batches.values() and len(dropped) + 1 < len(indexed):
            batches[dim] = counted
            dropped.append(column)
    windows = numbers.offset_dims if gathers else numbers.update_window_dims
    single_elements = bool(batches) and not windows and len(batches) == len(_shape(indices)) - 1
    if not dropped and not single_elements:
        return eqn
    left = tuple(dim for column, dim in enumerate(indexed) if column not in dropped)
    rest, found = tuple(dim for dim in single if dim not in batches), tuple(sorted(batches))
    paired = tuple(batches[dim] for dim in found)
    made_of = lax.GatherDimensionNumbers if gathers else lax.ScatterDimensionNumbers
    numbers = made_of(windows, rest, left, found, paired)

    parts = (indices,) if isinstance(indices, Literal) else made.get(indices, (indices,))
    firsts = np.cumsum([0, *(_shape(part)[-1] for part in parts)])
    kept = [[k - first for k in range(first, end) if k not in dropped] for first, end in pairwise(firsts)]

    def call(operand: Any, *others: Any) -> Any:
        taken = [_taken(part, columns) for part, columns in zip(others, kept, strict=False) if columns]
        indices = taken[0] if len(taken) == 1 else lax.concatenate(taken, taken[0].ndim - 1)
        written = others[len(parts) :]
        if single_elements:
            indices = lax.expand_dims(indices, (len(paired),))
            written = [lax.expand_dims(one, (len(paired),)) for one in written]
        # What was sorted by all coordinates need not be sorted by those that are left.
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        result = eqn.primitive.bind(operand, indices, *written, **params)
        return lax.squeeze(result, (len(paired),)) if single_elements and gathers else result

    return as_call(eqn, call, [operand, *parts, *updates])


def _taken(part: Any, columns: list[int]) -> Any:
    """Some columns of the last dimension, in order."""
    if len(columns) == part.shape[-1]:
        return part
    taken = [lax.slice_in_dim(part, k, k + 1, axis=-1) for k in columns]
    return taken[0] if len(taken) == 1 else lax.concatenate(taken, part.ndim - 1)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape
