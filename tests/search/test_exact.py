"""The exact searchers agree: dynamic programming, integer programming and brute force, on random small programs.

``python -m pytest -m slow tests/search/test_exact.py`` runs two hundred and more.
"""

from __future__ import annotations

import pytest
from exact_searchers import agree


def test_the_exact_searchers_agree():
    """On thirty random programs."""
    assert agree(range(54)) >= 30


@pytest.mark.slow(minutes=10)
def test_the_exact_searchers_agree_on_many():
    """On two hundred more."""
    assert agree(range(54, 450)) >= 200
