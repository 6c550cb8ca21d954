"""Programs with padded dimensions next to the same without, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import concrete

from autoshard.ir import Graph
from autoshard.ir.rewrites import Padded, PaddedDim
from autoshard.rewrite.extents import Extents, extent, padded_shape, resized
from autoshard.rewrite.padding_choice import arguments_of
from autoshard.rewrite.padding_plan import Links, Plan, plan_padding
from autoshard.rewrite.padding_program import padded_program
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt, trace


def garbage(shape: tuple[int, ...], dtype: Any) -> Any:
    """What is in the padding of arguments: NaN, true, or large positions."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.full(shape, np.nan, dtype)
    return np.ones(shape, dtype) if jnp.issubdtype(dtype, jnp.bool_) else np.full(shape, min(99, jnp.iinfo(dtype).max), dtype)


def with_garbage(x: Any, of: Extents) -> Any:
    if not any(of):
        return x
    inside = resized(np.ones(x.shape, bool), ((),) * x.ndim, of)
    return jnp.where(inside, resized(x, ((),) * x.ndim, of), garbage(inside.shape, x.dtype))


def padded(traced: Traced, given: Mapping[tuple[int, int], Any]) -> tuple[Traced, Plan]:
    """The program with these dimensions padded; all results in their own sizes but those that replace arguments."""
    graph = traced.graph
    plan = plan_padding(graph, rules_of(graph), given)
    results = [((),) * graph.values[value].rank for value in graph.results]
    for result, argument in graph.aliases:
        results[result] = plan.of(graph.arguments[argument])
    return rebuilt(traced, padded_program(traced.jaxpr, plan, results)), plan


def check_padding(
    fn: Callable,
    *args: Any,
    by: Mapping[str, Mapping[int, Any]] | random.Random,
    arrays: Any = None,
    tolerance: float = 1e-3,
    axis_names: tuple[str, ...] = (),
) -> tuple[Traced, Plan]:
    """Compares results with and without padding.

    Args:
        by: per argument path and dimension its extent, or its padded size; or how to choose some.

    Returns:
        The padded program, and its plan.
    """
    traced = trace(fn, *args, axis_names=axis_names)
    graph = traced.graph
    given: dict[tuple[int, int], Any] = {}
    if isinstance(by, random.Random):
        given = some_dims(graph, by)
    else:
        for path, dims in by.items():
            value = graph.arguments[graph.argument_paths.index(path)]
            for dim, of in dims.items():
                n = graph.values[value].shape[dim]
                given[value, dim] = ((n, of),) if isinstance(of, int) else extent(of)
    new, plan = padded(traced, given)
    leaves = jax.tree.leaves(concrete(args) if arrays is None else arrays)
    wanted = jax.jit(jax.extend.core.jaxpr_as_fun(traced.jaxpr))(*leaves)
    got = jax.jit(jax.extend.core.jaxpr_as_fun(new.jaxpr))(
        *(with_garbage(x, plan.of(value)) for x, value in zip(leaves, graph.arguments, strict=True))
    )
    replaced = dict(graph.aliases)
    for k, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if k in replaced:
            of = plan.of(graph.arguments[replaced[k]])
            assert b.shape == padded_shape(a.shape, of)
            b = resized(b, of, ((),) * b.ndim)
        same(k, a, b, tolerance)
    return new, plan


def some_dims(graph: Graph, rng: random.Random) -> dict[tuple[int, int], Any]:
    """Random dimensions of a program, with extents: most are padded at their end."""
    given: dict[tuple[int, int], Any] = {}
    places = [(v, d) for v in range(len(graph.values)) for d, n in enumerate(graph.values[v].shape) if n > 1]
    for value, dim in rng.sample(places, min(len(places), rng.randint(1, 3))):
        n = graph.values[value].shape[dim]
        divisors = [k for k in range(1, n) if n % k == 0]
        minor = rng.choice(divisors) if rng.random() < 0.3 else 1
        major = rng.choice([k for k in range(1, n // minor) if (n // minor) % k == 0] or [1]) if rng.random() < 0.2 else 1
        middle = n // minor // major
        given[value, dim] = extent([(major, major), (middle, middle + rng.randint(1, 4)), (minor, minor)])
    return given


def same(k: int, a: Any, b: Any, tolerance: float) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, (k, a.shape, b.shape)
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        assert np.array_equal(a, b), (k, a, b)
        return
    wide = np.complex128 if np.issubdtype(a.dtype, np.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    scale = np.abs(a).max(initial=0.0, where=np.isfinite(a))
    np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * scale + 1e-6, equal_nan=True, err_msg=f"result {k}")


def everywhere(traced: Traced, devices: int, least: int = 2) -> Padded:
    """Padding of all dimensions of arguments that the devices do not divide, of some size at least, and of what belongs to them."""
    graph, dims, seen = traced.graph, [], set()
    links = Links(graph, rules_of(graph))
    for value in graph.arguments:
        for dim, size in enumerate(graph.values[value].shape):
            if size % devices and size >= least and (value, dim) not in seen:
                of = ((size, -(-size // devices) * devices),)
                dims.append(PaddedDim(value, dim, of, f"dimension {dim} of value {value}", devices))
                alike = links.spread({(value, dim): of})
                seen |= {(other, d) for other, extents in alike.items() for d, each in enumerate(extents) if each}
    extents = links.spread({(each.value, each.dim): each.extent for each in dims})
    return Padded(tuple(dims), arguments_of(graph, extents))
