"""What the rewrites of a program say of it, for the records that have them: a traced function, and the program of a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoshard.ir.remat import Remat


class Rewritten:
    """A program with rewrites (`autoshard.rewrite`), of which each thing is said by one at most."""

    __slots__ = ()
    if TYPE_CHECKING:
        rewrites: tuple[Any, ...]

    def _said(self, name: str, otherwise: Any) -> Any:
        return next((getattr(each, name) for each in self.rewrites if hasattr(each, name)), otherwise)

    @property
    def microbatches(self) -> int:
        """In how many microbatches a step computes its batch."""
        return self._said("microbatches", 1)

    @property
    def remat(self) -> Remat | None:
        """What the backward pass computes again; None: nothing but what the program says itself."""
        return self._said("remat", None)

    @property
    def offload(self) -> tuple[int, ...]:
        """The argument leaves, by their positions, that are in the memory of hosts between steps."""
        return self._said("leaves", ())

    @property
    def stages(self) -> int:
        """Into how many the scanned layers are divided, which run at the same time in one program; 1: it has none."""
        return self._said("stages", 1)

    @property
    def rounds(self) -> int:
        """How often a microbatch goes through all these stages, each time through other layers."""
        return self._said("rounds", 1)

    @property
    def weights_apart(self) -> bool:
        """Whether their gradients of weights wait for those of inputs."""
        return self._said("weights_apart", False)
