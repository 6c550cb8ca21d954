"""Rules of matrix decompositions, solvers and transforms: batch dimensions pass through, the others stay whole."""

from __future__ import annotations

from autoshard.ir import Rule, Value
from autoshard.primitives import of_kind, primitive
from autoshard.rules.registry import assemble, free, rule, whole


def _batched(core_rank: int):
    def batched(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
        """Batch dimensions pass through, matrices stay whole: ``([i, j, k])->([i, l, m]) need_replication={j, k, l, m}``."""
        batch = free(operands[0].shape[: operands[0].rank - core_rank])
        return assemble(*([[*batch, *whole(v.shape[len(batch) :])] for v in values] for values in (operands, results)))

    return batched


for _name in of_kind("linear_algebra"):
    rule(_name)(_batched(primitive(_name).core_rank))


@rule("fft")
def fft(x: Value, /, *, results: tuple[Value, ...], fft_lengths: tuple[int, ...], **_) -> Rule:
    """Transformed dimensions, the last ones, stay whole; the others are a batch."""
    return _batched(len(fft_lengths))(x, results=results)
