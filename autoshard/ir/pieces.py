"""Placement of a pipeline's pieces, its program cut in order, on the parts of the devices, each of which has as many chunks.

- ``loop``: piece ``p`` is on part ``p mod S``: chunk after chunk goes through all parts from the first one.
- ``v``: every second chunk goes through the parts in reverse, so that a chunk's last piece and the next one's first are on the same part
  (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).

An array has one block on each device. Of one that is stacked along scanned layers each part has neighbouring rows between steps, those of
as many pieces as it has chunks; in a step the rows of a piece are where it is.
"""

from __future__ import annotations

PLACEMENTS = ("loop", "v")


def part_of(piece: int, n_parts: int, placement: str) -> int:
    """The part of the devices that has a piece.

    >>> [part_of(piece, 3, "loop") for piece in range(6)], [part_of(piece, 3, "v") for piece in range(6)]
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    chunk, part = divmod(piece, n_parts)
    return n_parts - 1 - part if placement == "v" and chunk % 2 else part


def piece_of(part: int, chunk: int, n_parts: int, placement: str) -> int:
    """The piece that is a chunk of a part of the devices."""
    return chunk * n_parts + part_of(chunk * n_parts + part, n_parts, placement)


def rows_of(piece: int, chunks: int) -> int:
    """The part of the devices that has the rows of a piece's layers between steps.

    >>> [rows_of(piece, 2) for piece in range(6)]
    [0, 0, 1, 1, 2, 2]
    """
    return piece // chunks
