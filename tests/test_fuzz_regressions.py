"""What random programs once got wrong, each shrunk to a few lines; see `tests/fuzz`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fuzz import P, b1, check, f32, halved, i32
from jax import lax

pytestmark = pytest.mark.slow


def test_a_constraint_may_differ_from_the_pin_of_what_it_constrains():
    """An argument pinned one way and constrained another is resharded between the two."""

    def program(a):
        return lax.with_sharding_constraint(a, P("y"))

    check(program, f32(16), pins={"a": P("x")})


def test_a_constraint_may_differ_from_another_on_the_same_value():
    """Two constraints in a row are two layouts, also where the first one's gradient is constrained in turn."""

    def program(a):
        def loss(a):
            b = lax.with_sharding_constraint(a, P("x"))
            return jnp.sum(lax.with_sharding_constraint(b, P(None)) ** 2)

        return jax.grad(loss)(a)

    check(program, f32(8))


def test_given_specs_may_shard_what_is_stacked():
    """Where Shardy shards the stacked dimension of a scan's results, a given sharding keeps it whole."""

    def program(a):
        stacked = lax.scan(lambda c, x: (c, x * 2), jnp.zeros(8), a)[1]
        return stacked + a

    check(program, f32(8, 8), in_specs={"a": P("y", None)})


def test_a_single_scattered_update_stays_where_it_belongs():
    """Shards that an update does not fall into keep what they have, next to a reshard too (openxla/xla#49121)."""

    def program(a, i, b):
        return a.reshape(16, 1, 1, 4).at[i % 16].min(b)

    check(program, f32(16, 1, 4), i32(1), f32(1, 1, 1, 4), pins={"a": P(("x", "y")), "b": P(None, None, None, "x")})


def test_functions_that_the_partitioner_does_not_know_keep_their_sharding():
    """A square lowers to CHLO, which carries no sharding along: its result is constrained (the partial sums of a variance)."""
    check(lambda a: jnp.var(a, 0, keepdims=True), f32(8))


def test_what_a_loop_does_not_read_is_not_sent():
    """A scanned slice that no body reads is neither resharded nor predicted to be."""

    def program(a, b):
        return lax.scan(lambda c, x: (b, None), a, a)[0]

    check(program, f32(8, 8), f32(8, 8), pins={"a": P("y", None)})


def test_constants_that_replace_an_argument_are_made_where_it_lies():
    """A zero gradient that comes out as new state is sent by nobody."""

    def program(a, b, c):
        return c, jax.grad(lambda b: jnp.sum(a**2))(b)

    check(program, f32(2, 2), f32(2, 2), f32())


def test_a_custom_derivative_shares_the_copies_of_its_surroundings():
    """The body of a function with its own derivative and the derivative read one copy of their argument."""

    def program(a, b):
        def loss(a, b):
            return jnp.sum(halved(jnp.einsum("ij,kil->lki", a, b)) ** 2)

        return jax.grad(loss, (0, 1))(a, b)

    check(program, f32(2, 2), f32(8, 2, 8))


def test_a_result_that_nobody_reads_is_not_exchanged():
    """The shards of a top-k send each other no positions where only the values are asked for."""
    check(lambda a: lax.top_k(a, 1)[0], f32(8, 8), pins={"a": P(None, "x")})


def test_the_gradient_of_pooling_is_pooled_shard_by_shard():
    """Windows that lie side by side are scattered into on each device alone: the partitioner would gather the gradients."""

    def program(a):
        def loss(a):
            rows = jnp.einsum("ijk,ljk->i", a, a) * 0.125
            return jnp.sum(lax.reduce_window(rows, -jnp.inf, lax.max, (2,), (2,), "VALID") ** 2)

        return a - 0.1 * jax.grad(loss)(a)

    check(program, f32(8, 2, 4))


def test_a_constant_of_a_loop_goes_round_as_it_came():
    """What a loop reads in another layout than its constant has is made anew in each trip, and nothing is sent to undo it."""

    def program(a):
        return lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] + jnp.sum(a) * 0.01), (0, a))[1]

    check(program, f32(8))


def test_dead_code_inside_a_loop_sends_nothing():
    """A scan that nobody reads, inside a while loop, is neither costed nor lowered."""

    def program(a):
        def step(c):
            lax.scan(lambda carry, x: (carry + x.sum(), x), 0.0, c)
            return jnp.sin(c) * 0.5

        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, a))[1]

    check(program, f32(8, 4), seeds=(0, 1, 2, 3))


def test_empty_arrays_are_neither_sharded_nor_sent():
    """JAX reads back no more than a shard of an empty array whose other dimensions are split, so none is, pinned or not."""

    def program(a):
        return lax.with_sharding_constraint(a * 2, P("x")), a, a.sum(2)

    check(program, f32(16, 2, 0), pins={"a": P("y")}, in_specs={"a": P("y")}, seeds=(0, 1, 2, 3))


def test_what_enters_a_checkpoint_is_read_there_and_after():
    """A value that follows from its operands, is resharded inside a checkpoint and read again behind it stays where it is."""

    def program(a, b):
        half = a * 0.5
        best = jax.checkpoint(lambda x: x.at[jnp.arange(3)].max(0.5))(half)
        return best + jnp.einsum("ij,kil->lji", half, b).sum() * 0.01

    check(program, f32(8, 4), f32(3, 8, 4), seeds=tuple(range(8)), run=False)


def test_rows_added_to_a_vector_may_be_read_in_slices():
    """The gradient of numbers added to a vector is looked up in it; a vector has no tiles to lie in."""

    def program(state, b):
        def loss(state):
            return jnp.sum(state["a"].at[b % 16].add(state["c"]) ** 2) * 0.1

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    check(program, {"a": f32(16), "c": f32(2)}, i32(2))


def test_what_a_loop_hands_on_under_another_name_is_not_gathered_in_every_trip():
    """A scatter reads a loop's constant through a reshard that is none: both are one array, which readers elsewhere want whole."""

    def program(a, looked_up, rows, b):
        def trip(state):
            return state[0] + 1, state[1].at[rows % 16].max(b)

        looped = lax.while_loop(lambda state: state[0] < 3, trip, (0, a[looked_up % 16]))[1]
        return lax.with_sharding_constraint(looped, P(None, None, "y"))

    check(program, f32(16, 8), i32(16, 8), i32(8), f32(8, 8, 8), pins={"looked_up": P(None, "x")})


def test_rows_that_count_the_batch_are_looked_up_where_they_lie():
    """Whatever else is sharded, a batch that is counted by one coordinate is not combined over devices."""

    def program(a, labels, b):
        rows = jnp.arange(16)
        return jnp.tanh(a)[rows, :, labels % 4] + a.at[rows, :, labels % 4].max(b).sum(2)

    check(program, f32(16, 8, 4), i32(16), f32(16, 8), pins={"a": P("x"), "labels": P("y")})


def test_a_body_may_be_called_with_arguments_that_nothing_is_known_of():
    """JAX may make a function of a loop's body, and Shardy leave its arguments without attributes."""

    def program(a, flag):
        return lax.scan(lambda c, _: (jnp.where(flag, c, 0.0), None), a, None, length=2)[0]

    check(program, f32(16, 1, 1), b1(), in_specs={"a": P()})


def test_what_nobody_reads_may_be_made_of_what_is_not_there():
    """Inside loops indices that are made of constants are written out where they are read; equations that nobody reads have none."""

    def program(c, x, y):
        def inner(y):
            def step(c, x):
                found = c.at[jnp.arange(8), jnp.arange(8) % 4].max(0.25)
                return found, found

            return y + (jnp.sum(lax.scan(step, c, x, reverse=True)[1]) * 0.01).astype(jnp.float32)

        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(s[1])), (0, y))[1]

    check(program, f32(8, 4), f32(8), f32(2))


def test_a_constant_may_be_constrained():
    """A constraint on what is made of constants alone is nothing on a device, and the array is there."""

    def program(a):
        gradient = jax.grad(lambda unused: jnp.sum(a**2))(a)
        return lax.with_sharding_constraint(gradient, P(None))

    check(program, f32(1))
