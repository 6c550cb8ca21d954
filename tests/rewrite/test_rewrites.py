"""Rewrites as a whole: the search keeps the fastest variant, its record brings it back."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

import autoshard
from autoshard.ir.rewrites import KINDS, Rewrite
from autoshard.plan import variants
from autoshard.rewrite.base import APPLIED
from autoshard.trace import Traced
from autoshard.trace.traced import rebuilt


@dataclass(frozen=True, slots=True)
class Unsorted(Rewrite):
    """A program that sums sorted numbers, without the sort."""

    share: float = 1.0
    kind: ClassVar[str] = "unsorted"

    def describe(self) -> str:
        return "sums without a sort"


def without_sort(rewrite: Unsorted, traced: Traced) -> Traced:
    jaxpr = traced.jaxpr.jaxpr
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sort")
    same = {eqn.outvars[0]: eqn.invars[0]}
    kept = [each for each in jaxpr.eqns if each is not eqn]
    eqns = [each.replace(invars=[same.get(x, x) if isinstance(x, Var) else x for x in each.invars]) for each in kept]
    new = Jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns, jaxpr.effects, jaxpr.debug_info)
    return rebuilt(traced, ClosedJaxpr(new, traced.jaxpr.consts), rewrite)


@pytest.fixture
def unsorted(monkeypatch: pytest.MonkeyPatch) -> None:
    def proposals(traced: Traced, cluster: Any, rewriting: Any) -> list[Unsorted]:
        return [Unsorted(0.5)] if any(op.primitive == "sort" for op in traced.graph.ops) else []

    monkeypatch.setattr(variants, "PROPOSALS", (proposals,))
    monkeypatch.setitem(KINDS, Unsorted.kind, Unsorted)
    monkeypatch.setitem(APPLIED, Unsorted, without_sort)



def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.sort(jnp.ravel(x @ w)))


ARGS = jnp.eye(16), jnp.arange(131072.0).reshape(8192, 16) / 131072


@pytest.mark.usefixtures("unsorted")
def test_the_faster_variant_is_kept_recorded_and_run(tmp_path):
    as_written = autoshard.search(plain, *ARGS, cluster="cpu:8", searcher="data_parallel")
    assert as_written.record.program.rewrites == (Unsorted(0.5),)
    as_written.save(tmp_path / "found.json")
    loaded = autoshard.load(tmp_path / "found.json")
    assert loaded.record.program == as_written.record.program
    for strategy in (as_written, loaded):
        np.testing.assert_allclose(strategy.apply(plain)(*ARGS), plain(*ARGS), rtol=1e-5)
        assert "sort" not in strategy.apply(plain).lower(*ARGS).as_text()
    assert as_written.what_if(mesh={"x": 4, "y": 2}).strategy.record.program.rewrites == as_written.record.program.rewrites


@pytest.mark.usefixtures("unsorted")
def test_an_unknown_rewrite_is_refused_by_name(monkeypatch, tmp_path):
    autoshard.search(plain, *ARGS, cluster="cpu:8", searcher="data_parallel").save(tmp_path / "found.json")
    monkeypatch.delitem(KINDS, Unsorted.kind)
    with pytest.raises(autoshard.StrategyError, match=r'program.rewrites\[0\].kind: expected one of fused_attention, .*got "unsorted"'):
        autoshard.load(tmp_path / "found.json")


@pytest.mark.parametrize(("option", "value", "words"), [
    ("balance", 0.9, "at least 1"), ("balance", True, "at least 1"), ("kernels", "yes", "None or 'auto'"), ("padding", 8, "True or False"),
])  # fmt: skip
@pytest.mark.parametrize("of", [lambda **options: autoshard.search(plain, *ARGS, cluster="cpu:8", **options), autoshard.parallelize])
def test_options_of_rewrites_are_checked(of, option, value, words):
    with pytest.raises(autoshard.ShardingError, match=words):
        of(**{option: value})
