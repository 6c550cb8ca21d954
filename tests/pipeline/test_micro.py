"""Sums over microbatches and their terms."""

from __future__ import annotations

from types import SimpleNamespace

from autoshard.pipeline.micro import _terms


def addition(one: int, other: int, result: int) -> SimpleNamespace:
    return SimpleNamespace(primitive="add_any", operands=(one, other), results=(result,))


def test_a_long_sum_has_all_its_terms():
    """As many as a weight has uses, in order, without a call for each."""
    n = 5000
    makers = {n + k: addition(n + k - 1 if k > 1 else 0, k, n + k) for k in range(1, n)}
    terms, inner = _terms(2 * n - 1, makers, dict.fromkeys(range(2 * n), 1))
    assert terms == list(range(n))
    assert [op.results[0] for op in inner] == list(range(2 * n - 1, n, -1))


def test_what_others_read_is_a_term():
    """A part of the sum that has another reader stays one value."""
    makers = {3: addition(0, 1, 3), 4: addition(3, 2, 4)}
    assert _terms(4, makers, {0: 1, 1: 1, 2: 1, 3: 2, 4: 1})[0] == [3, 2]
