"""Plain attention made fused: softmax(mask(q k^T)) v and its gradient, as a program has them, run in a kernel of JAX's own.

What is replaced was compared with attention in numbers (`attention_match`); the kernels are those of `attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.errors import TraceError
from autoshard.rewrite.attention_kernels import IMPLEMENTATIONS
from autoshard.rewrite.attention_program import fused
from autoshard.rewrite.options import Rewriting
from autoshard.trace import Traced


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention of a program that runs in a kernel.

    Attributes:
        kernel: the name of the implementation.
        places: what is replaced, in words: one for each attention, that of a backward pass apart.
        interpret: whether the kernel runs as operations of JAX, on any device.
        parts: what divides the kernel's heads of keys, which are repeated where they are fewer.
    """

    kernel: str
    places: tuple[str, ...]
    interpret: bool = False
    parts: int = 1
    kind: ClassVar[str] = "fused_attention"

    def apply(self, traced: Traced) -> Traced:
        """The program with its attention in kernels.

        Raises:
            TraceError: its attention is not that for which this was made.
        """
        made = fused(traced, IMPLEMENTATIONS[self.kernel], self.interpret, self.parts)
        if made.places != self.places:
            raise TraceError(
                f"a strategy with fused attention is of a program with attention in {len(self.places)} places, "
                f"{', '.join(self.places)}; {traced.graph.name!r} has {', '.join(made.places) or 'none'}. Search again."
            )
        graph = made.traced.graph
        return replace(made.traced, graph=replace(graph, assumptions=(*graph.assumptions, self.describe(), *dict.fromkeys(made.left))))

    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        chosen = {"interpret": self.interpret, "parts": self.parts if self.parts > 1 else 0}
        return {"kernel": self.kernel, "places": list(self.places), **{name: value for name, value in chosen.items() if value}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The rewrite with these fields.

        Raises:
            ValueError, KeyError: they are not its own.
        """
        if fields["kernel"] not in IMPLEMENTATIONS:
            raise ValueError(f"kernel is one of {', '.join(IMPLEMENTATIONS)}, got {fields['kernel']!r}")
        return cls(fields["kernel"], tuple(fields["places"]), bool(fields.get("interpret", False)), int(fields.get("parts", 1)))

    def describe(self) -> str:
        """What it does, in a sentence without a full stop."""
        heads = f", with its key heads repeated so that {self.parts} devices divide them" if self.parts > 1 else ""
        return f"attention runs in {self.kernel}{heads}: {'; '.join(dict.fromkeys(self.places))}"


def proposals(traced: Traced, cluster: Cluster, rewriting: Rewriting) -> Sequence[FusedAttention]:
    """The fused attention of a program, where it is asked for and there is any."""
    name = compiler_of(cluster).fused_attention
    if rewriting.kernels != "auto" or not name:
        return ()
    made = fused(traced, IMPLEMENTATIONS[name])
    if not made.places:
        return ()
    axes = dict.fromkeys(rewriting.axes or (cluster.n_devices,))
    repeated = [n for n in axes if n > 1 and fused(traced, IMPLEMENTATIONS[name], parts=n).repeats > 1]
    return *(FusedAttention(name, made.places, parts=n) for n in repeated), FusedAttention(name, made.places)
