"""Programs without their users' checkpoints are those that were never checkpointed."""

from __future__ import annotations

from functools import partial

import pytest

import autoshard
from autoshard.ir.rewrites import Recompute
from autoshard.recompute import without_checkpoints
from autoshard.rewrite import applied
from autoshard.trace import trace
from benchmarks import models
from tests.recompute.test_program import SMALL, compared, flattened, n_products, n_regions, options_of

MAKE = partial(models.gpt, 3, 32, 4, 64, batch=8, length=8, **SMALL)


@pytest.mark.sample(1)
@pytest.mark.parametrize("scan", [False, True])
def test_what_checkpoints_compute_again_is_read_from_the_forward_pass(scan):
    """Without its layers' checkpoints a program has the products of one that never had any, and its results."""
    plain, by_hand = (trace(*flattened(MAKE(remat=remat, scan=scan))) for remat in (False, True))
    opened = without_checkpoints(by_hand)
    assert n_products(by_hand) > n_products(opened) == n_products(plain) and n_regions(opened) == 0
    assert without_checkpoints(plain) is plain
    compared(by_hand, opened, applied(Recompute(options_of(opened).replaced[-1]), by_hand))


def test_replaced_checkpoints_are_no_slower_than_the_users(tmp_path):
    """``remat="replace"`` takes the user's placement or a faster one: here there is memory for all; the file is read again."""
    step, arguments = MAKE(remat=True)
    common = {"cluster": "v5e:1x1", "mesh": {"data": 1}, "donate_argnums": 0, "microbatches": None}
    own, found = (autoshard.search(step, *arguments, remat=remat, **common) for remat in (None, "replace"))
    assert found.cost.flops < own.cost.flops and found.cost.makespan_seconds <= own.cost.makespan_seconds
    found.save(tmp_path / "found.json")
    read = autoshard.load(tmp_path / "found.json")
    assert read.record.program == found.record.program and read.record.program.remat.replaces
