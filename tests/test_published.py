"""Models of the library have the sizes that were published."""

from __future__ import annotations

import math

import jax
import pytest

from benchmarks.models.published import PUBLISHED
from benchmarks.strategies import commands

PARAMETERS = {
    "bert_large": 335e6,  # arXiv 1810.04805, section 3: 340M, with the pooler and segments, which are not here
    "gpt_2": 124e6,  # Radford et al. 2019, as released
    "gpt_3_13b": 12.9e9,  # arXiv 2005.14165, table 2.1: 13.0B at width 5140
    "gpt_3_175b": 174.6e9,  # arXiv 2005.14165, table D.1
    "llama_3_8b": 8.03e9,  # as released
    "llama_3_70b": 70.6e9,  # as released
    "mixtral_8x7b": 46.7e9,  # as released
    "resnet_50": 25.5e6,  # torchvision: 25.6M
    "t5_xl": 2.85e9,  # as released, version 1.1
    "vit_large": 304e6,  # arXiv 2010.11929, table 1: 307M
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_their_published_numbers_of_parameters(name):
    """Within 3 %."""
    state = PUBLISHED[name].arguments[0]
    found = sum(math.prod(weight.shape) for weight in jax.tree.leaves(state["params"]))
    assert found == pytest.approx(PARAMETERS[name], rel=0.03)


def test_every_strategy_has_its_command():
    """Each model is found and as experts shard it on each of its clusters, under a name of its own."""
    names = [name for name, _ in commands(PUBLISHED)]
    assert len(PUBLISHED) >= 14 and len(set(names)) == len(names) >= 56
    assert all(len(each.source) > 20 for each in PUBLISHED.values())
