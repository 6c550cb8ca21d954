"""Plain attention made fused: softmax(mask(q k^T)) v and its gradient, as a program has them, run in a kernel of JAX's own.

What is replaced was compared with attention in numbers (`attention_match`); the kernels are those of `attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.errors import TraceError
from autoshard.ir.rewrites import FusedAttention
from autoshard.rewrite.attention_program import fused
from autoshard.rewrite.options import Rewriting
from autoshard.rewrite.ring_attention import IMPLEMENTATIONS, RINGS, is_long
from autoshard.trace import Traced, rebuilt


def with_fused_attention(rewrite: FusedAttention, traced: Traced) -> Traced:
    """The program with its attention in kernels.

    Raises:
        TraceError: its attention is not that for which this was made.
    """
    made = fused(traced, IMPLEMENTATIONS[rewrite.kernel], rewrite.interpret, rewrite.parts)
    if made.places != rewrite.places:
        raise TraceError(
            f"a strategy with fused attention is of a program with attention in {len(rewrite.places)} places, "
            f"{', '.join(rewrite.places)}; {traced.graph.name!r} has {', '.join(made.places) or 'none'}. Search again."
        )
    return rebuilt(traced, made.jaxpr or traced.jaxpr, rewrite, notes=(rewrite.describe(), *made.left))


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
    found = [*(FusedAttention(name, made.places, parts=n) for n in repeated), FusedAttention(name, made.places)]
    if any(is_long(problem, cluster.n_devices) for problem in made.problems):
        found.append(FusedAttention(RINGS[name].name, fused(traced, RINGS[name]).places))
    return found
