"""Baselines: the propagation that they share, and equal labels of repeated layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import problem_of
from programs import gpt

import autoshard
from autoshard.demo.programs import named
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
