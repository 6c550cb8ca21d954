"""Our rules and those composed from Shardy's agree on JAX's own examples of its primitives, or it is said why not."""

from __future__ import annotations

import random

import pytest
from harnesses import CASES, groups
from referee import EXPLAINED, verdicts

from autoshard.rules import registry
from autoshard.rules.registry import assemble, free, whole


def sample(seed: int, n: int) -> list[str]:
    """A case of each group, and ``n`` others."""
    generator = random.Random(seed)
    chosen = [generator.choice(names) for names in groups().values()]
    return [*chosen, *generator.sample(sorted(set(CASES) - set(chosen)), n)]


def test_shardy_agrees_on_a_sample_of_jax_s_own_cases():
    """A case of each group and 250 others: the same dimensions may be sharded, in the same way, or the table says why not."""
    found = list(verdicts(sample(0, 250)))
    assert len(found) > 300
    assert [str(verdict) for verdict in found if not verdict.agrees and not verdict.reasons] == []


@pytest.mark.slow(minutes=10)
def test_shardy_agrees_on_all_of_jax_s_own_cases():
    """All cases: no difference without a reason, no reason without a difference, and nowhere is less sharded without one."""
    found = list(verdicts(CASES))
    assert [str(verdict) for verdict in found if not verdict.agrees and not verdict.reasons] == []
    assert {words for verdict in found for words in verdict.reasons} == set(EXPLAINED)


def test_a_wrong_rule_is_seen(monkeypatch):
    """A rule that shards what Shardy says must stay whole, and one that shards less, are differences without a reason."""

    def sorted_(make):
        return lambda x, *others, results, **_: assemble([dims := make(x.shape)] * (1 + len(others)), [dims] * len(results))

    cases = groups()["sort"][:3]
    for make in (free, whole):
        monkeypatch.setitem(registry._FUNCTIONS, "sort", sorted_(make))
        wrong = [verdict for verdict in verdicts(cases) if verdict.primitive == "sort"]
        assert wrong and not any(verdict.agrees or verdict.reasons for verdict in wrong)
