"""Collectives compute what numpy computes of the shards of a group, on every mesh and group, and have its derivatives."""

from __future__ import annotations

import doctest
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P, lax
from jax.sharding import Mesh

import autoshard
from autoshard import ShardingError, collectives
from autoshard.collectives import (
    REDUCTIONS,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    halo_exchange,
    neighbor_exchange,
    reduce_scatter,
)

LOCAL = (24, 24)  # the shape of a device's shard: the size of every group divides both


@dataclass(frozen=True)
class Group:
    """A mesh, and the axes along which its devices communicate."""

    sizes: dict[str, int]
    axes: Any

    def __str__(self) -> str:
        return f"{self.axes} of {self.sizes}"

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    def computed(self, of_group: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
        """Every device's result, given every device's shard, by a function from a group's shards, (n, *LOCAL), to its results."""
        names, group = list(self.sizes), [self.axes] if isinstance(self.axes, str) else list(self.axes)
        order = [names.index(name) for name in [*group, *(name for name in names if name not in group)]]
        n = math.prod(self.sizes[name] for name in group)
        groups = np.arange(len(x)).reshape(*self.sizes.values()).transpose(order).reshape(n, -1).T
        results = {device: result for ranks in groups for device, result in zip(ranks.tolist(), of_group(x[ranks]), strict=True)}
        return np.stack([results[device] for device in range(len(x))])


# All of a mesh; several axes, in the mesh's order or not, or apart from each other; and sizes that are no power of 2.
SOME = Group({"a": 2, "b": 2, "c": 2}, ("c", "a"))
GROUPS = (Group({"x": 8}, "x"), Group({"a": 2, "b": 4}, ("b", "a")), SOME, Group({"a": 3, "b": 2}, "a"))


def mesh_of(**sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values()), tuple(sizes))


def everywhere(x: np.ndarray, n: int) -> np.ndarray:
    return np.stack([x] * n)


def shifted(g: np.ndarray, by: int, periodic: bool) -> np.ndarray:
    """What each rank receives from `by` ranks before."""
    return np.stack([g[(rank - by) % len(g)] * (periodic or 0 <= rank - by < len(g)) for rank in range(len(g))])


def padded(g: np.ndarray, dim: int, widths: tuple[int, int], **pad: Any) -> np.ndarray:
    """Each rank's part of the whole, with its borders."""
    whole = np.pad(np.concatenate(list(g), dim), [widths if d == dim else (0, 0) for d in (0, 1)], **pad)
    size = LOCAL[dim]
    return np.stack([whole.take(range(rank * size, (rank + 1) * size + sum(widths)), dim) for rank in range(len(g))])


# By name, what a device calls with its shard and the axes, and what numpy computes of all shards of a group.
CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "all_reduce sum": (all_reduce, lambda g: everywhere(g.sum(0), len(g))),
    "all_reduce mean": (lambda x, axes: all_reduce(x, axes, "mean"), lambda g: everywhere(g.mean(0), len(g))),
    "all_reduce max": (lambda x, axes: all_reduce(x, axes, "max"), lambda g: everywhere(g.max(0), len(g))),
    "all_reduce min": (lambda x, axes: all_reduce(x, axes, "min"), lambda g: everywhere(g.min(0), len(g))),
    "all_reduce prod": (lambda x, axes: all_reduce(x, axes, "prod"), lambda g: everywhere(g.prod(0), len(g))),
    "all_gather 0": (all_gather, lambda g: everywhere(np.concatenate(list(g), 0), len(g))),
    "all_gather -1": (lambda x, axes: all_gather(x, axes, -1), lambda g: everywhere(np.concatenate(list(g), -1), len(g))),
    "reduce_scatter sum 0": (reduce_scatter, lambda g: np.stack(np.split(g.sum(0), len(g)))),
    "reduce_scatter mean -1": (lambda x, axes: reduce_scatter(x, axes, "mean", -1), lambda g: np.stack(np.split(g.mean(0), len(g), -1))),
    "reduce_scatter max 0": (lambda x, axes: reduce_scatter(x, axes, "max"), lambda g: np.stack(np.split(g.max(0), len(g)))),
    "reduce_scatter min 1": (lambda x, axes: reduce_scatter(x, axes, "min", 1), lambda g: np.stack(np.split(g.min(0), len(g), 1))),
    "reduce_scatter prod 1": (lambda x, axes: reduce_scatter(x, axes, "prod", 1), lambda g: np.stack(np.split(g.prod(0), len(g), 1))),
    "broadcast": (lambda x, axes: broadcast(x, axes, lax.axis_size(axes) - 1), lambda g: everywhere(g[-1], len(g))),
    "all_to_all 0 1": (
        lambda x, axes: all_to_all(x, axes, 0, 1),
        lambda g: np.stack([np.concatenate([np.split(x, len(g), 0)[rank] for x in g], 1) for rank in range(len(g))]),
    ),
    "all_to_all 1 1": (
        lambda x, axes: all_to_all(x, axes, 1, -1),
        lambda g: np.stack([np.concatenate([np.split(x, len(g), 1)[rank] for x in g], 1) for rank in range(len(g))]),
    ),
    "neighbor_exchange 1": (lambda x, axes: neighbor_exchange([x], axes, [1])[0], lambda g: shifted(g, 1, False)),
    "neighbor_exchange -2 periodic": (
        lambda x, axes: neighbor_exchange([x], axes, [-2], periodic=True)[0],
        lambda g: shifted(g, -2, True),
    ),
    "halo_exchange 0 periodic": (
        lambda x, axes: halo_exchange(x, axes, (1, 2), periodic=True),
        lambda g: padded(g, 0, (1, 2), mode="wrap"),
    ),
    "halo_exchange 1 filled": (
        lambda x, axes: halo_exchange(x, axes, (2, 1), -1, fill=3),
        lambda g: padded(g, 1, (2, 1), constant_values=3),
    ),
}


@cache
def shards(devices: int) -> np.ndarray:
    """Every device's shard: numbers from 1 to 2, of which no two are equal."""
    size = devices * LOCAL[0] * LOCAL[1]
    return 1 + np.random.default_rng(0).permutation(size).reshape(devices, *LOCAL) / size


def stacked(call: Callable[[Any, Any], Any], group: Group, check_vma: bool) -> Callable[[Any], Any]:
    """The function from every device's shard to every device's result."""
    mesh, spec = mesh_of(**group.sizes), P(tuple(group.sizes))
    return jax.shard_map(lambda x: call(x[0], group.axes)[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


@cache
def values(group: int) -> dict[str, Any]:
    functions = {name: stacked(call, GROUPS[group], True) for name, (call, _) in CASES.items()}
    return jax.jit(lambda x: {name: f(x) for name, f in functions.items()})(shards(GROUPS[group].devices).astype(np.float32))


@cache
def gradients(check_vma: bool) -> dict[str, Any]:
    """For each case the gradient of the sum of its squared values, on `SOME`."""
    functions = {name: stacked(call, SOME, check_vma) for name, (call, _) in CASES.items()}
    all_of_them = jax.jit(lambda x: {name: jax.grad(lambda x, f=f: jnp.square(f(x)).sum())(x) for name, f in functions.items()})
    return all_of_them(shards(SOME.devices).astype(np.float32))


@pytest.mark.sample(8)
@pytest.mark.parametrize("group", range(len(GROUPS)), ids=lambda group: str(GROUPS[group]))
@pytest.mark.parametrize("name", CASES)
def test_each_device_has_its_part_of_what_numpy_computes(name, group):
    """Devices of a group communicate in order of rank, whatever the order of the axes, and with no others."""
    x = shards(GROUPS[group].devices)
    np.testing.assert_allclose(values(group)[name], GROUPS[group].computed(CASES[name][1], x), rtol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_the_plain_function_s(name, check_vma):
    """Along random directions it is the derivative of the function that numpy computes on one device, by central differences."""
    x, gradient = shards(SOME.devices), np.asarray(gradients(check_vma)[name], np.float64)

    def loss(x: np.ndarray) -> float:
        return np.square(SOME.computed(CASES[name][1], x)).sum()

    for direction in np.random.default_rng(1).normal(size=(8, *x.shape)):
        direction *= 1e-6
        difference = (loss(x + direction) - loss(x - direction)) / 2
        assert abs((gradient * direction).sum() - difference) <= 1e-4 * np.linalg.norm(gradient) * np.linalg.norm(direction)


X = P("x")


def on_line(call: Callable[..., Any], *args: Any, out: Any = X, check_vma: bool = True) -> Any:
    """The results of a function of shards on a mesh of one axis."""
    return jax.jit(jax.shard_map(call, mesh=mesh_of(x=8), in_specs=X, out_specs=out, check_vma=check_vma))(*args)


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_gradient_of_an_extreme_is_divided_among_equals(op):
    """As that of jnp.max is; with and without check_vma."""
    x = np.array([1.0, 2, 2, 1, 1, 2, 1, 1], np.float32)
    expected = jax.grad(lambda x: getattr(jnp, op)(x))(x)
    for check_vma in (True, False):
        extreme = jax.shard_map(lambda x: all_reduce(x, "x", op), mesh=mesh_of(x=8), in_specs=P("x"), out_specs=P(), check_vma=check_vma)
        np.testing.assert_allclose(jax.grad(lambda x, extreme=extreme: extreme(x).sum())(x), expected)


def test_the_gradient_of_a_product_with_a_zero_is_that_of_numpy():
    """The product of the others, where dividing the whole product by the element would not do."""
    x = np.array([1.0, 2, 0, 3, 1, 1, 1, 1], np.float32)
    product = jax.shard_map(lambda x: all_reduce(x, "x", "prod"), mesh=mesh_of(x=8), in_specs=P("x"), out_specs=P())
    np.testing.assert_allclose(jax.grad(lambda x: product(x).sum())(x), [0, 0, 6, 0, 0, 0, 0, 0])


def test_a_gradient_inside_shard_map_is_each_device_s_own_or_the_whole_s():
    """With check_vma that of the replicated loss; without, that of the sum of all devices' losses, as the module says."""
    x = np.arange(1.0, 9.0, dtype=np.float32)
    for op, expected in (("sum", np.ones(8)), ("mean", np.full(8, 1 / 8)), ("max", x == 8)):
        inside = jax.grad(lambda x, op=op: all_reduce(x, "x", op).sum())
        np.testing.assert_allclose(on_line(inside, x), expected)
        np.testing.assert_allclose(on_line(inside, x, check_vma=False), 8 * expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.bool_, np.int32, jnp.bfloat16])
def test_types_are_those_of_jax_numpy(op, dtype):
    """Booleans are counted, means are floats, and the scattered result has the type of the whole."""
    x = (np.arange(64) % 3).astype(dtype)
    expected = getattr(jnp, op)(x.reshape(8, 8), 0)
    found = on_line(lambda x: (all_reduce(x, "x", op), reduce_scatter(x, "x", op)), x, out=(P(), P("x")))
    for each in found:
        assert each.dtype == expected.dtype
        np.testing.assert_array_equal(each, expected)


def test_trees_are_reduced_leaf_by_leaf():
    """Gradients are a tree, and python numbers are arrays."""
    found = on_line(lambda x: all_reduce({"a": x, "b": (x + 1, 2.0)}, "x"), np.arange(8), out=P())
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found) == {"a": [28], "b": ([36], 16.0)}


def test_what_is_empty_keeps_its_shape():
    """XLA refuses some collectives of empty arrays, which are computed without."""
    x = np.zeros((64, 0), np.int8)
    each = {
        "all_gather": (lambda x: all_gather(x, "x", 1), (8, 0)),
        "reduce_scatter": (lambda x: reduce_scatter(x, "x", "sum", 1), (8, 0)),
        "all_to_all": (lambda x: all_to_all(x, "x", 0, 1), (1, 0)),
        "halo_exchange": (lambda x: halo_exchange(x, "x", (1, 1)), (10, 0)),
    }
    for call, shape in each.values():
        found = on_line(call, x)
        assert (found.shape, found.dtype) == ((8 * shape[0], shape[1]), np.int8)


def test_neighbours_on_a_grid_and_by_rank():
    """Steps go along each axis, a table goes by rank, and parts may have different shapes."""
    axes = ("rows", "columns")

    def received(x: Any) -> Any:
        below, diagonal, swapped = neighbor_exchange([x, jnp.stack([x, -x]), x], axes, [(1, 0), (-1, 1), {0: 5, 5: 0}])
        (around,) = neighbor_exchange([x], axes, [(-1, 1)], periodic=True)
        return below, diagonal, swapped, around

    out = (P(axes), P(None, axes), P(axes), P(axes))
    run = jax.jit(jax.shard_map(received, mesh=mesh_of(rows=2, columns=4), in_specs=P(axes), out_specs=out))
    below, diagonal, swapped, around = (each.tolist() for each in run(np.arange(1, 9)))
    assert below == [0, 0, 0, 0, 1, 2, 3, 4]
    assert diagonal == [[0, 5, 6, 7, 0, 0, 0, 0], [0, -5, -6, -7, 0, 0, 0, 0]]
    assert swapped == [6, 0, 0, 0, 0, 1, 0, 0]
    assert around == [8, 5, 6, 7, 4, 1, 2, 3]


@settings(max_examples=8)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    grid=st.sampled_from([(2, 4), (3, 2), (1, 3), (8, 1)]),
    data=st.data(),
    periodic=st.booleans(),
)
def test_halos_in_two_dimensions_are_a_padded_array_s(sizes, grid, data, periodic):
    """Every device has its window of the whole array padded by numpy: corners, ends, and widths of 0 to the shard's size."""
    widths = [data.draw(st.tuples(st.integers(0, size), st.integers(0, size))) for size in sizes]
    whole = np.arange(math.prod(sizes) * math.prod(grid)).reshape(sizes[0] * grid[0], -1)
    around = np.pad(whole, widths, mode="wrap") if periodic else np.pad(whole, widths, constant_values=-1)
    (height, width), (m, n) = (np.add(sizes, np.sum(widths, 1)).tolist()), sizes
    expected = np.block([[around[i * m : i * m + height, j * n : j * n + width] for j in range(grid[1])] for i in range(grid[0])])
    call = partial(halo_exchange, axes=("i", "j"), widths=widths, dim=(0, 1), periodic=periodic, fill=-1)
    run = jax.shard_map(call, mesh=mesh_of(i=grid[0], j=grid[1]), in_specs=P("i", "j"), out_specs=P("i", "j"))
    np.testing.assert_array_equal(jax.jit(run)(whole), expected)


WRONG = {
    "no axis": (lambda x: all_reduce(x, ()), "several different ones: got ()"),
    "an axis twice": (lambda x: all_reduce(x, ("x", "x")), "several different ones: got ('x', 'x')"),
    "unknown axis": (lambda x: all_gather(x, "model"), "got ('model',), and mapped are ('x',). Use these"),
    "unknown reduction": (lambda x: all_reduce(x, "x", "median"), "one of sum, mean, max, min, prod: got 'median'"),
    "unknown scattered reduction": (lambda x: reduce_scatter(x, "x", "median"), "got 'median'"),
    "no such dim": (lambda x: all_gather(x, "x", 2), "from -2 to 1 for an array of shape (12, 3): got 2"),
    "uneven scatter": (lambda x: reduce_scatter(x, "x"), "8 devices along ('x',): got size 12 for dim 0 of shape (12, 3). Pad it"),
    "uneven all_to_all": (lambda x: all_to_all(x, "x", 1, 0), "got size 3 for dim 1 of shape (12, 3). Pad it to a multiple of 8"),
    "no such root": (lambda x: broadcast(x, "x", 8), "got root 8 for axes ('x',), whose ranks are 0 to 7"),
    "targets missing": (lambda x: neighbor_exchange([x, x], "x", [1]), "got 2 parts and 1 targets"),
    "no such rank": (lambda x: neighbor_exchange([x], "x", [{0: 8}]), "ranks are 0 to 7 along ('x',): got {0: 8}"),
    "two senders": (lambda x: neighbor_exchange([x], "x", [{0: 1, 2: 1}]), "from one rank at most"),
    "steps missing": (lambda x: neighbor_exchange([x], "x", [(1, 0)]), "a step for each of the axes ('x',), or is one int: got (1, 0)"),
    "wide halo": (lambda x: halo_exchange(x, "x", (0, 13)), "from 0 to the shard's size: got (0, 13) for dim 0 of shape (12, 3)"),
    "negative halo": (lambda x: halo_exchange(x, "x", (-1, 1)), "got (-1, 1)"),
    "halo widths missing": (lambda x: halo_exchange(x, ("x",), [(1, 1)], dim=(0, 1)), "an entry for each: got dims (0, 1)"),
    "halo along a dim twice": (lambda x: halo_exchange(x, ("x", "x"), [(1, 1)] * 2, dim=(1, -1)), "along each dim once: got dims (1, -1)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_says_the_rule_and_what_was_got(name):
    """Before JAX or XLA fails with words of their own."""
    call, words = WRONG[name]
    with pytest.raises(ShardingError, match=re.escape(words)):
        jax.eval_shape(jax.shard_map(call, mesh=mesh_of(x=8), in_specs=P("x"), out_specs=P("x")), np.zeros((96, 3)))


def test_outside_shard_map_there_is_nobody_to_communicate_with():
    """The error says where collectives are called."""
    with pytest.raises(ShardingError, match=r"inside jax\.shard_map.*got \('data',\), and mapped are none\. Call it in"):
        all_reduce(np.ones(8), "data")


def test_an_axis_that_shard_map_leaves_to_the_compiler_is_not_mapped():
    """With axis_names of a part of the mesh, collectives go over that part."""
    over_b = jax.shard_map(lambda x: all_reduce(x, "b"), mesh=mesh_of(a=2, b=4), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    with pytest.raises(ShardingError, match=r"mapped are \('a',\)"):
        jax.eval_shape(over_b, np.ones(8))


def test_the_examples_in_the_docstrings_hold():
    """They run on 8 devices."""
    assert doctest.testmod(collectives).failed == 0 and jax.device_count() == 8


@cache
def page() -> SimpleNamespace:
    """The Python of the page on manual communication, run as it stands."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "manual.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)), names)
    return SimpleNamespace(**names)


def trained(step: Any) -> list[float]:
    """The losses of three steps on digits of noise."""
    random = np.random.default_rng(0)
    weights, images, labels = page().init(0), random.normal(size=(32, 28 * 28)).astype(np.float32), random.integers(10, size=32)
    losses = []
    for _ in range(3):
        weights, loss = step(weights, images, labels)
        losses.append(float(loss))
    return losses


def test_the_page_s_manual_step_trains_as_one_device_does_and_as_parallelize_does():
    """The losses of the step with all_reduce written by hand, of the plain one, and of the searched one."""
    expected = trained(jax.jit(page().train_step))
    assert expected[0] > expected[1] > expected[2]
    np.testing.assert_allclose(trained(page().manual_step), expected, rtol=1e-5)
    np.testing.assert_allclose(trained(page().found_step), expected, rtol=1e-5)
    assert isinstance(page().found_step.strategy, autoshard.Strategy)


def test_the_page_s_other_ways_train_the_same():
    """Without check_vma no pcast is needed, nor where the loss is reduced before it is differentiated; where it is, forgetting it shows."""
    here, sharding = page(), {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}

    def averaged(weights: Any, *batch: Any) -> Any:
        value, gradients = all_reduce(jax.value_and_grad(here.loss)(weights, *batch), "data", "mean")
        return here.updated(weights, gradients), value

    def reduced_first(weights: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda w: all_reduce(here.loss(w, *batch), "data", "mean"))(weights)
        return here.updated(weights, gradients), value

    expected = trained(jax.jit(here.train_step))
    np.testing.assert_allclose(trained(jax.jit(jax.shard_map(averaged, mesh=here.mesh, check_vma=False, **sharding))), expected, rtol=1e-5)
    np.testing.assert_allclose(trained(jax.jit(jax.shard_map(reduced_first, mesh=here.mesh, **sharding))), expected, rtol=1e-5)
    assert abs(trained(jax.jit(jax.shard_map(averaged, mesh=here.mesh, **sharding)))[1] - expected[1]) > 1e-2


def test_the_page_s_stencil_is_that_of_the_whole_image():
    """Each pixel's mean over its neighbours, across the borders of shards."""
    image = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    around = np.pad(image, 1)
    expected = sum(around[i : i + 16, j : j + 32] for i in range(3) for j in range(3)) / 9
    np.testing.assert_allclose(page().smoothed(image), expected, rtol=1e-4, atol=1e-6)
