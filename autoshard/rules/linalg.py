"""Rules of matrix decompositions, solvers and transforms: batch dimensions and right-hand sides pass through, the others stay whole."""

from __future__ import annotations

from autoshard.ir import Factor, Rule, Value
from autoshard.primitives import of_kind, primitive
from autoshard.rules.registry import assemble, free, registered, rule, whole


def _batched(core_rank: int):
    def batched(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
        """Batch dimensions pass through, matrices stay whole: ``([i, j, k])->([i, l, m]) need_replication={j, k, l, m}``."""
        batch = free(operands[0].shape[: operands[0].rank - core_rank])
        return assemble(*([[*batch, *whole(v.shape[len(batch) :])] for v in values] for values in (operands, results)))

    return batched


@rule("triangular_solve", "tridiagonal_solve")
def solve(*operands: Value, left_side: bool = True, **_) -> Rule:
    """Systems with several right-hand sides, each of which is solved by itself: ``([i, l, m], [i, n, k])->([i, j, k])``."""
    *matrix, sides = operands
    *sizes, rows, columns = sides.shape
    batch = free(sizes)
    (each,), unknowns = free([columns if left_side else rows]), [rows if left_side else columns]

    def solved() -> list[Factor]:
        return [*batch, *whole(unknowns), each] if left_side else [*batch, each, *whole(unknowns)]

    return assemble([*([*batch, *whole(v.shape[len(batch) :])] for v in matrix), solved()], [solved()])


for _name in of_kind("linear_algebra"):
    if _name not in registered():
        rule(_name)(_batched(primitive(_name).core_rank))


@rule("fft")
def fft(x: Value, /, *, results: tuple[Value, ...], fft_lengths: tuple[int, ...], **_) -> Rule:
    """Transformed dimensions, the last ones, stay whole; the others are a batch."""
    return _batched(len(fft_lengths))(x, results=results)
