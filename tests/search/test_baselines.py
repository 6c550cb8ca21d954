"""Baselines: the propagation that they share, and equal labels of repeated layers."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import problem_of
from programs import gpt

import autoshard
from autoshard.cluster import Cluster
from autoshard.demo.programs import named
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.reductions import symmetry
from autoshard.search import DataParallel, FullySharded, TensorParallel
from autoshard.search.baselines import split_batch
from autoshard.search.sharding_propagation import PropagationSearch


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def deep(layers=6):
    fn, args = gpt(n_layers=layers)
    return problem_of(fn, *args)


def test_the_batch_is_split_once_and_never_changed():
    """Every baseline of a problem starts from the same split, whichever ran before."""
    problem = deep(2)
    first = DataParallel().solve(problem).assignment.choices
    sharded = FullySharded().solve(problem).assignment.choices
    assert split_batch(problem).choices == first == DataParallel().solve(problem).assignment.choices
    assert sharded == FullySharded().solve(deep(2)).assignment.choices != first


def test_meshes_that_split_the_batch_alike_share_which_one_it_is(monkeypatch):
    """On another mesh nothing is judged to find it, and it is the same that is found there alone; where it is split less anew."""
    fn, args = gpt()
    first, alone = (problem_of(fn, *args, mesh=dict(zip("ab", sizes, strict=True))) for sizes in ((4, 2), (2, 4)))
    other = Problem(first.facts, CostModel(first.model.cluster, alone.mesh), like=first)
    split_batch(first)
    judged = []
    monkeypatch.setattr(Problem, "evaluate", lambda *given, old=Problem.evaluate: judged.append(1) or old(*given))
    found = split_batch(other)
    assert not judged
    assert found.layouts == split_batch(alone).layouts and found.choices == split_batch(alone).choices and judged
    less = Problem(first.facts, CostModel(Cluster.parse("cpu:2"), Mesh.of({"a": 2})), like=first)
    judged.clear()
    assert split_batch(less) is not None and judged


@pytest.mark.parametrize("searcher", [DataParallel(), FullySharded(), FullySharded(stage=1)], ids=str)
def test_random_bits_are_split_like_their_readers(searcher):
    """Dropout of a split batch draws each device's own bits: no operand says so, their readers do."""

    def loss(weight, key, batch):
        hidden = jnp.tanh(batch @ weight)
        return jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0.0).sum()

    key = jax.eval_shape(lambda: jax.random.key(0))
    problem = problem_of(jax.grad(loss), floats(256, 256), key, floats(1024, 256))
    found = searcher.solve(problem).assignment
    (bits,) = (op for op in problem.graph.walk() if op.primitive == "random_bits")
    assert found.layout(bits.results[0]) == (0, 0)


def test_labels_are_split_with_what_they_label():
    """LeNet's labels could as well be whole, since slicing them is free: arrays that share the batch dimension are all handed in split."""
    (lenet,) = named("lenet")
    found = autoshard.search(lenet.train_step, *lenet.arguments(), cluster="cpu:8", mesh={"data": 8}, searcher="data_parallel")
    *_, images, labels = found.in_specs
    assert images[0] == labels[0] == "data"


@pytest.mark.slow
def test_fixed_parts_are_projected_where_classes_agree():
    """One part for each variable of the quotient problem; None where the layers of a class have different parts, or only one has any."""
    problem = deep()
    small = symmetry.apply(problem)
    classes = small.classes.tolist()
    twin, other = next((variable, classes.index(number)) for variable, number in enumerate(classes) if classes.index(number) < variable)
    both = {twin: 1, other: 1}
    if classes.count(classes[twin]) > 2:
        both = {variable: 1 for variable, number in enumerate(classes) if number == classes[twin]}
    assert small.project_parts((both, {})) == ({classes[twin]: 1}, {})
    assert small.project_parts(({**both, twin: 0}, {})) is None
    assert small.project_parts(({twin: 1}, {})) is None


@pytest.mark.slow
def test_tensor_parallel_layers_have_equal_labels(monkeypatch):
    """A deep program is propagated on the quotient problem, and as fast as where every layer is propagated on its own."""
    sizes = []
    search = PropagationSearch.search
    monkeypatch.setattr(PropagationSearch, "search", lambda self, prices: sizes.append(self.problem.n_variables) or search(self, prices))
    problem = deep()
    found = TensorParallel().solve(problem)
    assert set(sizes) == {symmetry.apply(problem).n_variables}
    monkeypatch.setattr(symmetry, "apply", lambda problem: None)
    alone = TensorParallel().solve(problem)
    assert max(sizes) == problem.n_variables
    assert found.judgement.cost.makespan_seconds == pytest.approx(alone.judgement.cost.makespan_seconds, rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "spec"), [((256, 256), P(("data", "model"), None)), ((64, 256), P(None, ("data", "model"))), ((4, 6), P("model", "data"))]
)
def test_parameters_are_split_along_one_dimension(shape, spec):
    """The largest that all devices divide, so that each is gathered and its gradient scattered at once; else along several."""

    def step(weight, batch):
        return weight - jax.grad(lambda weight: jnp.tanh(batch @ weight).sum())(weight)

    batch = floats(1024, shape[0])
    found = autoshard.search(step, floats(*shape), batch, cluster="v5e:2x4", mesh={"data": 2, "model": 4}, searcher="fully_sharded")
    assert found.in_specs[0] == spec


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", ["data_parallel", "fully_sharded"])
def test_two_batches_that_are_made_one_stay_split(searcher):
    """Preferred and rejected answers, joined along the batch: each device computes its share of the products, and no activation is sent."""

    def step(weights, batch):
        def loss(weights):
            x = jnp.concatenate([batch["preferred"], batch["rejected"]])
            scores = (jnp.tanh(x @ weights[0]) @ weights[1]).sum((1, 2))
            preferred, rejected = jnp.split(scores, 2)
            return -jax.nn.log_sigmoid(preferred - rejected).mean()

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (512, 256))]
    batch = {name: jax.ShapeDtypeStruct((16, 128, 256), jnp.float32) for name in ("preferred", "rejected")}
    found = autoshard.search(step, weights, batch, cluster="cpu:8", mesh={"data": 8}, searcher=searcher)
    assert found.in_specs[1] == dict.fromkeys(batch, P("data", None, None))
    assert found.cost.flops == 5 * 2 * 32 * 128 * 256 * 512 / 8
    assert max(one.bytes for one in found.cost.collectives) <= 2 * 16 * 128 * 256 * 4  # the inputs, once: they are joined whole


def momentum_step(layers):
    """The train step of a forward pass, with momentum; its state is a pair of weights and momenta."""

    def step(state, batch):
        gradients = jax.grad(lambda weights: (layers(weights, batch) ** 2).mean())(state[0])
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state[1], gradients)
        return jax.tree.map(lambda w, m: w - 1e-3 * m, state[0], momenta), momenta

    return step


def unrolled(weights, x):
    for up, down in weights:
        x = x + jnp.tanh(x @ up) @ down
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer[0]) @ layer[1], None), x, weights)[0]


def recurrent(weights, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ weights[0]) @ weights[1], None), x, None, length=5)[0]


LAYERS = {
    unrolled: [(floats(64, 256), floats(256, 64))] * 3,
    scanned: (floats(3, 64, 256), floats(3, 256, 64)),
    recurrent: (floats(64, 256), floats(256, 64)),
}


def fully_sharded(step, weights, stage, microbatches, examples=2048):
    """A fully sharded step on eight devices, and how often each kind of collective runs in it, those of scalars left out."""
    found = autoshard.search(
        step, (weights, weights), floats(examples, 64), cluster="cpu:8", mesh={"data": 8}, searcher=FullySharded(stage=stage),
        microbatches=microbatches, donate_argnums=0, remat=None,
    )  # fmt: skip
    sent = Counter()
    for one in found.cost.collectives:
        sent[one.kind] += one.count if one.bytes > 4 else 0
    return found, sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("layers", [unrolled, scanned])
def test_microbatches_leave_gradients_and_weights_sharded(layers, stage):
    """Each trip scatters gradients onto their sharded sums, and gathers the weights of stage 3 where they are used: the peak falls."""
    step, weights = momentum_step(layers), LAYERS[layers]
    whole, once = fully_sharded(step, weights, stage, None)
    peaks = [whole.cost.peak_bytes]
    for n in (2, 4):
        found, sent = fully_sharded(step, weights, stage, n)
        assert found.in_specs == whole.in_specs
        assert sent["reduce_scatter"] == n * once["reduce_scatter"] > 0 == sent["all_reduce"]
        assert sent["all_gather"] == (n if stage == 3 else 1) * once["all_gather"]
        peaks.append(found.cost.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_sums_over_microbatches_are_sharded_where_they_run(lowering):
    """No compiled loop carries a whole gradient, and results are those of one device."""
    step, weights = momentum_step(scanned), LAYERS[scanned]
    found, _ = fully_sharded(step, weights, 3, 4, examples=64)
    args = jax.tree.map(lambda x: jnp.linspace(-0.1, 0.1, x.size).reshape(x.shape), ((weights, weights), floats(64, 64)))
    compiled = found.apply(step, lowering=lowering).lower(*args).compile()
    loops = [line.split(" while(")[0] for line in compiled.as_text().splitlines() if " while(" in line]
    assert any("f32[3,64,32]" in carried for carried in loops)
    assert not any("f32[3,64,256]" in carried or "f32[3,256,64]" in carried for carried in loops)
    wanted = jax.jit(step)(*args)
    given = found.shard(*args)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.allclose(x, y, rtol=1e-6, atol=1e-8), compiled(*given), wanted)))


def test_a_recurrence_gathers_its_weights_once():
    """What it reads in each of its trips, of the same examples, in a loop over microbatches too, once a microbatch."""
    step, weights = momentum_step(recurrent), LAYERS[recurrent]
    for n in (None, 2):
        _, sent = fully_sharded(step, weights, 3, n)
        assert sent["all_gather"] == 2 * (n or 1)


def test_a_loss_in_chunks_gathers_its_weights_once():
    """A loop of few of the products is a part of a layer, whose weights are whole while it runs."""

    def in_chunks(weights, x):
        hidden = unrolled(weights[:2], x).reshape(-1, 4, 64).swapaxes(0, 1)
        return jax.lax.map(lambda chunk: jnp.tanh(chunk @ weights[2][0]), hidden)

    _, sent = fully_sharded(momentum_step(in_chunks), LAYERS[unrolled], 3, None)
    assert sent["all_gather"] == 5


def test_a_mask_that_all_layers_read_is_made_in_shards():
    """What a loop reads in one layout is made in that, whatever it is made of: not of all examples on every device."""

    def loss(weight, keep, batch):
        mask = jnp.broadcast_to(keep, batch.shape)
        layer = lambda x, _: (jnp.where(mask, jnp.tanh(x @ weight), x), None)  # noqa: E731
        return jax.lax.scan(layer, batch, None, length=3)[0].sum()

    problem = problem_of(loss, floats(256, 256), jax.ShapeDtypeStruct((256,), jnp.bool_), floats(1024, 256))
    (mask,) = (op.results[0] for op in problem.graph.ops if op.primitive == "broadcast_in_dim" and problem.graph.values[op.results[0]].rank)
    assert DataParallel().solve(problem).assignment.layout(mask) == (0, 0)


def test_as_many_microbatches_as_devices_are_each_split():
    """The loop's dimension, which the devices divide too, is not split, though a program as small as this is faster on one device."""

    def step(weights, batch):
        def trip(total, x):
            return total + jax.grad(lambda weights: (jnp.tanh(x @ weights) ** 2).mean())(weights), None

        return weights - jax.lax.scan(trip, jnp.zeros_like(weights), batch)[0]

    options = {"cluster": "cpu:4", "mesh": {"data": 4}, "searcher": "fully_sharded"}
    found = autoshard.search(step, floats(16, 16), floats(4, 16, 16), **options)
    assert found.in_specs == (P("data", None), P(None, "data", None))
