"""Op sharding rules in Shardy's terms: which dimensions of an op's operands and results are the same factor.

A dot product is ``([i, k], [k, j])->([i, j]) {i=8, j=16, k=4} reduction={k}``. A factor is of one of four kinds:

- *pass_through*: sharding it splits the work and needs no communication;
- *reduction*: sharding it leaves partial results, which its operator (``sum``, ``max``, ...) combines;
- *need_replication*: it cannot be sharded;
- *permutation*: sharding it needs data from other shards.

Beyond Shardy's notation, reductions name their operator, ``reduction={k:max}`` (a plain ``{k}`` is a sum), and factors the data that
their shards exchange, where that is modelled: ``permutation={j/all_gather 1 of 0}`` gathers one element of operand 0 from each shard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import RuleError

KINDS = ("pass_through", "reduction", "need_replication", "permutation")
OPERATORS = ("sum", "max", "min", "prod", "and", "or", "xor")
EXCHANGES = ("all_gather", "collective_permute", "ring", "zigzag")

Dims = tuple[tuple[int, ...], ...]
"""Per dimension of a tensor, its factors from major to minor."""


@dataclass(frozen=True, slots=True)
class Send:
    """One collective between the shards of a factor, over all mesh axes that split it.

    Attributes:
        kind: ``all_gather`` (every shard receives the parts of all), ``collective_permute`` (each receives one other's) or ``ring`` (each
            receives those of all others, one collective_permute after another, while it computes) or ``zigzag`` (each receives two
            halves, by two permutes).
        tensor: the number of the tensor, operands first, then results.
        count: elements along the factor's dimension that each shard sends (all of a tensor without that dimension). Elements that a
            permute brings are appended to the receiving shard, and later sends include them. 0: the whole shard, which is replaced.
    """

    kind: str
    tensor: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.kind not in EXCHANGES or self.tensor < 0 or self.count < 0:
            raise RuleError(f"a send is one of {EXCHANGES} of some elements of a tensor, got {self}.")

    def __str__(self) -> str:
        return f"{self.kind} {self.count or 'all'} of {self.tensor}"


@dataclass(frozen=True, slots=True)
class Factor:
    """One iteration dimension of an op.

    Attributes:
        size: the number of iterations.
        kind: one of `KINDS`.
        operator: the operator that combines a reduction's partial results.
        sends: the exchanges between its shards; a permutation without any cannot be sharded.
    """

    size: int
    kind: str = "pass_through"
    operator: str | None = None
    sends: tuple[Send, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RuleError(f"a factor's kind is one of {KINDS}, got {self.kind!r}.")
        if (self.kind == "reduction") != (self.operator is not None):
            raise RuleError(f"a reduction factor, and no other, names its operator; got {self}.")
        if self.operator is not None and self.operator not in OPERATORS:
            raise RuleError(f"a reduction operator is one of {OPERATORS}, got {self.operator!r}.")
        if self.sends and self.kind not in ("reduction", "permutation"):
            raise RuleError(f"the shards of a reduction or permutation factor, and of no other, send each other data; got {self}.")

    @property
    def shardable(self) -> bool:
        return self.kind in ("pass_through", "reduction") or bool(self.sends)


@dataclass(frozen=True, slots=True)
class Rule:
    """An op's sharding rule.

    Attributes:
        factors: the op's factors; ``operands`` and ``results`` refer to them by position.
        operands: per operand, per dimension, the factors it is made of, from major to minor.
        results: the same for the results.
        given: of an op whose choice the program fixes, as an operand of a user's shard_map: per axis of that one's mesh, its size and the
            factor that it splits, or -1; see `autoshard.ir.assignment.given_choice`.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    given: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for tensor in (*self.operands, *self.results):
            seen = [f for dim in tensor for f in dim]
            if len(seen) != len(set(seen)):
                raise RuleError(f"a factor occurs at most once in a tensor, got {tensor} in {self.factors}.")
            if any(not 0 <= f < len(self.factors) for f in seen):
                raise RuleError(f"a rule has factors 0 to {len(self.factors) - 1}, got {tensor}.")

    def __str__(self) -> str:
        return format_rule(self)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule written in the notation; `str` is the inverse.

        >>> str(Rule.parse("([i, k], [k, j])->([i, j]) {i=8, j=16, k=4} reduction={k}"))
        '([i, k], [k, j])->([i, j]) {i=8, j=16, k=4} reduction={k}'
        """
        return parse_rule(text)


def factor_names(rule: Rule) -> tuple[str, ...]:
    """Shardy's names of a rule's factors: i, j, k, ... z, then z_1, z_2, ..."""
    return tuple(factor_name(position) for position in range(len(rule.factors)))


def factor_name(position: int) -> str:
    """Shardy's name of the factor at a position."""
    letters = "ijklmnopqrstuvwxyz"
    return letters[position] if position < len(letters) else f"z_{position - len(letters) + 1}"


def format_rule(rule: Rule) -> str:
    names = factor_names(rule)

    def tensor(dims: Dims) -> str:
        return "[" + ", ".join("".join(names[f] for f in dim) or "_" for dim in dims) + "]"

    text = f"({', '.join(map(tensor, rule.operands))})->({', '.join(map(tensor, rule.results))})"
    text += " {" + ", ".join(f"{name}={factor.size}" for name, factor in zip(names, rule.factors, strict=True)) + "}"
    for kind in KINDS[1:]:
        members = [name + _suffix(factor) for name, factor in zip(names, rule.factors, strict=True) if factor.kind == kind]
        if members:
            text += f" {kind}={{{', '.join(members)}}}"
    return text


def _suffix(factor: Factor) -> str:
    """The text after a factor's name in its kind's list: a reduction's operator, unless it is a sum, and the sends."""
    operator = "" if factor.operator in (None, "sum") else f":{factor.operator}"
    return operator + (f"/{' + '.join(map(str, factor.sends))}" if factor.sends else "")


_SEND = re.compile(r"(\w+) (\d+|all) of (\d+)")
_RULE = re.compile(r"^\((?P<operands>.*?)\)\s*->\s*\((?P<results>.*?)\)\s*\{(?P<sizes>[^}]*)\}(?P<kinds>.*)$")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")


def parse_rule(text: str) -> Rule:
    match = _RULE.match(text.strip())
    if match is None:
        raise RuleError(f"a rule reads '([i, k], [k, j])->([i, j]) {{i=8, j=16, k=4}} reduction={{k}}', got {text!r}.")
    sizes = {}
    for entry in filter(None, (part.strip() for part in match["sizes"].split(","))):
        name, _, size = entry.partition("=")
        if not _FACTOR.fullmatch(name.strip()) or not size.strip().isdigit():
            raise RuleError(f"a factor size reads 'i=8', got {entry!r} in {text!r}.")
        sizes[name.strip()] = int(size)
    kinds: dict[str, tuple[str, str | None, tuple[Send, ...]]] = {}
    for kind, members in re.findall(r"(\w+)=\{([^}]*)\}", match["kinds"]):
        for member in filter(None, (part.strip() for part in members.split(","))):
            named, _, sent = member.partition("/")
            name, _, operator = named.partition(":")
            sends = tuple(Send(what, int(tensor), 0 if count == "all" else int(count)) for what, count, tensor in _SEND.findall(sent))
            kinds[name] = (kind, (operator or "sum") if kind == "reduction" else None, sends)
    order = {name: position for position, name in enumerate(sizes)}

    def tensors(part: str) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(order[name] for name in _FACTOR.findall(dim)) for dim in body.split(",")) if body.strip() else ()
            for body in re.findall(r"\[([^\]]*)\]", part)
        )

    try:
        factors = tuple(Factor(size, *kinds.get(name, ("pass_through", None, ()))) for name, size in sizes.items())
        return Rule(factors, tensors(match["operands"]), tensors(match["results"]))
    except KeyError as missing:
        raise RuleError(f"factor {missing} has no size in {text!r}. Give every factor as in '{{i=8}}'.") from None
