"""Windows over shards: what each reads, whatever its span, stride, dilation and padding."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax
from rule_examples import normal, operation
from test_rule_law import check_law, choices

from autoshard.ir import legal
from autoshard.rules.window import Window

SHARDS = 2


@st.composite
def windows(draw, lowest: int = -2) -> tuple[Window, int, int]:
    """A window, a size and as many steps as make it even, cut into two shards that hold its halos."""
    window = Window(draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(lowest, 4)))
    common = math.gcd(window.stride, window.spread)
    smallest = -(-max(*window.halo, 1) * common // window.stride)
    units = SHARDS * (smallest + draw(st.integers(0, 2)))
    return window, units * window.stride // common, units * window.spread // common


def read(window: Window, size: int, steps: int, low: int, first: int) -> list[list[int]]:
    """Per step the elements that it reads, numbered from ``first``; -1 for padding."""
    found = []
    for step in range(steps):
        positions = [step * window.stride - low + k for k in range(window.span)]
        found.append([p // window.spread + first if p % window.spread == 0 and 0 <= p < size * window.spread else -1 for p in positions])
    return found


@given(windows())
@settings(max_examples=500)
def test_a_shard_with_its_halos_reads_what_the_whole_does(case):
    """The steps of a shard read the same elements in the same order, and its padding covers just them."""
    window, size, steps = case
    whole = read(window, size, steps, window.low, 0)
    local, each = size // SHARDS, steps // SHARDS
    before, behind = window.halo
    low, high = window.padding(local, each)
    length = before + local + behind
    assert (length - 1) * window.spread + 1 + low + high == (each - 1) * window.stride + window.span
    for shard in range(SHARDS):
        found = read(window, length, each, low, shard * local - before)
        beyond = [[element if 0 <= element < size else -1 for element in step] for step in found]
        assert beyond == whole[shard * each : (shard + 1) * each]


def padding_of(window: Window, size: int, steps: int) -> tuple[int, int]:
    """The padding with which the window makes so many steps over the whole."""
    return window.low, (steps - 1) * window.stride + window.span - window.low - (size - 1) * window.spread - 1


@given(windows(), st.sampled_from([1, 2]))
@settings(max_examples=15)
def test_a_convolution_of_shards_is_the_shard_of_the_convolution(case, dilation):
    """Any even window is offered, and convolving shards with halos is convolving the whole; so is its kernel's gradient."""
    window, size, steps = case
    assume((window.span - 1) % dilation == 0)
    taps = (window.span - 1) // dilation + 1
    assume(taps <= steps)

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (window.stride,), [padding_of(window, size, steps)], (window.spread,), (dilation,), ("NWC", "WIO", "NWC")
        )

    op = operation(conv, normal(1, size, 3), normal(taps, 3, 1))
    offered = choices(op.rule, (SHARDS,))
    shared = {f for f in op.rule.operands[0][1] if f in op.rule.results[0][1]}
    assert shared and all(any(f == choice[0][0] for choice in offered) for f in shared if op.rule.factors[f].size % SHARDS == 0)
    check_law(op, op.rule, {(SHARDS,): offered})


@given(windows(lowest=0))
@example((Window(1, 1, 1, 1), 4, 4))
@example((Window(1, 2, 1, 1), 8, 4))
@settings(max_examples=15)
def test_a_pooling_of_shards_is_the_shard_of_the_pooling(case):
    """Any even window is offered, and pooling shards with halos is pooling the whole."""
    window, size, steps = case
    assume(window.span > 1 or window.spread == 1)  # XLA:CPU aborts on negative padding around windows of one (jaxlib 0.10.2)

    def pool(x):
        padding = [padding_of(window, size, steps)]
        return lax.reduce_window(x, -np.inf, lax.max, (window.span,), (window.stride,), padding, (window.spread,))

    op = operation(pool, normal(size))
    offered = choices(op.rule, (SHARDS,))
    assert offered and all(legal(op.rule, choice, (SHARDS,)) for choice in offered)
    check_law(op, op.rule, {(SHARDS,): offered})
