"""Small random pairwise models, and their minima by enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from autoshard.inference.model import PairwiseModel


@st.composite
def small_models(draw) -> PairwiseModel:
    """Up to seven variables of up to four labels, random pairs among them; whole numbers, which tie often."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unary = [generator.integers(0, 9, n).astype(float) for n in sizes]
    edges = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes)) if draw(st.booleans())]
    return PairwiseModel(unary, {(i, j): generator.integers(0, 9, (sizes[i], sizes[j])).astype(float) for i, j in edges})


def labellings(model: PairwiseModel):
    """All labels of a model."""
    return product(*map(range, model.sizes))


def enumerated(model: PairwiseModel) -> float:
    """The least energy."""
    return min(map(model.energy, labellings(model)))


def restricted(model: PairwiseModel, kept) -> PairwiseModel:
    """The model of some labels of each variable."""
    unary = [costs[labels] for costs, labels in zip(model.unary, kept, strict=True)]
    return PairwiseModel(unary, {(i, j): table[kept[i][:, None], kept[j]] for (i, j), table in model.pairs.items()})
