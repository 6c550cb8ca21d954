"""Errors, warnings and notes: the rule, what was got, what to do."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import eager_cluster
from programs import PROGRAMS, concrete, mlp

import autoshard
from autoshard.cluster import Cluster
from autoshard.plan.prepared import RESERVE


def test_a_strategy_refuses_another_program():
    """Applied to a different function, the first call says that the strategy is for another program."""
    fn, args = PROGRAMS["mlp"]()
    strategy = autoshard.search(fn, *args, cluster="cpu:8")
    step = strategy.apply(lambda *args: jax.tree.map(lambda x: x * 2, args[0]))
    with pytest.raises(autoshard.StrategyError, match="Search again"):
        step(*concrete(args))


@pytest.mark.parametrize(
    ("options", "error", "pieces"),
    [
        ({"cluster": "v9:8"}, autoshard.ClusterError, ["v9", "v5e"]),
        ({"mesh": {"data": 3}}, autoshard.ClusterError, ["8 devices", "data=3"]),
        ({"mesh": {"data": 0}}, autoshard.ShardingError, ["positive", "0"]),
        ({"mesh": 4}, autoshard.ShardingError, ["1 to 3", "4"]),
        ({"mesh": True}, autoshard.ShardingError, ["1 to 3", "True"]),
        ({"pins": {"nothing*": P("data")}}, autoshard.ShardingError, ["matches none", "state"]),
        ({"pins": {"state['params']*'w']": P("model")}, "mesh": {"data": 8}}, autoshard.ShardingError, ["'model'", "data=8"]),
        ({"pins": {"state['params'][0]['w']": P(None, None, "data")}}, autoshard.ShardingError, ["rank 2"]),
        ({"memory_limit_bytes": 10}, autoshard.InfeasibleError, ["smallest peak", "higher memory limit"]),
        ({"memory_limit_bytes": -1}, autoshard.ShardingError, ["positive number"]),
        ({"memory_limit_bytes": "12GB"}, autoshard.ShardingError, ["'12GB'", "12e9"]),
        ({"cluster": "v5x:4x4"}, autoshard.ClusterError, ["'v5x'", "Did you mean 'v5"]),
        ({"searcher": "magic"}, autoshard.SearcherError, ["magic", "recursive_programming"]),
        ({"searcher": "fsdp"}, autoshard.SearcherError, ["Did you mean 'fully_sharded'?"]),
        ({"searcher": "dynamic"}, autoshard.SearcherError, ["Did you mean 'dynamic_programming'?"]),
        ({"donate_argnums": 9}, autoshard.TraceError, ["donate_argnums", "9"]),
    ],
)
def test_bad_input_is_told(options, error, pieces):
    """Each mistake is one paragraph: the rule, what was got, what to do."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(error) as caught:
        autoshard.search(fn, *args, **{"cluster": "cpu:8", **options})
    message = str(caught.value)
    assert "\n" not in message
    assert all(piece in message for piece in pieces), message


def test_swapped_arguments_are_told():
    """A function that fails while it is traced is told with what each of its parameters got."""

    def step(state, batch):
        return jax.tree.map(jnp.zeros_like, state["params"]), batch["x"].sum()

    args = {"params": {"w": jnp.ones(3)}, "step": 0}, {"x": jnp.ones((4, 2))}
    with pytest.raises(autoshard.TraceError, match=r"KeyError: 'params'. It got state: dict of 'x'; batch: dict of 'params', 'step'\."):
        autoshard.search(step, *reversed(args), cluster="cpu:8")


def test_indivisible_specs_are_told():
    """A spec that does not divide its dimension names the dimension, the axes and what to do."""
    args = (jax.ShapeDtypeStruct((6, 4), jnp.float32),)
    with pytest.raises(autoshard.ShardingError, match=r"dim 0 of x has size 6.*\('data',\) of size 8"):
        autoshard.evaluate(lambda x: x, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=(P("data"),))


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"mesh": "data"}, ["axis sizes by name", "'data'"]),
        ({"mesh": {}}, ["axis sizes by name"]),
        ({"pins": [P()]}, ["pins map argument paths"]),
        ({"pins": {"state*": None}}, ["PartitionSpec", "P()"]),
        ({"donate_argnums": None}, ["donate_argnums"]),
        ({"donate_argnums": True}, ["donate_argnums"]),
    ],
)
def test_options_of_a_wrong_type_are_told(options, pieces):
    """What is no mesh, no pin, no position is refused in words."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(autoshard.AutoshardError) as caught:
        autoshard.search(fn, *args, **{"cluster": "cpu:8", **options})
    assert all(piece in str(caught.value) for piece in pieces), caught.value


def test_arguments_that_do_not_fit_the_function_are_told():
    """A tuple in the place of what is in it, and an argument that is missing, are told as that; the error says what to pass."""
    x = jnp.ones((8, 8))
    for args, advice in (
        (((x, x),), r"and missing a required argument: 'b'. Pass the tuple's elements one by one, as \*args"),
        ((x,), "Pass all"),
    ):
        with pytest.raises(autoshard.TraceError, match=advice):
            autoshard.search(lambda a, b: a @ b, *args, cluster="cpu:8")


def test_another_shape_is_searched_again_with_a_warning():
    """A decorated step that is called with another batch says what it waits for, once."""

    @autoshard.parallelize(cluster="cpu:1", progress=False)
    def scaled(w, batch):
        return batch["x"] @ w

    w = jnp.ones((8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            scaled(w, {"x": jnp.ones((16, 8))})
    with pytest.warns(
        UserWarning, match=r"scaled is searched again for args\[1\]\['x'\] of float32\[4,8\], after float32\[16,8\]"
    ) as caught:
        np.testing.assert_allclose(scaled(w, {"x": jnp.ones((4, 8))}), 8.0 * jnp.ones((4, 8)))
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"after float32\[4,8\]. Weak types are those of arrays made of Python's numbers"):
        scaled(w, {"x": jnp.full((4, 8), 1.0)})
    with pytest.warns(UserWarning, match=r"of bfloat16\[4,8\], after weak float32\[4,8\]. Pass the same dtypes"):
        scaled(w, {"x": jnp.ones((4, 8), jnp.bfloat16)})
    with pytest.warns(UserWarning, match="arguments of another structure"):
        scaled(w, {"x": jnp.ones((4, 8)), "y": jnp.ones(4)})


def test_parallelize_takes_its_options_by_name():
    """A cluster in the function's place is refused at once, with how to write it."""
    with pytest.raises(autoshard.TraceError, match=r"options by name, got 'cpu:8'. Write @parallelize\(cluster='cpu:8'\)"):
        autoshard.parallelize("cpu:8")


def test_what_is_misspelt_is_said_where_the_decorator_stands():
    """A searcher or a cluster that there is not is refused before any call."""
    with pytest.raises(autoshard.SearcherError, match="dynamic_programming"):
        autoshard.parallelize(cluster="cpu:8", searcher="dynamic_program")
    with pytest.raises(autoshard.ClusterError, match="v5e"):
        autoshard.parallelize(cluster="v5x:2x4")


def test_axes_that_shard_nothing_are_told():
    """Where sending costs more than sharing saves, the notes say how many devices would do."""
    strategy = autoshard.search(lambda w, x: jnp.tanh(x @ w), jnp.ones((64, 64)), jnp.ones((16, 64)), cluster="h100:8x4")
    assert any("shards nothing: its devices repeat each other's work, and 1 device would be as fast" in note for note in strategy.notes)


def test_repeated_work_is_told_whatever_else_is_sharded():
    """A vector that is sharded hides no axis whose devices repeat the products; nothing is told of a tenth or less."""

    def product_and_vector(w, x, b):
        return x @ w, b * 2

    w, x, b = jnp.ones((15, 15)), jnp.ones((7, 15)), jnp.ones(1600)
    options = {"cluster": "v5e:4x4", "mesh": {"data": 16}}
    strategy = autoshard.evaluate(product_and_vector, w, x, b, in_specs={"b": P("data")}, **options)
    assert "the 16 devices of mesh axis data all compute the same in 100 % of the work of all products" in strategy.notes
    split = autoshard.evaluate(product_and_vector, w, jnp.ones((16, 15)), b, in_specs={"x": P("data")}, **options)
    assert not any("repeats" in note for note in split.notes)


def test_products_that_an_axis_repeats_say_which_size_does_not_divide():
    """Twelve heads of 63 positions on eight devices: notes name the products, their share of the work and the sizes; on four none do."""

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k))
        return jnp.einsum("hst,thd->shd", weights, v)

    heads = jax.ShapeDtypeStruct((63, 12, 5), jnp.float32)
    on_eight, on_four = (
        autoshard.search(attention, heads, heads, heads, cluster=eager_cluster(f"cpu:{n}"), mesh={"a": n}, padding=False) for n in (8, 4)
    )
    told = [note for note in on_eight.notes if "does not split dot_general at" in note]
    assert len(told) == 2 and all("50 % of the work of all products: 5 and 12 and 63 do not divide by 8" in note for note in told)
    assert not any("does not split" in note for note in on_four.notes)


def test_donated_arguments_are_not_taken_twice():
    """What an earlier call used up is told by its path, where jaxlib would crash."""

    @autoshard.parallelize(cluster="cpu:8", donate_argnums=0, progress=False)
    def step(state, x):
        return {"w": state["w"] + x.T @ x}

    state, x = {"w": jnp.ones((64, 64))}, jnp.ones((512, 64))
    kept = step(state, x)
    step(kept, x)
    with pytest.raises(autoshard.StrategyError, match=r"state\['w'\] was passed to an earlier one"):
        step(kept, x)


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["data_parallel", "dynamic_programming", "auto"])
def test_a_search_leaves_a_reserve_where_it_can(searcher):
    """What takes all of a device's memory, as near as that is predicted, is returned where nothing smaller is there, and says so."""
    fn, args = mlp()
    options = {"searcher": searcher, "mesh": {"data": 8}}
    free = autoshard.search(fn, *args, cluster="cpu:8", **options)
    smallest = autoshard.search(fn, *args, cluster="cpu:8", **options | {"searcher": "fully_sharded"})
    least = min(found.cost.peak_bytes for found in (free, smallest)) if searcher != "data_parallel" else free.cost.peak_bytes

    def searched(of_least):
        cluster = dataclasses.replace(Cluster.parse("cpu:8"), memory_limit_bytes=int(least * of_least))
        return autoshard.search(fn, *args, cluster=cluster, **options)

    def warned(strategy):
        return any("ask the compiler" in note for note in strategy.notes)

    assert not warned(free) and not warned(searched(1.03))
    barely = searched(1.01)
    assert warned(barely) == (barely.cost.peak_bytes > least * 1.01 * (1 - RESERVE)) and barely.cost.peak_bytes <= least * 1.01
    assert warned(barely) or searcher != "data_parallel"  # of which there is but one
    with pytest.raises(autoshard.InfeasibleError):
        searched(0.25)
    asked = autoshard.search(fn, *args, cluster="cpu:8", memory_limit_bytes=int(least * 1.01), **options)
    assert not warned(asked) and asked.cost.peak_bytes <= least * 1.01
