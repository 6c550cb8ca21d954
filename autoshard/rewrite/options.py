"""What a user asks of rewrites: fused kernels, the load of experts, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import ShardingError
from autoshard.ir.rewrites import Rewrite
from autoshard.rewrite.padding import Padding
from autoshard.trace import Traced


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The rewrites that a search may choose.

    Attributes:
        kernels: ``"auto"``: plain attention may become a fused kernel; None: it stays as it is written.
        balance: the load of the fullest expert over the mean that dropless experts are planned for; None: they stay as they are written.
        padding: whether dimensions that do not divide may be padded, and to which sizes.
        axes: the sizes of the mesh's axes, where the mesh is given.
    """

    kernels: str | None = None
    balance: float | None = 1.0
    padding: bool | Padding = True
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernels: Any, balance: Any, padding: Any, axes: tuple[int, ...] = ()) -> Rewriting:
        """The options, checked.

        Raises:
            ShardingError: one is none of its values.
        """
        if kernels not in (None, "auto"):
            raise ShardingError(f"kernels is None or 'auto', got {kernels!r}. Use 'auto' to have plain attention replaced by kernels.")
        is_number = isinstance(balance, int | float) and not isinstance(balance, bool)
        if balance is not None and (not is_number or not math.isfinite(balance) or balance < 1):
            raise ShardingError(
                "balance is the number of rows of the fullest expert over the mean of all experts, so at least 1; "
                f"got {balance!r}. Use 1.0 for equal loads, 1.25 where the fullest has a quarter more, or None to keep the program."
            )
        if not isinstance(padding, bool | Padding):
            raise ShardingError(
                "padding is True or False, or an autoshard.Padding that says of how many elements shards are multiples; "
                f"got {padding!r}. Use False to keep every dimension at its own size, or autoshard.Padding(quantum=128)."
            )
        return cls(kernels, None if balance is None else float(balance), padding, axes)


Proposals = Callable[[Traced, Cluster, Rewriting], Sequence[Rewrite]]
"""The rewrites of one kind that are worth planning for a program; none where there is nothing to rewrite, which is found out quickly."""
