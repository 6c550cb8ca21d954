"""The cut of one microbatch's program into stages.

*Forward.* The operations up to the loss are cut in program order, at places across which fewer bytes go than at all places near them: the
largest stage is as small as these allow, and of the cuts within 3 % of that the one with the fewest bytes. Operations are weighed by their
products' FLOPs, and little by the bytes that they move. What a single operation of the backward pass reads, such as a block that is
recomputed, counts as bytes wherever a cut would divide it.

*Backward.* Each operation goes where it reads least from other stages: a linear program over one stage number an operation, whose
constraints are differences of two of these, so that its corners are whole numbers. A value costs its bytes for every stage between where it
is and where it is read; gradients go to earlier stages only. Weights, and what the forward pass keeps, draw operations to their stage.

*Everywhere.* What is made of constants, or of a microbatch's inputs by cheap operations, is computed by each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from autoshard.analysis.values import usage
from autoshard.errors import PipelineError
from autoshard.ir import Op
from autoshard.microbatch.work import product_flops
from autoshard.pipeline.micro import Micro
from autoshard.pipeline.micro_ops import is_backward, light_ops, roots_of
from autoshard.primitives import is_matrix

SLACK = 0.03  # of the largest stage's work, for fewer bytes between stages
NEAR = 0.25  # of a stage's work: how near two places to cut are between which bytes decide
MOST_OF_WORK = 0.9  # of the products in one operation: stages would wait for the one that has it
LOOPS = (
    ", or write layers one after the other or as a scan over their stacked weights, and leave a loop that adds up gradients of parts of "
    "the batch to microbatches."
)
EVERYWHERE = -1  # an operation of each stage that reads its results
BYTE_FLOPS = 0.01  # products' FLOPs that weigh as much as a byte moved: so few that products decide


@dataclass(frozen=True, slots=True)
class Cut:
    """The stage of each operation of a microbatch.

    Attributes:
        n_stages: how many there are.
        stages: per op of the loop's body its stage; `EVERYWHERE` for one that each stage computes where it reads it.
    """

    n_stages: int
    stages: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The cut as numbers for a file: how many stages, then per run of operations of one stage its number plus one, and its length.

        >>> Cut(2, (0, 0, EVERYWHERE, 1)).numbers
        (2, 1, 2, 0, 1, 2, 1)
        """
        runs = ((stage + 1, len(list(run))) for stage, run in groupby(self.stages))
        return (self.n_stages, *(number for run in runs for number in run))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Cut:
        """The cut of its numbers.

        Raises:
            PipelineError: they are no cut's.
        """
        n_stages, *runs = numbers or (0,)
        stages = [stage - 1 for stage, length in zip(runs[::2], runs[1::2], strict=False) for _ in range(length)]
        if len(runs) % 2 or n_stages < 1 or not all(EVERYWHERE <= stage < n_stages for stage in stages):
            raise PipelineError(f"A cut is the number of stages, and pairs of a stage and a length; got {list(numbers)[:8]}... Cut again.")
        return cls(n_stages, tuple(stages))


def cut_of(micro: Micro, n_stages: int) -> Cut:
    """The cut of a step into stages; deterministic.

    Raises:
        PipelineError: the forward pass has fewer operations with products than stages, or one of them has nearly all.
    """
    check_stages(n_stages)
    return _Cutter(micro, n_stages).cut()


def check_stages(n_stages: int) -> None:
    """Raises `PipelineError` for what is no number of stages."""
    if isinstance(n_stages, bool) or not isinstance(n_stages, int) or n_stages < 1:
        raise PipelineError(f"A pipeline has a whole number of stages, 1 or more; got {n_stages!r}. Use 2, for instance.")


class _Cutter:
    """The state of one cut: which ops are heavy, and what they read and make."""

    def __init__(self, micro: Micro, n_stages: int):
        self.micro, self.n = micro, n_stages
        self.ops, self.values = micro.body.ops, micro.graph.values
        light, backward = light_ops(micro), is_backward(micro)
        sums = {op.index for each in micro.sums for op in (each.update, *each.inner)}
        heavy = [k for k, op in enumerate(self.ops) if not light[k] and op.index not in sums]
        self.forward = [k for k in heavy if not backward[k]]
        self.backward = [k for k in heavy if backward[k]]
        self.maker = {value: k for k in heavy for value in self.ops[k].results}
        self.stage: dict[int, int] = {}
        self.roots = roots_of(micro)

    def cut(self) -> Cut:
        self._cut_forward()
        self._pull()
        self._place_backward()
        stages = [self.stage.get(k, EVERYWHERE) for k in range(len(self.ops))]
        position = {op.index: k for k, op in enumerate(self.ops)}
        for each in self.micro.sums:
            # A sum whose terms are of several stages is computed at each of them; the last term's stage stands for it here.
            at = [self.stage[self.maker[term]] for term in each.terms if term in self.maker]
            for op in (each.update, *each.inner):
                stages[position[op.index]] = min(at, default=0)
        return Cut(self.n, tuple(stages))

    # -- forward ------------------------------------------------------------------------------------------------------------

    def _cut_forward(self) -> None:
        """Cuts the forward pass in program order."""
        micro, order = self.micro, self.forward
        products = np.array([product_flops([self.ops[k]], micro.rules, micro.graph) for k in order])
        if np.count_nonzero(products) < self.n:
            largest = f", the largest {self._largest(order, products)}" if products.any() else ""
            raise PipelineError(
                f"A pipeline's stages are parts of the forward pass with products in each; got {self.n} stages for "
                f"{np.count_nonzero(products)} operations with products{largest}. Use fewer stages{LOOPS}"
            )
        if products.max() > MOST_OF_WORK * products.sum() and self.n > 1:
            self._refuse(order, products)
        work = products + BYTE_FLOPS * np.array([self._bytes(self.ops[k]) for k in order])
        bounds = _cuts(work, products > 0, self._crossing(order), self.n)
        for s, (first, last) in enumerate(zip([0, *bounds], [*bounds, len(order)], strict=True)):
            self.stage.update(dict.fromkeys(order[first:last], s))

    def _refuse(self, order: Sequence[int], products: np.ndarray) -> None:
        share = products.max() / products.sum()
        raise PipelineError(
            f"A pipeline's stages share the work, and one operation belongs to one stage: {self._largest(order, products)} has {share:.0%} "
            f"of the forward pass's products, got {self.n} stages. Leave stages out{LOOPS}"
        )

    def _largest(self, order: Sequence[int], products: np.ndarray) -> str:
        op = self.ops[order[int(np.argmax(products))]]
        return f"{op.primitive} at {op.origin}"

    def _bytes(self, op: Op) -> float:
        return op.trips * sum(self.values[value].nbytes for value in (*op.operands, *op.results))

    def _crossing(self, order: Sequence[int]) -> np.ndarray:
        """Per position in the order the bytes that a cut there sends in a microbatch."""
        place = {k: i for i, k in enumerate(order)}
        last = {value: i for i, k in enumerate(order) for value in self.ops[k].operands if self.maker.get(value) in place}
        sizes, born = [self.values[v].nbytes for v in last], [place[self.maker[v]] + 1 for v in last]
        return usage(len(order), sizes, born, [i + 1 for i in last.values()]) + self._dividing(order)

    def _dividing(self, order: Sequence[int]) -> np.ndarray:
        """Per position in the order the bytes that operations of the backward pass read from the other side of a cut there."""
        place = {k: i for i, k in enumerate(order)}
        weights: dict[int, set[int]] = {}
        last: dict[int, int] = {}
        for i, k in enumerate(order):
            for value in self.ops[k].operands:
                last[value] = i
                if (root := self.roots.get(value)) is not None:
                    weights.setdefault(root, set()).add(i)
        found = np.zeros(len(order) + 1)
        for k in self.backward:
            sources: list[tuple[int, int, float]] = []  # the first and the last position that has it, and its bytes
            for value in dict.fromkeys(self.ops[k].operands):
                at = weights.get(self.roots.get(value, -1), set())
                if self.maker.get(value) in place:
                    i = place[self.maker[value]]
                    sources.append((i, max(i, last.get(value, i)), self.values[value].nbytes))
                elif len(at) == 1:
                    (i,) = at
                    sources.append((i, i, self.values[value].nbytes))
            for start, end in pairwise(sorted({i + 1 for source in sources for i in source[:2]})):
                before = sum(size for _, until, size in sources if until < start)
                after = sum(size for made, _, size in sources if made >= start)
                found[start:end] += min(before, after)
        return found

    def _pull(self) -> None:
        """Moves ops without products to the first stage that reads them, where they read no more than they make."""
        readers: dict[int, list[int]] = {}
        for k in self.forward:
            for value in self.ops[k].operands:
                if value in self.maker:
                    readers.setdefault(self.maker[value], []).append(k)
        for k in reversed(self.forward):
            op = self.ops[k]
            if op.bodies or is_matrix(op.primitive) or not readers.get(k):
                continue
            to = min(self.stage[reader] for reader in readers[k])
            read = sum(self.values[value].nbytes for value in dict.fromkeys(op.operands) if value in self.maker)
            if to > self.stage[k] and read <= sum(self.values[value].nbytes for value in op.results):
                self.stage[k] = to

    # -- backward -----------------------------------------------------------------------------------------------------------

    def _place_backward(self) -> None:
        if not self.backward or self.n == 1:
            self.stage.update(dict.fromkeys(self.backward, 0))
            return
        program = _Stages(self.backward, self.n)
        scale = 1.0 / max(self.values[value].nbytes for k in self.backward for value in self.ops[k].results)
        homes = self._homes()
        reach = self._reach()
        for k in self.backward:
            for value in dict.fromkeys(self.ops[k].operands):
                price = self.values[value].nbytes * scale + 1e-4
                maker = self.maker.get(value)
                if maker is None:
                    at = homes.get(self.roots.get(value, -1))
                    if at is not None:
                        program.near(k, at, at, price / self.micro.n)
                elif maker in self.stage:
                    program.near(k, *reach[value], price)
                else:
                    program.sent(value, maker, k, price)
        for each in self.micro.sums:
            at = homes.get(self.roots.get(each.update.results[0], -1))
            for term in each.terms:
                if at is not None and self.maker.get(term) in program.columns:
                    program.near(self.maker[term], at, at, (self.values[term].nbytes * scale + 1e-4) / self.micro.n)
        self.stage.update(program.solved())

    def _homes(self) -> dict[int, int]:
        """Per argument of the step that the forward pass reads in one stage, the stage."""
        found: dict[int, set[int]] = {}
        for k in self.forward:
            for value in self.ops[k].operands:
                if (root := self.roots.get(value)) is not None:
                    found.setdefault(root, set()).add(self.stage[k])
        return {root: next(iter(stages)) for root, stages in found.items() if len(stages) == 1}

    def _reach(self) -> dict[int, tuple[int, int]]:
        """Per value of the forward pass the first and the last stage that has it."""
        found = {value: (self.stage[k], self.stage[k]) for k in self.forward for value in self.ops[k].results}
        for k in self.forward:
            for value in self.ops[k].operands:
                if value in found:
                    found[value] = found[value][0], max(found[value][1], self.stage[k])
        return found


def _cuts(work: np.ndarray, has_product: np.ndarray, crossing: np.ndarray, n: int) -> list[int]:
    """Where to cut a line of work into ``n`` parts with a product in each: the largest as small as can be, or up to 3 % more where fewer
    bytes cross.
    """
    everywhere, counts = (np.concatenate([[0], np.cumsum(each)]) for each in (work, has_product))
    places = _narrow(everywhere, crossing, NEAR * everywhere[-1] / n)
    if len(np.unique(counts[places])) <= n:
        places = np.arange(len(everywhere))
    total, count = everywhere[places], counts[places]
    limit = _least(total, n) * (1 + SLACK)
    while (found := _parts(total, count, crossing[places], n, limit)) is None:  # work before the first product needs more
        limit *= 1 + SLACK
    return [int(places[end]) for end in found]


def _parts(total: np.ndarray, count: np.ndarray, bytes_at: np.ndarray, n: int, limit: float) -> list[int] | None:
    """The places between ``n`` parts of a line with the fewest bytes, each part of at most so much work; None where there are none.

    Dynamic programming over places, as for layers in Zheng et al., Alpa (OSDI 2022), section 5; O(n x places) reductions.

    Args:
        total, count: the work, and how many products, before each place.
    """
    last = len(total) - 1
    best = np.full((n + 1, last + 1), np.inf)
    before = np.zeros((n + 1, last + 1), int)
    best[0, 0] = 0.0
    for s in range(1, n + 1):
        for end in range(s, last + 1):
            first, until = int(np.searchsorted(total, total[end] - limit)), int(np.searchsorted(count, count[end]))
            if first < until:
                start = first + int(np.argmin(best[s - 1, first:until]))
                best[s, end] = best[s - 1, start] + (bytes_at[end] if end < last else 0.0)
                before[s, end] = start
    if not np.isfinite(best[n, last]):
        return None
    ends, end = [], last
    for s in range(n, 1, -1):
        end = int(before[s, end])
        ends.append(end)
    return ends[::-1]


def _least(total: np.ndarray, n: int) -> float:
    """The least largest of ``n`` parts of a line, by bisection; ``total`` is the work before each place to cut."""
    least, most = max(float(np.diff(total).max()), total[-1] / n), float(total[-1])
    for _ in range(50):
        middle = (least + most) / 2
        at = 0
        for _ in range(n):
            at = int(np.searchsorted(total, total[at] + middle, side="right")) - 1
        least, most = (least, middle) if at >= len(total) - 1 else (middle, most)
    return most


def _narrow(total: np.ndarray, crossing: np.ndarray, near: float) -> np.ndarray:
    """The positions across which no more bytes go than at any other one within so much work, and both ends."""
    first, end = np.searchsorted(total, total - near), np.searchsorted(total, total + near, side="right")
    last = len(total) - 1
    inside = [p for p in range(1, last) if crossing[p] <= crossing[max(first[p], 1) : min(end[p], last)].min()]
    return np.array([0, *inside, last])


class _Stages:
    """The linear program of the backward pass: a stage number for each op, between 0 and the last stage."""

    def __init__(self, ops: Sequence[int], n: int):
        self.columns = {k: i for i, k in enumerate(ops)}
        self.n = n
        self.prices = [1e-6] * len(ops)
        self.bounds: list[tuple[float, float | None]] = [(0, n - 1)] * len(ops)
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []
        self.lowest: dict[int, int] = {}  # per value the column of the lowest stage that reads it

    def near(self, op: int, low: int, high: int, price: float) -> None:
        """Charges an op for every stage that it is below ``low`` or above ``high``."""
        distance = self._column(price, (0, None))
        self._at_most({self.columns[op]: 1.0, distance: -1.0}, high)
        self._at_most({self.columns[op]: -1.0, distance: -1.0}, -low)

    def sent(self, value: int, maker: int, reader: int, price: float) -> None:
        """Charges a value for every stage between its maker and the lowest reader, and keeps readers below makers."""
        if value not in self.lowest:
            self.lowest[value] = self._column(-price, (0, self.n - 1))
            self.prices[self.columns[maker]] += price
            self._at_most({self.lowest[value]: 1.0, self.columns[maker]: -1.0}, 0)
        self._at_most({self.lowest[value]: 1.0, self.columns[reader]: -1.0}, 0)
        self._at_most({self.columns[reader]: 1.0, self.columns[maker]: -1.0}, 0)

    def solved(self) -> dict[int, int]:
        """The stage of each op."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        rows, columns, entries = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        matrix = coo_matrix((entries, (rows, columns)), shape=(len(self.limits), len(self.prices)))
        found = linprog(self.prices, A_ub=matrix, b_ub=self.limits, bounds=self.bounds, method="highs-ds")
        if found.x is None:
            raise PipelineError(
                f"where {self.n} stages begin in the backward pass is a linear program, which HiGHS did not solve: {found.message} Use "
                "another number of stages."
            )
        return {op: round(found.x[column]) for op, column in self.columns.items()}

    def _column(self, price: float, bounds: tuple[float, float | None]) -> int:
        self.prices.append(price)
        self.bounds.append(bounds)
        return len(self.prices) - 1

    def _at_most(self, entries: Mapping[int, float], limit: float) -> None:
        self.entries += [(len(self.limits), column, entry) for column, entry in entries.items()]
        self.limits.append(limit)
