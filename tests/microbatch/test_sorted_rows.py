"""Dropless mixtures of experts in microbatches: tokens sorted by expert, their products by group, and the way back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from autoshard.errors import PipelineError, TraceError
from autoshard.ir.rewrites import Microbatches, OneProgram
from autoshard.rewrite import applied
from autoshard.trace import trace
from tests.microbatch.test_rewrite import compared
from tests.programs import abstract, train_step_of

EXPERTS, TOKENS, WIDTH, HIDDEN, CHOSEN = 4, 16, 8, 12, 2


def mixture(layers=None):
    """The weights of a layer, or of a stack of layers."""
    leading = () if layers is None else (layers,)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    return {name: abstract((*leading, *shape)) for name, shape in shapes.items()}


def experts(p, rows, sizes):
    """The products of each expert with its rows."""
    return lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)


# -- sizes of groups -------------------------------------------------------------------------------------------------------


def bincount(keys):
    return jnp.bincount(keys, length=EXPERTS)


def one_hots(keys):
    return jax.nn.one_hot(keys, EXPERTS).sum(0).astype(jnp.int32)


def comparisons(keys):
    return jnp.sum(jnp.arange(EXPERTS)[:, None] == keys, axis=1)


def segment_sum(keys):
    return jax.ops.segment_sum(jnp.ones_like(keys), keys, num_segments=EXPERTS)


def scattered(keys):
    return jnp.zeros(EXPERTS, jnp.int32).at[keys].add(1)


def searched(keys):
    return jnp.diff(jnp.searchsorted(jnp.sort(keys), jnp.arange(EXPERTS), side="right"), prepend=0)


def searched_twice(keys):
    ordered, numbers = keys[jnp.argsort(keys)], jnp.arange(EXPERTS)
    return jnp.searchsorted(ordered, numbers, side="right") - jnp.searchsorted(ordered, numbers)


SIZES = (bincount, one_hots, comparisons, segment_sum, scattered, searched, searched_twice)

# -- ways back -------------------------------------------------------------------------------------------------------------


def set_at(y, order):
    return jnp.zeros_like(y).at[order].set(y)


def added_at(y, order):
    return jnp.zeros_like(y).at[order].add(y)


def unsorted(y, order):
    return jnp.take(y, jnp.argsort(order), axis=0)


def inverted(y, order):
    return y[jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))]


WAYS = (set_at, added_at, unsorted, inverted)


def top_1(p, x, sizes=bincount, back=set_at):
    keys = jnp.argmax(x @ p["router"], -1)
    order = jnp.argsort(keys)
    return x + back(experts(p, x[order], sizes(keys)), order)


def top_2(p, x, sizes=bincount, back=unsorted):
    rows = x.reshape(-1, WIDTH)
    weights, chosen = lax.top_k(jax.nn.softmax(rows @ p["router"]), CHOSEN)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    y = back(experts(p, rows[order // CHOSEN], sizes(keys)), order).reshape(-1, CHOSEN, WIDTH)
    return x + jnp.einsum("tkd,tk->td", y, weights).reshape(x.shape)


def combined_by_token(p, x):
    """Rows are weighted while they are sorted, and added up at their tokens."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    tokens = jnp.repeat(jnp.arange(TOKENS), CHOSEN)
    _, tokens, weights = lax.sort((chosen.reshape(-1), tokens, weights.reshape(-1)), num_keys=1)
    return jnp.zeros_like(x).at[tokens].add(experts(p, x[tokens], bincount(chosen.reshape(-1))) * weights[:, None])


def by_coordinates(p, x):
    """Tokens are looked up by batch and position; a bias by the sorted keys."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    keys, (batch, length, _) = chosen.reshape(-1), x.shape
    order, each = jnp.argsort(keys), length * CHOSEN
    rows = jnp.zeros((batch * each, WIDTH)).at[jnp.arange(batch * each)].set(x[order // each, order // CHOSEN % length])
    y = experts(p, rows, bincount(keys)) + p["router"].T[keys[order]]
    return jnp.sum(weights[..., None] * set_at(y, order).reshape(batch, length, CHOSEN, WIDTH), axis=2)


@jax.custom_vjp
def permuted(x, order):
    """Rows in an order, whose gradient comes back through the inverse order."""
    return x[order]


permuted.defvjp(lambda x, order: (x[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def with_own_gradients(p, x):
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    y = permuted(experts(p, permuted(jnp.repeat(x, CHOSEN, axis=0), order), bincount(keys)), jnp.argsort(order))
    return jnp.einsum("tkd,tk->td", y.reshape(-1, CHOSEN, WIDTH), weights)


def added_at_divided(p, x):
    """Tokens are numbered by the sorted order, and rows added up at them."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    y = experts(p, x[order // CHOSEN], bincount(keys)) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // CHOSEN].add(y)


def step_of(layer, p, x):
    """A step whose loss is of one layer."""
    return train_step_of(lambda p, x: jnp.mean(layer(p, x) ** 2), p, x, optimizer=optax.sgd(0.1))


def grouped_inside(many):
    """How many of the grouped products run in the one loop over microbatches."""
    (loop,) = (op for op in many.graph.ops if op.primitive == "scan" and op.bodies[0].trips == many.microbatches)
    found = [op.index for op in many.graph.walk() if op.primitive == "ragged_dot_general"]
    inside = {op.index for op in loop.walk()}
    return sum(index in inside for index in found), len(found)


X = abstract((TOKENS, WIDTH))
LAYERS = {
    **{sizes.__name__: (lambda p, x, sizes=sizes: top_1(p, x, sizes), X) for sizes in SIZES},
    **{f"top 2, {sizes.__name__}": (lambda p, x, sizes=sizes: top_2(p, x, sizes), X) for sizes in (one_hots, searched)},
    **{back.__name__: (lambda p, x, back=back: top_2(p, x, back=back), X) for back in WAYS},
    "merged dimensions": (top_2, abstract((8, 4, WIDTH))),
    "combined by token": (combined_by_token, X),
    "added at divided positions": (added_at_divided, X),
    "by coordinates": (by_coordinates, abstract((8, 4, WIDTH))),
    "own gradients": (with_own_gradients, X),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYERS)
def test_sorted_tokens_are_those_of_the_whole_batch(name):
    layer, x = LAYERS[name]
    many = compared(*step_of(layer, mixture(), x), 4)
    inside, total = grouped_inside(many)
    assert inside == total == 5


def test_zeros_of_bfloat16_are_zeros():
    """The gradient of rows that are looked up is added to zeros, of whatever type."""
    p, x = ({name: abstract(value.shape, "bfloat16") for name, value in mixture().items()}, abstract(X.shape, "bfloat16"))
    step, args = step_of(top_2, p, x)
    assert grouped_inside(applied(Microbatches(4), trace(step, *args))) == (5, 5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("remat", [False, True])
def test_sorted_tokens_of_scanned_layers(remat):
    """What the backward pass reads of each layer's order is of that layer."""
    layer = jax.checkpoint(top_2) if remat else top_2

    def scanned(p, x):
        return lax.scan(lambda x, p: (layer(p, x), None), x, p)[0]

    inside, total = grouped_inside(compared(*step_of(scanned, mixture(3), X), 2))
    assert inside == total > 0


def test_balancing_losses_of_sorted_tokens_are_of_the_whole_batch():
    def loss(p, x):
        probabilities = jax.nn.softmax(x @ p["router"])
        share = bincount(jnp.argmax(probabilities, -1)) / TOKENS
        return jnp.mean(top_1(p, x) ** 2) + 0.1 * EXPERTS * jnp.sum(share * probabilities.mean(0))

    compared(*train_step_of(loss, mixture(), X, optimizer=optax.sgd(0.1)), 2)


def shares(p, x):
    """Keys and their order, for layers that are refused."""
    keys = jnp.argmax(x @ p["router"], -1)
    return keys, jnp.argsort(keys)


def counts_of_others(p, x):
    _, order = shares(p, x)
    return set_at(experts(p, x[order], bincount(jnp.argmin(x @ p["router"], -1))), order)


def counts_of_some(p, x):
    keys, order = shares(p, x)
    return set_at(experts(p, x[order], bincount(keys[: TOKENS // 2])), order)


def keys_below_zero(p, x):
    keys = jnp.argmax(x @ p["router"], -1) - 1
    order = jnp.argsort(keys)
    return set_at(experts(p, x[order], one_hots(keys)), order)


def reversed_order(p, x):
    keys = jnp.argmax(x @ p["router"], -1)
    order = jnp.argsort(keys, descending=True)
    return set_at(experts(p, x[order], bincount(keys)), order)


def by_position(p, x):
    keys, order = shares(p, x)
    return set_at(experts(p, x[order], bincount(keys)) * (jnp.arange(TOKENS) < 10)[:, None], order)


def of_neighbours(p, x):
    keys, order = shares(p, x)
    y = experts(p, x[order], bincount(keys))
    return set_at(y + jnp.roll(y, 1, 0), order)


def positions_as_numbers(p, x):
    keys, order = shares(p, x)
    return set_at(experts(p, x[order], bincount(keys)) * order[:, None], order)


def another_way_back(p, x):
    keys, order = shares(p, x)
    return experts(p, x[order], bincount(keys))[order]


def no_way_back(p, x):
    keys, order = shares(p, x)
    return x + experts(p, x[order], bincount(keys))


def counts_of_another_layer(p, x):
    keys, order = shares(p, x)
    y = x + set_at(experts(p, x[order], bincount(keys)), order)
    _, order = shares(p, y)
    return set_at(experts(p, y[order], bincount(keys)), order)


NOT_BY_ROW = (
    *(counts_of_others, counts_of_some, keys_below_zero, reversed_order, by_position, of_neighbours),
    *(positions_as_numbers, another_way_back, no_way_back, counts_of_another_layer),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layer", NOT_BY_ROW)
def test_what_is_not_seen_to_be_of_each_row_is_not_computed_by_row(layer):
    """It is refused, with a line, or grouped products read the whole batch; results never differ."""
    step, args = step_of(layer, mixture(), X)
    try:
        many = compared(step, args, 2)
    except TraceError as error:
        assert "test_sorted_rows.py" in str(error)
        return
    loops = [op for op in many.graph.ops if op.primitive == "scan" and op.bodies[0].trips == 2]
    rows = {many.graph.values[op.operands[0]].shape[0] for loop in loops for op in loop.walk() if op.primitive == "ragged_dot_general"}
    assert rows <= {TOKENS}


@pytest.mark.sample(1)
@pytest.mark.parametrize("flipped", ["", "orders", "sizes"])
def test_stacked_orders_and_counts_are_those_of_the_same_trip(flipped):
    """A loop that reads the counts, or the orders, of other layers is refused."""

    def loss(p, x):
        def routed(x, p):
            keys, order = shares(p, x)
            return jnp.tanh(x), (order, bincount(keys))

        def mixed(x, slices):
            p, order, sizes = slices
            return x + set_at(experts(p, x[order], sizes), order), None

        x, (orders, sizes) = lax.scan(routed, x, p)
        orders, sizes = orders[::-1] if flipped == "orders" else orders, sizes[::-1] if flipped == "sizes" else sizes
        return jnp.mean(lax.scan(mixed, x, (p, orders, sizes))[0] ** 2)

    step, args = train_step_of(loss, mixture(3), X, optimizer=optax.sgd(0.1))
    if not flipped:
        compared(step, args, 2)
        return
    with pytest.raises(TraceError, match="test_sorted_rows"):
        applied(Microbatches(2), trace(step, *args))


def test_an_error_names_the_line_whose_groups_are_not_counts_of_the_keys():
    step, args = step_of(counts_of_another_layer, mixture(), X)
    with pytest.raises(TraceError, match=r"ragged_dot_general at .*test_sorted_rows.*are not seen to be the counts of the keys"):
        applied(Microbatches(2), trace(step, *args))


def test_bins_of_keys_that_may_be_negative():
    """`jnp.bincount` counts what is below 0 as 0, where a sort puts it."""

    def layer(p, x):
        keys = jnp.argmax(x @ p["router"], -1) - 1
        order = jnp.argsort(keys)
        return set_at(experts(p, x[order], bincount(keys)), order)

    assert grouped_inside(compared(*step_of(layer, mixture(), X), 2)) == (5, 5)


def test_rows_are_sorted_in_a_microbatch():
    """Each microbatch sorts its own rows alone."""
    step, args = step_of(top_1, mixture(), X)
    many = applied(Microbatches(4), trace(step, *args))
    sorts = [many.graph.values[op.operands[0]].shape for op in many.graph.walk() if op.primitive == "sort"]
    assert set(sorts) == {(TOKENS // 4,)}


def test_one_program_refuses_layers_that_keep_sorted_rows():
    """And runs those that sort again in the backward pass."""

    def step_with(layer):
        def scanned(p, x):
            return lax.scan(lambda x, p: (layer(p, x), None), x, p)[0]

        return step_of(scanned, mixture(4), X)

    step, args = step_with(top_2)
    with pytest.raises(PipelineError, match=r"grouped product at .*test_sorted_rows.*jax.checkpoint"):
        applied(OneProgram(2, 4), trace(step, *args))
    step, args = step_with(jax.checkpoint(top_2))
    assert applied(OneProgram(2, 4), trace(step, *args)).stages == 2
