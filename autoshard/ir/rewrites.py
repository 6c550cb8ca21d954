"""Rewrites of a program as values: how files have them, and what they do in words. `autoshard.rewrite` applies them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from autoshard.errors import PipelineError
from autoshard.ir.remat import Remat
from autoshard.reader import Node, Written
from autoshard.render import format_bytes, format_count, format_percent, format_seconds

Extent = tuple[tuple[int, int], ...]
"""The parts of a dimension from major to minor, each with its size and its padded size; empty where nothing is padded."""

KERNELS = ("splash attention", "cuDNN's attention", "splash attention in a ring", "cuDNN's attention in a ring")


class Rewrite(Written):
    """One rewrite, a frozen value.

    Attributes:
        kind: the name under which it is recorded.
        without: the option with which a search leaves it out.
    """

    __slots__ = ()
    kind: ClassVar[str]
    without: ClassVar[str]

    def describe(self) -> str:
        """What it does, in a sentence without a full stop."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FusedAttention(Rewrite):
    """Attention of a program that runs in a kernel.

    Attributes:
        kernel: its name, one of `KERNELS`.
        places: what is replaced, in words: one for each attention, that of a backward pass apart.
        interpret: whether the kernel runs as operations of JAX, on any device.
        parts: what divides the kernel's heads of keys, which are repeated where they are fewer.
    """

    kind: ClassVar[str] = "fused_attention"
    without: ClassVar[str] = "kernels=None"

    kernel: str
    places: tuple[str, ...]
    interpret: bool = False
    parts: int = 1

    @classmethod
    def from_json(cls, node: Node) -> Self:
        found = node.record(cls)
        if found.kernel not in KERNELS:
            raise node.error(f"the kernel of attention as one of {', '.join(KERNELS)}")
        return found

    def describe(self) -> str:
        heads = f", with its key heads repeated so that {self.parts} devices divide them" if self.parts > 1 else ""
        return f"attention runs in {self.kernel}{heads}: {'; '.join(dict.fromkeys(self.places))}"


@dataclass(frozen=True, slots=True)
class PackedExperts(Rewrite):
    """Rows of experts, packed.

    Attributes:
        balance: the rows of the fullest expert over the mean that have slots in the first round.
        packed: per kind of layer, the number of experts and the slots of each.
    """

    kind: ClassVar[str] = "experts"
    without: ClassVar[str] = "balance=None"

    balance: float
    packed: tuple[tuple[int, int], ...] = ()

    def describe(self) -> str:
        each = " and ".join(f"rows of {experts:,} experts packed to {slots:,} each" for experts, slots in self.packed)
        return f"experts: {each} (balance {self.balance:g}); a fuller expert takes another round"


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """One dimension that is padded, with all that belong to it.

    Attributes:
        value, dim: a value that has it, by its number in the program, and which one of its dimensions it is.
        extent: its parts, each with its size and its padded size.
        name: what it is called in explanations.
        shards: the number of devices that divides the padded size.
        more_work: by what fraction the step's work grows.
    """

    value: int
    dim: int
    extent: Extent
    name: str = ""
    shards: int = 1
    more_work: float = 0.0

    def __str__(self) -> str:
        """The sentence of explanations."""
        size, padded = map(math.prod, zip(*self.extent, strict=True))
        return f"{self.name}, of size {size:,}, is padded to {padded:,} over {self.shards}: {format_percent(self.more_work)} more work"


@dataclass(frozen=True, slots=True)
class Padded(Rewrite):
    """A program with padded dimensions.

    Attributes:
        dims: one of each class of dimensions that belong together.
        arguments: positions of the argument leaves with padding, each with its dimension and its extent.
        required: whether the user asks for it, so that the program without is no choice.
    """

    kind: ClassVar[str] = "padding"
    without: ClassVar[str] = "padding=False"

    dims: tuple[PaddedDim, ...]
    arguments: tuple[tuple[int, int, Extent], ...] = ()
    required: bool = field(default=False, compare=False)

    def json(self) -> dict[str, Any]:
        dims = [[each.value, each.dim, _parts(each.extent), each.name, each.shards, each.more_work] for each in self.dims]
        return {"dims": dims, "arguments": [[k, dim, _parts(of)] for k, dim, of in self.arguments]}

    @classmethod
    def from_json(cls, node: Node) -> Self:
        part = node.fields("dims", "arguments")
        dims = tuple(
            PaddedDim(value.integer(0), dim.integer(0), _extent(of), name.text(empty=True), shards.integer(1), more.number())
            for value, dim, of, name, shards, more in (one.items(6) for one in part["dims"].items())
        )
        arguments = (one.items(3) for one in part["arguments"].items())
        return cls(dims, tuple((k.integer(0), dim.integer(0), _extent(of)) for k, dim, of in arguments))

    def describe(self) -> str:
        groups: dict[tuple[Extent, int], list[PaddedDim]] = {}
        for each in self.dims:
            groups.setdefault((each.extent, each.shards), []).append(each)
        return "; ".join(map(_together, groups.values()))


def _together(dims: Sequence[PaddedDim]) -> str:
    """The sentence of dimensions of one size."""
    first, more = dims[0], len(dims) - 1
    others = f" and {more} dimension{'s' if more > 1 else ''} more like it" if more else ""
    return str(replace(first, name=f"{first.name}{others}", more_work=sum(each.more_work for each in dims)))


def _parts(of: Extent) -> list[list[int]]:
    return [[*part] for part in of]


def _extent(parts: Node) -> Extent:
    pairs = (part.items(2) for part in parts.items())
    return tuple((n := size.integer(1), padded.integer(n)) for size, padded in pairs)


@dataclass(frozen=True, slots=True)
class Recompute(Rewrite):
    """A program that keeps what a choice says, and computes the rest again; results are the same.

    Attributes:
        remat: the choice.
    """

    kind: ClassVar[str] = "recompute"
    without: ClassVar[str] = "remat=None"

    remat: Remat

    @classmethod
    def of(cls, remat: Remat | None) -> tuple[Self, ...]:
        """The rewrites of a program that computes again what a choice says: none where there is none."""
        return () if remat is None else (cls(remat),)

    def describe(self) -> str:
        remat = self.remat
        saved = f"{format_bytes(remat.kept_bytes)} of {format_bytes(remat.plain_bytes)} are kept for the backward pass"
        saved += f", and {format_bytes(remat.hosted_bytes)} in the memory of hosts" if remat.hosted_bytes else ""
        return f"the rest of the forward pass: {saved}, for {format_seconds(remat.seconds)} more; on one device, unsharded"


@dataclass(frozen=True, slots=True)
class Microbatches(Rewrite):
    """A program as a loop over parts of its batch; results are those of the whole batch, up to the order in which sums are added.

    Attributes:
        microbatches: how many.
    """

    kind: ClassVar[str] = "microbatches"
    without: ClassVar[str] = "microbatches=1"

    microbatches: int = field(metadata={"least": 2})

    @classmethod
    def of(cls, n: int) -> tuple[Self, ...]:
        """The rewrites of a program in so many microbatches: none for one."""
        return (cls(n),) if n > 1 else ()

    def describe(self) -> str:
        n = self.microbatches
        return f"the step computes {n} microbatches one after the other, each of one example in {n}, and adds gradients up"


@dataclass(frozen=True, slots=True)
class OneProgram(Rewrite):
    """A program with its scanned layers in stages, which have a dimension of their own that is constrained to a mesh axis of stages.

    Results are those of the whole batch, up to the order in which sums are added.

    Attributes:
        stages, microbatches, rounds: how many there are.
        weights_apart: whether gradients of weights wait for those of inputs on all stages.
    """

    kind: ClassVar[str] = "one_program"
    without: ClassVar[str] = "stages=None"

    stages: int = field(metadata={"least": 2})
    microbatches: int = field(metadata={"least": 1})
    rounds: int = field(default=1, metadata={"least": 1})
    weights_apart: bool = False

    def __post_init__(self) -> None:
        if self.rounds > 1 and self.microbatches % self.stages:
            raise PipelineError(
                f"in several rounds stages of one program compute as many microbatches as there are stages, and these again: got "
                f"{self.microbatches} microbatches for {self.stages} stages. Use a multiple of the stages, or schedule='one_program'."
            )

    @property
    def tasks(self) -> int:
        """How many microbatches a stage computes in all its rounds, each in one tick."""
        return self.rounds * self.microbatches

    @property
    def ticks(self) -> int:
        """How many there are."""
        return self.tasks + self.stages - 1

    @classmethod
    def from_json(cls, node: Node) -> Self:
        try:
            return node.record(cls)
        except PipelineError:
            raise node.error("as many microbatches as stages or a multiple of them, where they go through these several times") from None

    def describe(self) -> str:
        again = f"; each microbatch goes through all stages {self.rounds} times" if self.rounds > 1 else ""
        again += "; gradients of weights are computed after the last tick, on all stages in each of these" if self.weights_apart else ""
        return (
            f"one program runs {self.stages} stages of the scanned layers at the same time, on {self.microbatches} microbatches, in "
            f"{self.ticks} ticks, in {self.stages - 1} of which each stage has none{again}"
        )


@dataclass(frozen=True, slots=True)
class Offload(Rewrite):
    """A program that takes and returns some argument leaves in the memory of hosts; results are the same.

    Attributes:
        leaves: positions of leaves that results replace, ascending.
    """

    kind: ClassVar[str] = "offload"
    without: ClassVar[str] = "offload=None"

    leaves: tuple[int, ...]

    @classmethod
    def of(cls, leaves: Iterable[int]) -> tuple[Self, ...]:
        """The rewrites of a program with these leaves on hosts: none for none."""
        found = tuple(sorted(leaves))
        return (cls(found),) if found else ()

    def describe(self) -> str:
        leaves = "1 leaf" if len(self.leaves) == 1 else f"{format_count(len(self.leaves))} leaves"
        return f"{leaves} of optimizer state in the memory of hosts between steps"


FORMS = (Recompute, Microbatches, OneProgram, Offload)
"""The rewrites of which a search compares forms of one variant of a program; in the order in which they are applied, after all others."""

KINDS: dict[str, type[Rewrite]] = {each.kind: each for each in (FusedAttention, PackedExperts, Padded, *FORMS)}
"""By the names under which they are recorded, in the order in which they are applied."""


def variant(rewrites: Sequence[Rewrite]) -> tuple[Rewrite, ...]:
    """Those of rewrites that come before its forms: the program is another one, which is searched by itself."""
    return tuple(each for each in rewrites if not isinstance(each, FORMS))


def to_json(rewrites: Sequence[Rewrite]) -> list[dict[str, Any]]:
    """Rewrites as JSON values."""
    return [{"kind": rewrite.kind, **rewrite.json()} for rewrite in rewrites]


def from_json(node: Node) -> tuple[Rewrite, ...]:
    """The rewrites of a file, as `to_json` writes them.

    Raises:
        StrategyError: one is not known, has other fields, or comes before one that is applied before it.
    """
    found: list[Rewrite] = []
    for one in node.items():
        fields = dict(one.members())
        kind = fields.pop("kind", one).one_of(KINDS)
        found.append(KINDS[kind].from_json(Node({name: field.value for name, field in fields.items()}, one.where)))
    places = [[*KINDS].index(each.kind) for each in found]
    if places != sorted(set(places)):
        raise node.error(f"rewrites of different kinds in the order {', '.join(KINDS)}")
    return tuple(found)
