"""A program that computes values again gives what it gives when it keeps them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from programs import concrete

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir.rewrites import Microbatches, Recompute
from autoshard.recompute import Options
from autoshard.rewrite import applied, rewritten
from autoshard.rules import rules_of
from autoshard.trace import trace
from benchmarks import models

SMALL = {"dtype": jnp.float32, "params": jnp.float32}
V5E = Cluster.parse("v5e:1x1")


def options_of(traced):
    """The choices that a program has on one chip."""
    return Options(traced, program_facts(traced.graph, rules_of(traced.graph), compiler_of(V5E)), V5E.device)


def filled(traced):
    """Arguments for a program."""
    made = concrete([variable.aval for variable in traced.jaxpr.jaxpr.invars], below=8, scale=0.3)
    return [abs(x) if "nu" in path else x for x, path in zip(made, traced.graph.argument_paths, strict=True)]


def compared(traced, *others, tolerance=1e-6):
    """Runs a program and others for it, and compares all results."""
    arguments = filled(traced)
    expected = jax.jit(jaxpr_as_fun(traced.jaxpr))(*arguments)
    for other in others:
        assert other.graph.argument_paths == traced.graph.argument_paths
        found = jax.jit(jaxpr_as_fun(other.jaxpr))(*arguments)
        for path, a, b in zip(traced.graph.result_paths, expected, found, strict=True):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert np.abs(a - b).max(initial=0.0) <= tolerance * (np.abs(a).max(initial=0.0) + 1e-8), path


def n_regions(traced):
    return sum(op.primitive == "remat2" for op in traced.graph.walk())


def n_products(traced):
    return sum(op.trips for op in traced.graph.walk() if op.primitive in ("dot_general", "conv_general_dilated"))


PROGRAMS = {
    "gpt": lambda: models.gpt(3, 32, 4, 64, batch=8, length=8, **SMALL),
    "llama scanned": lambda: models.llama(3, 32, 4, 2, 64, 64, batch=8, length=8, scan=True, remat=False, **SMALL),
    "moe": lambda: models.moe(2, 32, 4, 4, 64, batch=8, length=8, **SMALL),
    "resnet": lambda: models.resnet((1, 1), 8, 16, 8, 32, groups=4, **SMALL),
    "unet": lambda: models.unet(1, 8, 8, 16, 4, **SMALL),
}
SLOW = ("moe", "unet", "resnet")


def test_regions_make_their_own_arrays_of_a_constant():
    """A region that reads zeros, as where a mask is differentiated, makes them: before its barrier they would be stored."""
    function, arguments = models.gpt(3, 32, 4, 64, batch=8, length=8, **SMALL)
    traced = trace(function, *arguments)
    again = applied(Recompute(options_of(traced).full), traced)
    literals = set(again.graph.literals)
    filled = {op.results[0] for op in again.graph.ops if op.primitive == "broadcast_in_dim" and literals.issuperset(op.operands)}
    regions = [op for op in again.graph.ops if op.primitive == "remat2"]
    assert regions and not any(filled.intersection(op.operands) for op in regions)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS])
def test_results_are_those_of_the_program_that_keeps_everything(name):
    """With all layers computed again, and with a choice in between, every result is equal to 1e-6."""
    function, arguments = PROGRAMS[name]()
    traced = trace(function, *arguments)
    options = options_of(traced)
    some = options.all[len(options.all) // 2]
    compared(traced, applied(Recompute(options.full), traced), applied(Recompute(some), traced))


@pytest.mark.slow
def test_some_of_equal_layers_are_computed_again():
    """One price leads from no layer to all of them; between, the first ones are computed again, and results are the same."""
    traced = trace(*flattened(models.gpt(6, 32, 4, 64, batch=8, length=8, **SMALL)))
    every = options_of(traced).all
    shares = [each.kept_bytes / each.plain_bytes for each in every]
    assert shares == sorted(shares, reverse=True) and max(one - other for one, other in pairwise((1.0, *shares))) < 0.2
    some = min(every, key=lambda each: abs(each.kept_bytes / each.plain_bytes - 0.75))
    compared(traced, applied(Recompute(some), traced))


@pytest.mark.slow
def test_part_of_a_trip_is_computed_again():
    """Two prices in a trip, of what its first equations make and of the others, lead to choices between those of one price."""
    traced = trace(*flattened(PROGRAMS["llama scanned"]()))
    every = options_of(traced).all
    shares, seconds = [each.kept_bytes / each.plain_bytes for each in every], [each.seconds for each in every]
    assert max(one - other for one, other in pairwise((1.0, *shares))) < 0.15 and seconds == sorted(seconds)
    some = min(every, key=lambda each: abs(each.kept_bytes / each.plain_bytes - 0.5))
    assert len(some.loops) == 1
    compared(traced, applied(Recompute(some), traced))


def test_parts_of_the_forward_pass_have_choices_of_their_own():
    """One part computes nothing again, wherever it is; one choice of all parts is that choice."""
    traced = trace(*(lambda made: (made[0], *made[1]))(models.gpt(4, 32, 4, 64, batch=8, length=16, **SMALL)))
    options = options_of(traced)
    full = options.all[-1]
    assert options.by_part([(0.5, full), (1.0, full)]) == full and options.by_part([(1.0, None)]) is None
    ways = [(0.5, full), (1.0, None)], [(0.5, None), (1.0, full)], [(0.3, full), (0.6, None), (1.0, full)]
    chosen = [options.by_part(parts) for parts in ways]
    first, last, ends = (each.plain_bytes - each.kept_bytes for each in chosen)
    assert first + last == pytest.approx(full.plain_bytes - full.kept_bytes, rel=0.1) and max(first, last) < ends
    compared(traced, *(applied(Recompute(each), traced) for each in chosen))


def test_all_layers_are_computed_again_as_by_hand():
    """Full recomputation runs the products again that `jax.checkpoint` around each layer does, but for those that its policy saves too."""
    make = PROGRAMS["gpt"]
    plain, by_hand = trace(*flattened(make())), trace(*flattened(models.gpt(3, 32, 4, 64, batch=8, length=8, remat=True, **SMALL)))
    full = applied(Recompute(options_of(plain).full), plain)
    assert n_products(plain) < n_products(full) <= n_products(by_hand)


def test_regions_are_behind_barriers():
    """Without them compilers would find what is computed again equal to what the forward pass made, and keep that."""
    plain = trace(*flattened(PROGRAMS["gpt"]()))
    full = applied(Recompute(options_of(plain).full), plain)
    text = jax.jit(jaxpr_as_fun(full.jaxpr)).lower(*full.jaxpr.in_avals).as_text()
    assert text.count("stablehlo.optimization_barrier") == n_regions(full) > 0


def test_what_the_end_of_a_step_reads_does_not_keep_earlier_layers():
    """Full recomputation runs a product of all layers but the last again, also where a statistic of the last is stored at the end."""

    def step(with_statistic, state, x):
        def loss(weights):
            h = x
            for up, down in weights:
                h = h + jnp.tanh(h @ up) @ down
            return jnp.mean(h**2), h

        (value, last), gradients = jax.value_and_grad(loss, has_aux=True)(state["weights"])
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], gradients)
        return {"weights": weights, "mean": state["mean"] + jnp.mean(last, axis=0) if with_statistic else state["mean"]}, value

    array = partial(jax.ShapeDtypeStruct, dtype="float32")
    arguments = {"weights": [(array((32, 128)), array((128, 32)))] * 6, "mean": array((32,))}, array((64, 32))
    without, with_statistic = (trace(partial(step, flag), *arguments) for flag in (False, True))
    plain = n_products(without)
    again = [n_products(applied(Recompute(options_of(traced).full), traced)) for traced in (without, with_statistic)]
    assert again == [plain + 5] * 2


def flattened(program):
    function, arguments = program
    return function, *arguments


def test_scanned_layers_are_computed_again_within_one_region_of_the_loop():
    """The backward scan then has one region, with as many products as by hand, and the forward scan stacks little beside its carry."""
    make = partial(models.gpt, 3, 32, 4, 64, batch=8, length=8, scan=True, **SMALL)
    plain, by_hand = trace(*flattened(make())), trace(*flattened(make(remat=True)))
    full = applied(Recompute(options_of(plain).full), plain)
    backward = [op for op in full.graph.ops if op.primitive == "scan"][-1]
    assert [op.primitive for op in backward.bodies[0].ops].count("remat2") == 1
    assert n_products(plain) < n_products(full) <= n_products(by_hand)
    assert stacked_bytes(full) < 2 * stacked_bytes(by_hand) < stacked_bytes(plain) / 2


def stacked_bytes(traced):
    """The bytes that the first scan stacks."""
    scan = next(op for op in traced.graph.ops if op.primitive == "scan")
    return sum(traced.graph.values[value].nbytes for value in scan.results[1:])


def test_dropout_draws_the_same_bits_again():
    """What is dropped in the forward pass is dropped when it is computed again."""

    def loss(weights, x, key):
        for n, weight in enumerate(weights):
            hidden = jnp.tanh(x @ weight)
            kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.7, hidden.shape)
            x = x + jnp.where(kept, hidden / 0.7, 0.0)
        return jnp.mean(x**2)

    def step(weights, x, key):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x, key))

    weights = [jax.ShapeDtypeStruct((16, 16), "float32")] * 4
    traced = trace(step, weights, jax.ShapeDtypeStruct((64, 16), "float32"), jax.eval_shape(lambda: jax.random.key(0)))
    full = applied(Recompute(options_of(traced).full), traced)
    assert n_regions(full)
    compared(traced, full)


def test_the_users_own_checkpoints_are_left_as_they_are():
    """Layers under `jax.checkpoint` keep their regions, and no product is run once more than they say."""
    traced = trace(*flattened(models.gpt(3, 32, 4, 64, batch=8, length=8, remat=True, **SMALL)))
    options = options_of(traced)
    assert options.full is None or n_products(applied(Recompute(options.full), traced)) == n_products(traced)


def test_what_calls_python_is_not_called_again():
    """A callback in the forward pass is in the rewritten program as often as before."""

    def layer(x, weight):
        y = jnp.tanh(x @ weight)
        return y + jax.pure_callback(lambda y: np.sin(y), jax.ShapeDtypeStruct(y.shape, y.dtype), jax.lax.stop_gradient(y))

    def step(weights, x):
        def loss(weights, x):
            for weight in weights:
                x = jnp.sin(layer(x, weight))
            return jnp.sum(x**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    traced = trace(step, [jax.ShapeDtypeStruct((16, 16), "float32")] * 4, jax.ShapeDtypeStruct((64, 16), "float32"))
    full = rewritten(traced, Recompute.of(options_of(traced).full))
    for program in (traced, full):
        assert sum(op.primitive == "pure_callback" for op in program.graph.walk()) == 4


def test_shard_maps_are_not_run_again():
    """What is computed around them is; results stay the same, in layers one after the other and in a scan over them."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def summed(x):
        return jax.lax.psum(jnp.sin(x), "i"), jax.lax.axis_index("i")[None]

    def layer(x, weight):
        total, _ = jax.shard_map(summed, mesh=mesh, in_specs=jax.P(None, "i"), out_specs=(jax.P(), jax.P("i")))(jnp.tanh(x @ weight))
        return jnp.tanh(x + jnp.tile(total, (1, 8)) @ weight), None

    def loss(weights, scanned, x):
        for weight in weights:
            x, _ = layer(x, weight)
        return jnp.sum(jax.lax.scan(layer, x, scanned)[0] ** 2)

    def step(weights, scanned, x):
        return jax.grad(loss, (0, 1))(weights, scanned, x)

    shapes = [jax.ShapeDtypeStruct((16, 16), "float32")] * 3, jax.ShapeDtypeStruct((3, 16, 16), "float32")
    traced = trace(step, *shapes, jax.ShapeDtypeStruct((64, 16), "float32"))
    full = applied(Recompute(options_of(traced).full), traced)
    assert n_regions(full)

    def n_sums(program):
        return sum(op.trips for op in program.graph.walk() if op.primitive in ("psum", "psum_invariant"))

    assert n_sums(full) == n_sums(traced)
    compared(traced, full, tolerance=2e-5)


@pytest.mark.slow
def test_microbatches_of_a_program_that_computes_again():
    """Both rewrites together give the results of the plain program."""
    traced = trace(*flattened(PROGRAMS["gpt"]()))
    both = applied(Microbatches(2), applied(Recompute(options_of(traced).full), traced))
    assert both.microbatches == 2 and both.remat is not None and n_regions(both)
    compared(traced, both, tolerance=2e-6)


def test_what_layers_share_has_its_gradients_summed_outside_of_regions():
    """A bias that is looked up at constant places does not keep a step that computes its layers again from running in microbatches."""
    places = np.clip(np.arange(8)[None, :] - np.arange(8)[:, None], -2, 2)

    def loss(params, x):
        bias = params["bias"][jnp.clip(places + 2, 0, 4)]
        for w in params["layers"]:
            x = x + jnp.einsum("bqs,bsd->bqd", jax.nn.softmax(jnp.einsum("bqd,bsd->bqs", jnp.tanh(x @ w), x) + bias), x)
        return jnp.mean(x**2)

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    traced = trace(step, {"layers": [jnp.ones((16, 16))] * 3, "bias": jnp.ones(5)}, jnp.ones((4, 8, 16)))
    again = [applied(Recompute(choice), traced) for choice in options_of(traced).all]
    assert max(map(n_regions, again)) >= 2
    compared(traced, *(applied(Microbatches(2), each) for each in again[-1:]))


@pytest.mark.slow
def test_two_gradients_in_a_row():
    """A step that takes two gradients one after the other keeps its results, whichever of their passes computes again."""

    def loss(weights, x):
        for weight in weights:
            x = x + jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def step(weights, x, y):
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, y))

    leaf = jax.ShapeDtypeStruct((64, 16), "float32")
    traced = trace(step, [jax.ShapeDtypeStruct((16, 16), "float32")] * 4, leaf, leaf)
    options = options_of(traced)
    compared(traced, *(applied(Recompute(one), traced) for one in (options.full, *options.all) if one is not None))


def test_moments_that_a_gradient_updates_come_after_it():
    """With an optimizer that reads all gradients at once, as clipping by their norm does, results are equal."""
    weights = [jax.ShapeDtypeStruct((16, 16), "float32")] * 4
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def step(weights, memory, x):
        def loss(weights):
            y = x
            for weight in weights:
                y = y + jnp.tanh(y @ weight)
            return jnp.mean(y**2)

        updates, memory = optimizer.update(jax.grad(loss)(weights), memory, weights)
        return optax.apply_updates(weights, updates), memory

    traced = trace(step, weights, jax.eval_shape(optimizer.init, weights), jax.ShapeDtypeStruct((64, 16), "float32"))
    compared(traced, applied(Recompute(options_of(traced).full), traced))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt", "llama scanned"])
def test_regions_read_no_broadcasts(name):
    """What is computed again reads masks and zeros at the size that they are broadcast from: its barrier would have them stored."""
    traced = trace(*flattened(PROGRAMS[name]()))
    full = applied(Recompute(options_of(traced).full), traced)
    values = full.graph.values
    made = {value: op for op in full.graph.walk() for value in op.results}
    read = {value for op in full.graph.walk() if op.primitive == "remat2" for value in op.operands}
    wide = [made[value] for value in read if value in made and made[value].primitive == "broadcast_in_dim"]
    assert read and not [op for op in wide if values[op.results[0]].nbytes > sum(values[value].nbytes for value in op.operands)]
