"""Matrix decompositions, solvers and transforms: batches pass through, what is decomposed stays whole."""

from __future__ import annotations

from autoshard.ir import Rule, Value
from autoshard.rules.registry import assemble, free, rule, whole

# Rank of the first operand without its batch dimensions, which every operand and result shares.
CORE_RANK = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}


def _batched(core_rank: int):
    def batched(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
        """Batch dimensions pass through, matrices stay whole: ``([i, j, k])->([i, l, m]) need_replication={j, k, l, m}``."""
        batch = free(operands[0].shape[: operands[0].rank - core_rank])
        return assemble(*([[*batch, *whole(v.shape[len(batch) :])] for v in values] for values in (operands, results)))

    return batched


for _primitive, _rank in CORE_RANK.items():
    rule(_primitive)(_batched(_rank))


@rule("fft")
def fft(x: Value, /, *, results: tuple[Value, ...], fft_lengths: tuple[int, ...], **_) -> Rule:
    """Transformed dimensions, the last ones, stay whole; the others are a batch."""
    return _batched(len(fft_lengths))(x, results=results)
