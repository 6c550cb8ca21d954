"""Random sharding rules, choices of them and meshes' sizes, for laws of the records."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from autoshard.ir import Choice, Factor, Rule, Send
from autoshard.ir.rule import EXCHANGES, OPERATORS

sizes = st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=2).map(tuple)


@st.composite
def rules(draw, most: int = 4) -> Rule:
    """A rule of one or two operands and results, some dimensions of several factors, of all kinds, some with sends."""
    kinds = draw(st.lists(st.sampled_from(("pass_through", "pass_through", "reduction", "permutation", "need_replication")), max_size=most))
    n_operands, n_results = draw(st.integers(1, 2)), draw(st.integers(1, 2))

    def send() -> Send:
        return Send(draw(st.sampled_from(EXCHANGES)), draw(st.integers(0, n_operands + n_results - 1)), draw(st.integers(0, 2)))

    def factor(kind: str) -> Factor:
        operator = draw(st.sampled_from(OPERATORS)) if kind == "reduction" else None
        sends = tuple(send() for _ in range(draw(st.integers(0, 2)))) if kind in ("reduction", "permutation") else ()
        return Factor(draw(st.sampled_from((1, 2, 4, 6, 8))), kind, operator, sends)

    def tensor(allowed: list[int]):
        order = draw(st.permutations(allowed))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=2)))
        return tuple(tuple(order[start:end]) for start, end in itertools.pairwise((0, *cuts, len(order)))) if order or cuts else ()

    factors = tuple(map(factor, kinds))
    some = st.lists(st.integers(0, max(len(factors) - 1, 0)), unique=True) if factors else st.just([])
    operands = tuple(tensor(draw(some)) for _ in range(n_operands))
    results = tuple(tensor([f for f in draw(some) if factors[f].kind != "reduction"]) for _ in range(n_results))
    return Rule(factors, operands, results)


def choices(rule: Rule, n_axes: int) -> list[Choice]:
    """Every choice of a rule, legal or not."""
    rank = max(map(len, rule.results))
    per_axis = [(-1, -1)]
    for factor, entry in enumerate(rule.factors):
        per_axis += [(factor, scatter) for scatter in range(-1, rank if entry.kind == "reduction" else 0)]
    return list(itertools.product(per_axis, repeat=n_axes))
