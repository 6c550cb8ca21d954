"""What a rewritten train step keeps between its forward and its backward pass, as plain numbers; everything else is computed again."""

from __future__ import annotations

from dataclasses import dataclass, field

CARRIED = -1  # in place of an equation's number: the value is a carry of the loop


@dataclass(frozen=True, slots=True)
class Kept:
    """What one block of equations, a forward pass and its backward pass, keeps.

    Attributes:
        turn: how many equations the forward pass has.
        places: where its segments begin, except the first; each segment's backward pass computes what it needs of the segment again.
        values: what is kept, as pairs of an equation's number and a result of it; `CARRIED` and the carry's number for a loop's.
        hosted: those of them that are in the memory of hosts between the passes.
    """

    turn: int
    places: tuple[int, ...]
    values: tuple[tuple[int, int], ...] = field(metadata={"least": CARRIED})
    hosted: tuple[tuple[int, int], ...] = field(default=(), metadata={"least": CARRIED})


@dataclass(frozen=True, slots=True)
class LoopKept:
    """What a loop of the forward pass keeps of each trip for that of the backward pass; with the numbers of both equations."""

    forward: int
    backward: int
    kept: Kept


@dataclass(frozen=True, slots=True)
class Remat:
    """The recomputation of a program.

    Attributes:
        mode: what was asked for: ``"fit"``, ``"auto"`` or ``"full"``.
        path: the position of the loop whose body has the forward and the backward pass, ``(equation, 0)``; () for the program itself.
        kept: what the program, or that body, keeps.
        loops: what its loops keep.
        kept_bytes, plain_bytes: what devices keep for the backward pass, of the whole batch, and what they do without recomputation.
        seconds: the time on one device of what is computed again, as long as nothing is sharded.
        hosted_bytes: what is kept in the memory of hosts, of the whole batch.
        replaces: whether it is of the program without the user's own checkpoints.
    """

    mode: str
    path: tuple[int, ...]
    kept: Kept
    loops: tuple[LoopKept, ...]
    kept_bytes: float
    plain_bytes: float
    seconds: float
    hosted_bytes: float = 0.0
    replaces: bool = False
