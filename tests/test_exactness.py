"""A strategy does exactly the communication it says: the partitioner's collectives, and the compiler's, are the predicted ones."""

from __future__ import annotations

import pytest
from exactness import EMBEDDINGS, MESHES, Pair, by_hand_and_by_strategy, pairs

TOLERANCE = 0.02  # of a step's bytes, where XLA:CPU combines partial sums over two factors one after the other


@pytest.mark.sample(6)
@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_the_partitioner_does_what_is_predicted(pair):
    """Shardy's explicit collectives are the predicted ones in kind, mesh axes, count and bytes."""
    (found,) = pair.verified("shardy")
    assert found.exact, str(found)


COMPILED = [
    Pair("mlp_remat", "fully_sharded 3", tuple(MESHES[0].items())),  # parameters are gathered again, for what is computed again
    Pair("convnet", "recursive_programming", tuple(MESHES[1].items())),
    Pair("lstm", "recursive_programming", tuple(MESHES[0].items())),
    Pair("moe", "recursive_programming", tuple(MESHES[2].items())),
    Pair("gpt_forward", "recursive_programming", tuple(MESHES[0].items())),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("pair", COMPILED, ids=str)
def test_the_compiler_does_what_is_predicted(pair):
    """So are those of the module compiled by XLA:CPU, but for a fiftieth of the bytes; and so is its work."""
    (found,) = pair.verified("cpu")
    assert found.bytes_ratio == pytest.approx(1.0, abs=TOLERANCE), str(found)
    assert found.predicted_flops == pytest.approx(found.actual_flops, rel=0.01), str(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_nothing_is_lost_against_a_program_sharded_by_hand(embedding):
    """With the same shardings the compiled step needs no more memory, reuses the same, and sends less: once for both gradients of the
    embedding, which also makes the logits. The barrier that this takes may part one fusion in two."""
    by_hand, by_strategy = by_hand_and_by_strategy(EMBEDDINGS[embedding])
    assert by_strategy.sent_bytes.keys() == by_hand.sent_bytes.keys()
    assert all(by_strategy.sent_bytes[key] <= by_hand.sent_bytes[key] for key in by_hand.sent_bytes)
    assert sum(by_strategy.sent_bytes.values()) < sum(by_hand.sent_bytes.values())
    assert by_strategy.fusions <= by_hand.fusions + 1
    assert by_strategy.temporary_bytes <= by_hand.temporary_bytes
    assert by_strategy.reused_bytes == by_hand.reused_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_the_compiler_does_what_is_predicted_everywhere(pair):
    """The same for every program, searcher and mesh."""
    (found,) = pair.verified("cpu")
    assert found.bytes_ratio == pytest.approx(1.0, abs=TOLERANCE), str(found)
