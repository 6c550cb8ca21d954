"""Our rules refereed by Shardy's, on every equation that JAX's own examples of its primitives trace to.

Shardy's side is the rule composed from what the equation lowers to, Shardy taken at its word. `EXPLAINED` says of each
difference why ours is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from harnesses import CASES
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard.ir import Rule, Value
from autoshard.primitives import primitive
from autoshard.rules import rule_of, runs_per_shard
from autoshard.rules.shardy import composed, lowered, ranks


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """One equation and both rules; ``theirs`` is None where JAX does not lower it for this platform."""

    equation: JaxprEqn
    groups: frozenset[str]
    ours: Rule | None
    theirs: Rule | None

    @property
    def primitive(self) -> str:
        return self.equation.primitive.name

    @property
    def has_dims(self) -> bool:
        """Whether there is anything that a rule could shard."""
        return any(n > 1 for v in (*self.equation.invars, *self.equation.outvars) for n in getattr(v.aval, "shape", ()))

    @property
    def agrees(self) -> bool:
        return self.theirs is None or shardable(self.ours) == shardable(self.theirs)

    @property
    def more(self) -> bool:
        """Whether ours shards something that theirs does not, or in another way."""
        return bool(shardable(self.ours).items() - shardable(self.theirs).items())

    @property
    def less(self) -> bool:
        """Whether theirs shards something that ours does not, or in another way."""
        return bool(shardable(self.theirs).items() - shardable(self.ours).items())

    @property
    def reasons(self) -> list[str]:
        """The explanations that fit a difference; one is enough."""
        return [] if self.agrees else [words for words, fits in EXPLAINED.items() if fits(self)]

    def __str__(self) -> str:
        return f"{self.primitive} of {[str(v.aval) for v in self.equation.invars]}: {self.ours} here, {self.theirs} there"


def shardable(rule: Rule | None) -> dict[frozenset, tuple]:
    """Kind and operator of each factor that the partitioner may shard, by where it stands: (tensor, dimension, factors to its right).

    Permutations are ours alone: Shardy names them, and has no collectives for them.
    """
    if rule is None:
        return {}
    places: dict[int, set] = {}
    for t, tensor in enumerate((*rule.operands, *rule.results)):
        for d, dim in enumerate(tensor):
            for k, factor in enumerate(reversed(dim)):
                places.setdefault(factor, set()).add((t, d, k))
    kinds = {f: (rule.factors[f].kind, rule.factors[f].operator) for f in places}
    return {frozenset(where): kinds[f] for f, where in places.items() if kinds[f][0] in ("pass_through", "reduction")}


def verdicts(names: Collection[str]) -> Iterator[Verdict]:
    """The verdict of each distinct equation of these cases."""
    found: dict[tuple, tuple[JaxprEqn, set[str]]] = {}
    for name in names:
        harness = CASES[name]
        try:
            jaxpr = jax.make_jaxpr(harness.dyn_fun)(*harness.dyn_args_maker(np.random.RandomState(0))).jaxpr
        except TypeError:  # a case made for another backend
            continue
        for eqn in equations(jaxpr):
            if not primitive(eqn.primitive.name).bodies:  # these have rules, they have none
                avals = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
                key = (eqn.primitive.name, str(sorted((k, str(v)) for k, v in eqn.params.items())), avals)
                found.setdefault(key, (eqn, set()))[1].add(harness.group_name)
    for eqn, groups in found.values():
        yield Verdict(eqn, frozenset(groups), *both(eqn))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr and of those in its parameters, but for what a reduction is by."""
    for eqn in jaxpr.eqns:
        yield eqn
        if primitive(eqn.primitive.name).bodies:
            for param in jax.tree.leaves(dict(eqn.params), is_leaf=lambda p: isinstance(p, (Jaxpr, ClosedJaxpr))):
                if isinstance(param, (Jaxpr, ClosedJaxpr)):
                    yield from equations(param.jaxpr if isinstance(param, ClosedJaxpr) else param)


def both(eqn: JaxprEqn) -> tuple[Rule | None, Rule | None]:
    """Our rule of an equation, and Shardy's."""
    operands, results = ([value(v.aval) for v in side] for side in (eqn.invars, eqn.outvars))
    ours = rule_of(eqn.primitive.name, eqn.params, operands, results)
    try:
        return ours, composed(lowered(eqn), ranks(eqn), as_partitioned=False)
    except NotImplementedError:
        return ours, None


def value(aval: Any) -> Value:
    return Value(tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize)


def _of(*primitives: str) -> Callable[[Verdict], bool]:
    return lambda verdict: verdict.primitive in primitives


def _where(primitive: str, test: Callable[[Any], bool]) -> Callable[[Verdict], bool]:
    return lambda verdict: verdict.primitive == primitive and test(verdict.equation)


# Why ours is right where the two differ.
EXPLAINED: dict[str, Callable[[Verdict], bool]] = {
    "Groups of a convolution stay whole: XLA:CPU aborts on some of them": _where(
        "conv_general_dilated", lambda eqn: eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1
    ),
    "A complex convolution is one operation on TPUs; elsewhere JAX makes it real ones, whose sums are read again": _where(
        "conv_general_dilated", lambda eqn: eqn.invars[0].aval.dtype.kind == "c"
    ),
    "Windows that do not overlap stay on their shard, where Shardy takes every windowed dimension for a permutation": lambda verdict: (
        "window_strides" in verdict.equation.params and verdict.more and not verdict.less
    ),
    "Shardy adds up over space where a window covers it; XLA needs halos for that": lambda verdict: (
        verdict.primitive == "conv_general_dilated" and verdict.less and not verdict.more
    ),
    "XLA adds the shards' lookups up before it fills in what lies outside": _where(
        "gather", lambda eqn: eqn.params["mode"].name == "FILL_OR_DROP"
    ),
    "Its loop asks whether all elements have converged; ours runs it on each shard alone": lambda verdict: (
        runs_per_shard(verdict.primitive, verdict.equation.params) and verdict.more and not verdict.less
    ),
    "The power of zero reads nothing; ours keeps the operand beside the result": _where("integer_pow", lambda eqn: eqn.params["y"] == 0),
    "Both results are halves of the same counts; ours keeps them side by side": _of("iota_2x32_shape"),
    "A position is written by the shard that has it, and XLA gathers to write several": lambda verdict: (
        verdict.primitive == "dynamic_update_slice"
        and not (verdict.less if jax.__version_info__ >= (0, 11) else verdict.more)  # Shardy sharded both, and from jax 0.11 on neither
    ),
}
