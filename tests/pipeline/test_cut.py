"""Stages have about equal work, whatever the number of layers is."""

from __future__ import annotations

import functools
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster import Cluster
from autoshard.errors import PipelineError
from autoshard.pipeline.cut import Weights, _Cutter, busy_seconds
from autoshard.pipeline.figures import least_seconds
from autoshard.pipeline.stages import stages_of
from autoshard.trace import trace
from benchmarks import models
from tests.programs import abstract, train_step_of

WIDTH = 8


def layers_of(n_layers, scanned, extra=0):
    """A step with so many layers of one width, one after the other or scanned, before a product with a wider weight."""

    def loss(params, x):
        if scanned:
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
        else:
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
        return jnp.mean(x if not extra else (x @ params["wide"]) ** 2)

    layers = abstract((n_layers, WIDTH, WIDTH)) if scanned else [abstract((WIDTH, WIDTH))] * n_layers
    step, args = train_step_of(loss, {"layers": layers, "wide": abstract((WIDTH, max(extra, 1)))}, abstract((8, WIDTH)))
    return trace(step, *args)


def forward_products(staged):
    """Per stage the products of the forward pass in its loop, bodies included, each with its trips."""
    found = [0] * len(staged.stages)
    for op, stage in zip(staged.micro.body.ops, staged.cut.stages, strict=True):
        inner = [each for each in op.walk() if each.primitive == "dot_general" and "transpose(" not in each.origin.name_stack]
        found[max(stage, 0)] += sum(each.trips for each in inner) // staged.n_microbatches
    return found


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("n_stages", [4, 5])
def test_layers_that_stages_do_not_divide(n_stages, scanned):
    """Six equal layers on four or five stages: each has one or two."""
    found = forward_products(stages_of(layers_of(6, scanned), n_stages, 4))
    assert sum(found) == 6 and set(found) == {1, 2}, found


def test_one_operation_with_most_of_the_work():
    """An operation is on one stage: with half of the work it is, with nearly all the step is refused with the numbers and the line."""
    assert forward_products(stages_of(layers_of(2, False, 2 * WIDTH), 2, 4)) == [2, 1]
    with pytest.raises(PipelineError, match=r"dot_general at .*test_cut.py.* has 97% of .*got 2 stages. Leave stages out"):
        stages_of(layers_of(2, False, 64 * WIDTH), 2, 4)


def test_stages_of_scanned_layers_make_their_own_masks():
    """Of each microbatch a stage is sent the residual stream and its gradient alone, not what is made of constants."""
    program, args = models.llama(2, 32, 4, 2, 64, 64, batch=8, length=16, scan=True)
    first, last = stages_of(trace(program, *args), 2, 4).stages
    sent = [[(message.shape, str(message.dtype)) for message in stage.sends if message.kind == "loop"] for stage in (first, last)]
    assert sent == [[((2, 16, 32), "bfloat16")]] * 2


def uneven(widths, vocabulary, length=64, batch=64):
    """A step of products of several widths, softmaxes between them, and logits of a vocabulary."""

    def loss(params, x):
        for up, down in params["layers"]:
            x = x + jax.nn.softmax(jax.nn.gelu(x @ up)) @ down
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], axis=-1))

    layers = [(abstract((length, width)), abstract((width, length))) for width in widths]
    step, args = train_step_of(loss, {"layers": layers, "head": abstract((length, vocabulary))}, abstract((batch, length)))
    return trace(step, *args)


def every_cut(micro, n_stages):
    """All cuts of the forward pass with a product in each stage, and the operations of the backward pass where each has them."""
    cutter = _Cutter(micro, n_stages)
    products = [k for k, op in enumerate(cutter.forward) if any(each.primitive == "dot_general" for each in cutter.ops[op].walk())]
    for bounds in combinations(range(1, len(cutter.forward)), n_stages - 1):
        edges = [0, *bounds, len(cutter.forward)]
        if all(any(first <= k < last for k in products) for first, last in pairwise(edges)):
            yield cutter.cut(bounds=list(bounds))


CASES = [((1024, 16, 16), 16, 2), ((2048, 64), 16, 2), pytest.param((64, 64), 512, 3, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("widths", "vocabulary", "n_stages"), CASES)
def test_the_busiest_stage_is_near_the_best_of_all_cuts(widths, vocabulary, n_stages):
    """By predicted seconds, elementwise operations and the backward pass included: within 5 % of the least."""
    seconds = functools.partial(least_seconds, devices=Cluster.of("v5e:1x1"))
    staged = stages_of(uneven(widths, vocabulary), n_stages, 2, Weights(seconds))
    own = seconds(staged.micro)
    found = busy_seconds(staged.cut, own).max()
    least = min(busy_seconds(cut, own).max() for cut in every_cut(staged.micro, n_stages))
    assert found <= 1.05 * least
