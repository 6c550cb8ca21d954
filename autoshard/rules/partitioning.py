"""The rule of a function that partitions itself: that which its author gave to `jax.experimental.custom_partitioning`.

A factor is split where the author's ``partition`` agrees: told that the factor is sharded, and nothing else, it asks for the operands and
returns the results as the rule says. So a rule that leaves to the callback which operands have to be sharded alike, as that of JAX's cuDNN
attention does, splits nothing here. A reduction stays whole, since the callback's function sums by itself; so does a permutation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import assemble, rule

BATCHING = "…"
"""How JAX writes leading dimensions without names."""

Shapes = Sequence[jax.ShapeDtypeStruct]


@rule("custom_partitioning")
def declared(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule | None:
    """The author's rule, ``"b q d, b k d -> b q d"`` as ``([b, q, d], [b, k, d])->([b, q, d])``; None without one."""
    if (given := getattr(params["partition"], "declared", None)) is not None:
        return given.rule([v.shape for v in operands], [v.shape for v in results], *[v.dtype for v in results[:1]])
    call = params["call"]
    if call not in _FOUND:
        _FOUND[call] = _authored(params)
    return _FOUND[call]


_FOUND: WeakKeyDictionary[Any, Rule | None] = WeakKeyDictionary()
"""By the traced function of a call its author's rule, since a callback may take long."""


def _authored(params: Mapping[str, Any]) -> Rule | None:
    """The author's rule, as far as his callback agrees."""
    call = params["call"]
    shapes = [[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in side] for side in (call.in_avals, call.out_avals)]
    if (given := _given(params, *shapes)) is None:
        return None
    named = [
        [_named(dims, len(shape.shape)) for dims, shape in zip(side, some, strict=True)]
        for side, some in zip((given.operand_mappings, given.result_mappings), shapes, strict=True)
    ]
    sizes: dict[str, int] = dict(given.factor_sizes)
    for dims, shape in zip(itertools.chain(*named), itertools.chain(*shapes), strict=True):
        sizes |= {dim[0]: size for dim, size in zip(dims, shape.shape, strict=True) if len(dim) == 1}
    whole = {*given.reduction_factors, *given.need_replication_factors, *given.permutation_factors}
    whole |= {name for dims in itertools.chain(*named) for dim in dims for name in dim[1:]}  # the callback is asked of one axis at a time
    whole |= {name for name in sizes.keys() - whole if not _agrees(name, sizes[name], named, shapes, params)}
    factors = {name: Factor(size, "need_replication" if name in whole else "pass_through") for name, size in sizes.items()}
    return assemble(*([[tuple(factors[name] for name in dim) for dim in dims] for dims in side] for side in named))


def splits(params: Mapping[str, Any]) -> bool:
    """Whether an author's rule splits anything, or is one that the user declared, which holds in any case."""
    if hasattr(params["partition"], "declared"):
        return True
    call = params["call"]
    operands, results = ([Value(tuple(aval.shape), "", 1) for aval in side] for side in (call.in_avals, call.out_avals))
    found = declared(*operands, results=tuple(results), **params)
    return found is not None and any(factor.shardable for factor in found.factors)


def partitioned(params: Mapping[str, Any], mesh: AbstractMesh, operands: Shapes, results: Shapes) -> tuple[Any, list[PartitionSpec]]:
    """The author's function of one device's shards, and the specs of the operands that it asks for and of the results that it returns.

    Args:
        operands, results: the whole arrays, with their shardings.
    """
    asked = params["partition"](*params["static_args"], mesh, params["in_tree"].unflatten(operands), params["out_tree"].unflatten(results))
    _, function, made, read = asked
    specs = [each.spec for tree in (read, made) for each in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NamedSharding))]
    return function, specs


def _given(params: Mapping[str, Any], operands: Shapes, results: Shapes) -> Any:
    """The author's rule as JAX's record of it; None without one, or where its function wants more than shapes."""
    found, options = params["sharding_rule"], {}
    if not callable(found):
        return found
    try:
        found = found(*params["static_args"], None, operands, results)
        if isinstance(found, list | tuple) and len(found) == 2:
            found, options = found
        if isinstance(found, str):
            reader = custom_partitioning(lambda: None)
            reader.def_partition(partition=None, sharding_rule=found, **options)
            return reader.sharding_rule
    except Exception:  # the author's own function may raise anything
        return None
    return found


def _named(dims: Sequence[Any], rank: int) -> list[tuple[str, ...]]:
    """The names of the factors of each dimension; leading dimensions without names get those of their group."""
    first = dims[0] if dims and isinstance(dims[0], str) and dims[0].startswith(BATCHING) else None
    rest = [dim if isinstance(dim, tuple) else (dim,) for dim in dims[first is not None :]]
    return [*((f"{first.removeprefix(BATCHING) or 0} {k}",) for k in range(rank - len(rest)) if first is not None), *rest]


def _agrees(name: str, size: int, named: Sequence[Any], shapes: Sequence[Shapes], params: Mapping[str, Any]) -> bool:
    """Whether the author's callback, told that a factor alone is sharded, has it so in all operands and results that have it."""
    parts = next((n for n in range(2, size + 1) if size % n == 0), 1)
    mesh = AbstractMesh((parts,), ("axis",), axis_types=(AxisType.Auto,))
    specs = [[PartitionSpec(*("axis" if name in dim else None for dim in dims)) for dims in side] for side in named]
    told = [
        [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)) for shape, spec in zip(some, side, strict=True)]
        for some, side in zip(shapes, specs, strict=True)
    ]
    try:
        _, asked = partitioned(params, mesh, *told)
    except Exception:  # the author's own function may raise anything: it does not partition so
        return False
    return [*map(_plain, asked)] == [_plain(spec) for side in specs for spec in side]


def _plain(spec: PartitionSpec) -> tuple:
    """A spec without dimensions at its end that are not sharded."""
    dims = [*spec]
    while dims and dims[-1] in (None, ()):
        dims.pop()
    return tuple(dims)
