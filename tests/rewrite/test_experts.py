"""Packed rows of experts: every row has one slot, results are equal whatever the loads, and the search splits experts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from programs import abstract, concrete

import autoshard
from autoshard.errors import ShardingError, TraceError
from autoshard.ir.rewrites import Microbatches, PackedExperts, Recompute, from_json, to_json
from autoshard.lower import ops_by_path
from autoshard.reader import Node
from autoshard.recompute.flat import flat
from autoshard.rewrite import applied, rewritten
from autoshard.rewrite.packed import is_packable
from autoshard.rewrite.region import Step, regions_of
from autoshard.rewrite.slots import Slots
from autoshard.rules import rules_of
from autoshard.trace import trace

EXPERTS, ROWS, WIDTH, HIDDEN = 4, 12, 8, 16


@pytest.mark.sample(4)
@pytest.mark.parametrize("sizes", ([4, 4, 4], [0, 13, 0], [5, 0, 1], [0, 0, 0]))
@pytest.mark.parametrize("capacity", (1, 3, 16))
def test_every_row_has_one_slot_of_its_expert_in_one_round(sizes, capacity):
    """Each row is in one slot of one round, and as long as there are rows of experts in a round, it is one of its own expert."""
    rows, ends, seen = 13, np.cumsum(sizes), []
    first = Slots(jnp.array(sizes, jnp.int32), rows, capacity)
    for number in range(int(first.rounds)):
        slots = Slots(first.sizes, rows, capacity, jnp.int32(number))
        index, slot = np.asarray(slots.index), np.asarray(slots.slot)
        for place, row in enumerate(index.flat):
            if row == rows:
                continue
            expert = place // capacity
            assert slot[row] == place
            assert row >= ends[-1] if slots.is_over else ends[expert] - sizes[expert] <= row < ends[expert]
            seen.append(row)
        assert (slot < index.size).sum() == (index < rows).sum()
        if number == 0 and not slots.is_over:
            assert (np.asarray(first.index) == index).all() and (np.asarray(first.slot) == slot).all()
    assert sorted(seen) == list(range(rows))


def sorted_by(expert):
    return jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)


def scattered(p, x, expert):
    """Tokens that are added up where they came from, with a bias of each expert."""
    order, sizes = sorted_by(expert)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], sizes))
    return jnp.zeros_like(x).at[order].add(jax.lax.ragged_dot(hidden, p["down"], sizes) + p["bias"][expert[order]])


def looked_up(p, x, expert):
    """Two experts a token, whose results are looked up."""
    order, sizes = sorted_by(jnp.concatenate([expert, (expert + 1) % EXPERTS]))
    made = jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x[order % ROWS], p["up"], sizes)), p["down"], sizes)
    return made[jnp.argsort(order)].reshape(2, ROWS, WIDTH).sum(0)


def between(p, x, expert):
    """Rows that are normalised, which is 0/0 where a slot has none, and multiplied by weights of all experts; they stay sorted."""
    order, sizes = sorted_by(expert)
    rows = x[order] @ p["common"]
    rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
    hidden = jax.lax.ragged_dot(rows, p["up"], sizes)
    hidden = hidden / jnp.max(jnp.abs(hidden), axis=-1, keepdims=True)
    return jnp.cumsum(jax.lax.ragged_dot(hidden, p["down"], sizes) @ p["common"], -1) + jnp.sum(hidden)


def behind(p, x, expert):
    """Rows of no expert, which grouped products make zeros of, and what follows ones."""
    sizes = jnp.minimum(sorted_by(expert)[1], 2).astype(jnp.uint8)
    return jnp.cos(jax.lax.ragged_dot(jnp.cos(jax.lax.ragged_dot(x, p["up"], sizes)), p["down"], sizes))


def in_a_scan(p, x, expert):
    """Layers of a scan, of which two each have tokens in the same order, which is then a constant of the loop."""
    return jax.lax.scan(lambda x, k: (x + scattered(p, x, expert) + scattered(p, x, (expert + k) % EXPERTS), None), x, jnp.arange(2))[0]


def computed_again(p, x, expert):
    """Layers of a scan that are computed again in the backward pass, each token of another expert in the next."""
    layer = jax.checkpoint(lambda x, k: x + scattered(p, x, (expert + k) % EXPERTS))
    return jax.lax.scan(lambda x, k: (layer(x, k), None), x, jnp.arange(2))[0]


def arguments():
    shapes = {"up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH), "common": (WIDTH, WIDTH), "bias": (EXPERTS, WIDTH)}
    return concrete(({name: abstract(shape) for name, shape in shapes.items()}, abstract((ROWS, WIDTH))), scale=1.0)


LOADS = {
    "equal": np.arange(ROWS) % EXPERTS,
    "all of one": np.full(ROWS, 2),
    "two empty": np.where(np.arange(ROWS) < 9, 3, 0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", (scattered, looked_up, between, behind, in_a_scan, computed_again), ids=lambda layer: layer.__name__)
def test_results_and_gradients_are_equal_whatever_the_loads(layer):
    """The rewritten program computes what the original does, in one round or in many."""

    def step(p, x, expert):
        return jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(layer(p, x, expert))), argnums=(0, 1))(p, x)

    p, x = arguments()
    traced = trace(step, p, x, jnp.asarray(LOADS["equal"]))
    packed = applied(PackedExperts(1.0), traced)
    assert not any(op.primitive == "ragged_dot_general" for op in packed.graph.walk())
    stacks = [packed.graph.values[value].shape for op in packed.graph.ops if op.primitive == "scan" for value in op.results]
    assert not any(ROWS in shape and HIDDEN in shape for shape in stacks), "what is kept between the passes is packed"
    was, now = (jax.jit(jaxpr_as_fun(each.jaxpr)) for each in (traced, packed))
    for expert in LOADS.values():
        leaves = jax.tree.leaves((p, x, jnp.asarray(expert)))
        for one, other in zip(was(*leaves), now(*leaves), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(np.abs(one).max()))


def layer_of(experts, rows, width, hidden):
    """A step of a dropless layer, one of the same with a capacity, and their arguments."""

    def dropless(p, x, expert):
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=experts).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], sizes))
        return jnp.zeros_like(x).at[order].set(jax.lax.ragged_dot(hidden, p["down"], sizes))

    def capacity(p, x, expert):
        chosen = jax.nn.one_hot(expert, experts, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, -1)
        slots = jnp.zeros((experts, rows // experts, width), x.dtype).at[expert, place].set(x, mode="drop")
        made = jnp.einsum("ech,ehw->ecw", jax.nn.gelu(jnp.einsum("ecw,ewh->ech", slots, p["up"])), p["down"])
        return made.at[expert, place].get(mode="fill", fill_value=0)

    def step(layer, p, x, expert):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x + layer(p, x, expert)).astype(jnp.float32) ** 2))(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    up, down, x = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((experts, width, hidden), (experts, hidden, width), (rows, width)))
    return partial(step, dropless), partial(step, capacity), ({"up": up, "down": down}, x, jax.ShapeDtypeStruct((rows,), "int32"))


@pytest.mark.slow
def test_experts_are_split_as_those_with_a_capacity_are():
    """A dropless layer is planned expert parallel, at most 1.15 times as long as one with a capacity, and in as much memory."""
    dropless, capacity, args = layer_of(16, 8192, 1024, 4096)
    found, like = (autoshard.search(step, *args, cluster="v5e:4x4", donate_argnums=0) for step in (dropless, capacity))
    assert found.in_specs[0]["up"] == like.in_specs[0]["up"] == P("data", None, None)
    assert found.cost.makespan_seconds < 1.15 * like.cost.makespan_seconds
    assert found.cost.peak_bytes < 1.15 * like.cost.peak_bytes
    assert {each.kind for each in found.cost.collectives} == {each.kind for each in like.cost.collectives}
    (rewrite,) = found.record.program.rewrites
    assert rewrite == PackedExperts(1.0, ((16, 512),)) and from_json(Node(to_json([rewrite]))) == (rewrite,)
    assert rewrite.describe() == "experts: rows of 16 experts packed to 512 each (balance 1); a fuller expert takes another round"
    assert rewrite.describe() in found.notes
    assert not autoshard.search(dropless, *args, cluster="v5e:4x4", donate_argnums=0, balance=None).record.program.rewrites
    with pytest.raises(ShardingError, match=r"at least 1; got 0\.9"):
        autoshard.search(dropless, *args, cluster="v5e:4x4", balance=0.9)


def test_what_does_not_run_on_other_rows_is_not_packed():
    """An equation whose parameters have its number of rows in a way that is not known leaves the rows in sorted order."""
    p, x = arguments()
    traced = trace(scattered, p, x, jnp.asarray(LOADS["equal"]))
    ops, rules = ops_by_path(traced.graph), rules_of(traced.graph)
    whole = flat(traced.jaxpr, ops)
    found = [
        {whole.eqns[k].primitive.name for region in regions_of(whole.eqns, whole.ops, rules, packable) for k in region.steps}
        for packable in (is_packable, lambda *_: False)
    ]
    assert "gather" in found[0] and "scatter-add" in found[0]
    assert "ragged_dot_general" in found[1] and not {"gather", "scatter-add"} & found[1]
    (eqn,) = (eqn for eqn in whole.eqns if eqn.primitive.name == "scatter-add" and eqn.outvars[0].aval.shape == (ROWS, WIDTH))
    sizes = next(eqn.invars[2] for eqn in whole.eqns if eqn.primitive.name == "ragged_dot_general")
    assert is_packable(eqn, Step("scatter", (None, 0, 0), (None,)), sizes, ROWS)
    assert not is_packable(eqn, Step("row", (0, 0, None), (0,)), sizes, ROWS)


@pytest.mark.slow
def test_derivatives_are_those_of_the_program_as_it_is_written():
    """A packed layer, whose loops have no derivatives, is differentiated from outside."""
    p, x = arguments()
    args, pins = (p, x, jnp.asarray(LOADS["all of one"])), dict.fromkeys(("p['up']", "p['down']"), P("data"))
    strategy = autoshard.search(scattered, *args, cluster="cpu:4", mesh={"data": 4}, pins=pins)
    assert strategy.record.program.rewrites
    grads = [jax.grad(lambda p, x, expert, f=f: jnp.sum(f(p, x, expert) ** 2))(*args) for f in (scattered, strategy.apply(scattered))]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * float(np.abs(one).max()))


def test_microbatches_are_packed_by_themselves():
    """A step in microbatches has the rows of each packed, and recomputation that was chosen for the whole batch is refused with them."""
    dropless, _, args = layer_of(4, 64, 24, 32)
    packed = rewritten(trace(dropless, *args), (PackedExperts(1.0, ((4, 16),)),))
    halves = rewritten(packed, (*packed.rewrites, Microbatches(2)))
    assert halves.rewrites == (*packed.rewrites, Microbatches(2))
    shapes = {halves.graph.values[value].shape for op in halves.graph.walk() if op.primitive == "dot_general" for value in op.results}
    assert (4, 8, 32) in shapes and (4, 16, 32) not in shapes, "each expert has 16 of 64 rows, and 8 of 32"
    again = Recompute(object())
    with pytest.raises(TraceError, match="made for each microbatch: experts: rows of 4 experts packed to 16 each"):
        rewritten(replace(packed, rewrites=(*packed.rewrites, again)), (*packed.rewrites, again, Microbatches(2)))


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ("manual", "constraints"))
def test_skewed_loads_are_equal_on_eight_devices(lowering):
    """Experts split over eight devices give the results of one, in further rounds, too."""
    dropless, _, (p, x, expert) = layer_of(8, 256, 64, 512)
    pins = dict.fromkeys(("p['up']", "p['down']"), P("data"))
    strategy = autoshard.search(dropless, p, x, expert, cluster="v5e:2x4", mesh={"data": 8}, pins=pins)
    assert strategy.record.program.rewrites
    sharded = strategy.apply(dropless, lowering=lowering)
    rng = np.random.default_rng(0)
    p, x = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), (p, x))
    for expert in (np.arange(256) % 8, np.where(np.arange(256) < 200, 1, 3)):
        for one, other in zip(*(jax.tree.leaves(step(p, x, jnp.asarray(expert))) for step in (jax.jit(dropless), sharded)), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, atol=0.02 * np.abs(one).max())
