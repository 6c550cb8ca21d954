"""The cut of one microbatch's program into stages.

*Forward.* The operations up to the loss are cut in program order, at places across which fewer bytes go than at all places near them: the
largest stage is as small as these allow, and of the cuts within 3 % of that the one with the fewest bytes; where other places allow one
that is 5 % smaller, these are taken. Operations are weighed by their predicted seconds, where they are known, each with the operations of
the backward pass that will be on its stage; else by their products' FLOPs, and little by the bytes that they move. What a single operation
of the backward pass reads, such as a block that is recomputed, counts as bytes wherever a cut would divide it.

*Backward.* Each operation goes where it reads least from other stages: a linear program over one stage number an operation, whose
constraints are differences of two of these, so that its corners are whole numbers. A value costs its bytes for every stage between where it
is and where it is read; gradients go to earlier stages only. Weights, and what the forward pass keeps, draw operations to their stage.

*Everywhere.* What is made of constants, or of a microbatch's inputs by cheap operations, is computed by each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from autoshard.analysis.values import usage
from autoshard.errors import PipelineError
from autoshard.ir import Op
from autoshard.microbatch.work import product_flops
from autoshard.pipeline.micro import Micro
from autoshard.pipeline.micro_ops import is_backward, light_ops, roots_of
from autoshard.pipeline.stage_numbers import StageNumbers
from autoshard.primitives import is_matrix

SLACK = 0.03  # of the largest stage's work, for fewer bytes between stages
NEAR = 0.25  # of a stage's work: how near two places to cut are between which bytes decide
MOST_OF_WORK = 0.9  # of the products in one operation: stages would wait for the one that has it
LOOPS = (
    ", or write layers one after the other or as a scan over their stacked weights, and leave a loop that adds up gradients of parts of "
    "the batch to microbatches."
)
EVERYWHERE = -1  # an operation of each stage that reads its results
WORTH = 0.05  # of the largest stage's work: how much smaller it has to be for places that more bytes cross
SHIFTED_OPS = 500  # of a microbatch: places of the cut are then improved one by one, each of which is another linear program
SHIFTS = (1, 2, 4)  # operations by which a place is moved
ROUNDS = 3  # of cuts by what the stages of the cut before have to do
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


@dataclass(frozen=True, slots=True)
class Weights:
    """What a cut is found by.

    Attributes:
        seconds: gives the predicted seconds of each operation of a microbatch on the devices of a stage; None: products count.
        shares: what part of the work each stage is to do, of which the mean is 1; None: equal ones.
    """

    seconds: Callable[[Micro], Sequence[float]] | None = None
    shares: Sequence[float] | None = None


BY_PRODUCTS = Weights()


def cut_of(micro: Micro, n_stages: int, weights: Weights = BY_PRODUCTS) -> Cut:
    """The cut of a step into stages; deterministic.

    Raises:
        PipelineError: the forward pass has fewer operations with products than stages, or one of them has nearly all.
    """
    check_stages(n_stages)
    cutter = _Cutter(micro, n_stages, None if weights.seconds is None else np.asarray(weights.seconds(micro)), weights.shares)
    cutter.check()
    return cutter.cut() if cutter.seconds is None or n_stages == 1 else cutter.best()


def check_stages(n_stages: int) -> None:
    """Raises `PipelineError` for what is no number of stages."""
    if isinstance(n_stages, bool) or not isinstance(n_stages, int) or n_stages < 1:
        raise PipelineError(f"A pipeline has a whole number of stages, 1 or more; got {n_stages!r}. Use 2, for instance.")


class _Cutter:
    """The state of one cut: which ops are heavy, and what they read and make."""

    def __init__(self, micro: Micro, n_stages: int, seconds: np.ndarray | None = None, shares: Sequence[float] | None = None):
        self.micro, self.n, self.seconds = micro, n_stages, seconds
        self.shares = np.ones(n_stages) if shares is None else np.asarray(shares, float)
        self.ops, self.values = micro.body.ops, micro.graph.values
        light, backward = light_ops(micro), is_backward(micro)
        sums = {op.index for each in micro.sums for op in (each.update, *each.inner)}
        heavy = [k for k, op in enumerate(self.ops) if not light[k] and op.index not in sums]
        self.forward = [k for k in heavy if not backward[k]]
        self.backward = [k for k in heavy if backward[k]]
        self.maker = {value: k for k in heavy for value in self.ops[k].results}
        self.stage: dict[int, int] = {}
        self.roots = roots_of(micro)
        self.products = np.array([product_flops([self.ops[k]], micro.rules, micro.graph) for k in self.forward])

    def best(self) -> Cut:
        """The cut with the least busiest stage of a few, each of which is weighed by what the stages before it had to do."""
        work = self._work()
        scale, best, least = np.ones(len(work)), None, np.inf
        bounds: list[int] = []
        for _ in range(ROUNDS):
            cut = self.cut(work * scale)
            spent = busy_seconds(cut, self.seconds) / self.shares
            if spent.max() < least * (1 - SLACK):
                best, least, bounds = cut, spent.max(), self.bounds
            at = np.array([self.forward_stage[k] for k in self.forward])
            own = np.bincount(at, work, self.n) / self.shares
            if spent.max() <= own.max() * (1 + SLACK):
                break
            scale = (spent / np.maximum(own, 1e-30))[at]
        assert best is not None, "there is a round"
        return self._shifted(best, bounds) if len(self.ops) <= SHIFTED_OPS else best

    def _shifted(self, best: Cut, bounds: list[int]) -> Cut:
        """The cut with the edges of its busiest stage moved inwards, by a few operations at once, as long as that is worth it."""
        spent, is_better = busy_seconds(best, self.seconds) / self.shares, True
        while is_better:
            is_better, stage = False, int(spent.argmax())
            for edge, step in product((stage - 1, stage), SHIFTS):
                moved = [each + (k == edge) * (step if edge < stage else -step) for k, each in enumerate(bounds)]
                parts = pairwise((0, *moved, len(self.forward)))
                if moved == bounds or not all(self.products[first : max(last, first)].any() for first, last in parts):
                    continue
                cut = self.cut(bounds=moved)
                own = busy_seconds(cut, self.seconds) / self.shares
                if own.max() < spent.max() * (1 - SLACK):
                    best, bounds, spent, is_better = cut, moved, own, True
                    break
        return best

    def cut(self, work: np.ndarray | None = None, bounds: list[int] | None = None) -> Cut:
        """The cut by the work of each operation of the forward pass, or at the places ``bounds`` of it."""
        self.stage = {}
        self.bounds = bounds or self._bounds(work)
        for s, (first, last) in enumerate(pairwise((0, *self.bounds, len(self.forward)))):
            self.stage.update(dict.fromkeys(self.forward[first:last], s))
        self.forward_stage = dict(self.stage)
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

    def check(self) -> None:
        """Raises `PipelineError` where there are no such stages."""
        order, products = self.forward, self.products
        if np.count_nonzero(products) < self.n:
            largest = f", the largest {self._largest(order, products)}" if products.any() else ""
            raise PipelineError(
                f"A pipeline's stages are parts of the forward pass with products in each; got {self.n} stages for "
                f"{np.count_nonzero(products)} operations with products{largest}. Use fewer stages{LOOPS}"
            )
        if products.max() > MOST_OF_WORK * products.sum() and self.n > 1:
            raise PipelineError(
                f"A pipeline's stages share the work, and one operation belongs to one stage: {self._largest(order, products)} has "
                f"{products.max() / products.sum():.0%} of the forward pass's products, got {self.n} stages. Leave stages out{LOOPS}"
            )

    # -- forward ------------------------------------------------------------------------------------------------------------

    def _work(self) -> np.ndarray:
        """The seconds of each operation of the forward pass, with those of the backward pass that follow it to its stage.

        An operation of the backward pass follows the weight that it reads, or whose gradient it computes; else what it reads of the forward
        pass, and other operations of the backward pass, from late to early.
        """
        seconds, place = self.seconds, {k: i for i, k in enumerate(self.forward)}
        assert seconds is not None, "predicted"
        work = seconds[self.forward].copy()
        of_root: dict[int, int] = {}
        for i, k in enumerate(self.forward):
            of_root.update({root: i for value in self.ops[k].operands if (root := self.roots.get(value)) is not None})
        of_term = {term: of_root.get(self.roots.get(each.update.results[0], -1), -1) for each in self.micro.sums for term in each.terms}
        at = {value: place[k] for value, k in self.maker.items() if k in place}
        for k in self.backward:
            op, reads = self.ops[k], dict.fromkeys(self.ops[k].operands)
            made = [at[value] for value in reads if self.maker.get(value, -1) not in place and value in at]
            most = min(made, default=len(work) - 1)
            weights = [of_root[root] for value in reads if (root := self.roots.get(value)) in of_root and value not in self.maker]
            weights += [of_term[value] for value in op.results if of_term.get(value, -1) >= 0]
            kept = [at[value] for value in reads if self.maker.get(value) in place]
            found = min(max(weights or kept or [most]), most)
            at.update(dict.fromkeys(op.results, found))
            work[found] += seconds[k]
        return work

    def _bounds(self, work: np.ndarray | None) -> list[int]:
        """Where the forward pass is cut in program order."""
        order, products = self.forward, self.products
        if work is None:
            work = products + BYTE_FLOPS * np.array([self._bytes(self.ops[k]) for k in order])
        return _cuts(work, products > 0, self._crossing(order), self.shares)

    def _largest(self, order: Sequence[int], products: np.ndarray) -> str:
        return (op := self.ops[order[int(np.argmax(products))]]).primitive + f" at {op.origin}"

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
        program = StageNumbers(self.backward, self.n)
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


def busy_seconds(cut: Cut, seconds: Sequence[float] | np.ndarray | None) -> np.ndarray:
    """Per stage the seconds of its operations; those that each stage computes are left out."""
    stages = np.array(cut.stages)
    return np.bincount(stages[stages >= 0], np.asarray(seconds)[stages >= 0], cut.n_stages)


def _cuts(work: np.ndarray, has_product: np.ndarray, crossing: np.ndarray, shares: np.ndarray) -> list[int]:
    """Where to cut work into parts with a product in each: the largest for its share least, or up to 3 % more where fewer bytes cross."""
    n = len(shares)
    everywhere, counts = (np.concatenate([[0], np.cumsum(each)]) for each in (work, has_product))
    places = _narrow(everywhere, crossing, NEAR * everywhere[-1] / n)
    if len(np.unique(counts[places])) <= n:
        places = np.arange(len(everywhere))
    if _least(everywhere, shares) < (1 - WORTH) * _least(everywhere[places], shares):
        places = np.arange(len(everywhere))
    total, count = everywhere[places], counts[places]
    limit = _least(total, shares) * (1 + SLACK)
    while (found := _parts(total, count, crossing[places], limit * shares)) is None:  # work before the first product needs more
        limit *= 1 + SLACK
    return [int(places[end]) for end in found]


def _parts(total: np.ndarray, count: np.ndarray, bytes_at: np.ndarray, limits: np.ndarray) -> list[int] | None:
    """The places between parts of a line with the fewest bytes, each part of at most so much work; None where there are none.

    Dynamic programming over places, as for layers in Zheng et al., Alpa (OSDI 2022), section 5; O(n x places) reductions. ``total`` and
    ``count`` are the work, and how many products, before each place.
    """
    n, last = len(limits), len(total) - 1
    best = np.full((n + 1, last + 1), np.inf)
    before = np.zeros((n + 1, last + 1), int)
    best[0, 0] = 0.0
    for s in range(1, n + 1):
        for end in range(s, last + 1):
            first, until = int(np.searchsorted(total, total[end] - limits[s - 1])), int(np.searchsorted(count, count[end]))
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


def _least(total: np.ndarray, shares: np.ndarray) -> float:
    """The least largest part of a line, relative to its share, by bisection; ``total`` is the work before each place to cut."""
    least, most = max(float(np.diff(total).max() / shares.max()), total[-1] / shares.sum()), float(total[-1] / shares.min())
    for _ in range(50):
        middle = (least + most) / 2
        at = 0
        for share in shares:
            at = int(np.searchsorted(total, total[at] + middle * share, side="right")) - 1
        least, most = (least, middle) if at >= len(total) - 1 else (middle, most)
    return most


def _narrow(total: np.ndarray, crossing: np.ndarray, near: float) -> np.ndarray:
    """The positions across which no more bytes go than at any other one within so much work, and both ends."""
    first, end = np.searchsorted(total, total - near), np.searchsorted(total, total + near, side="right")
    last = len(total) - 1
    inside = [p for p in range(1, last) if crossing[p] <= crossing[max(first[p], 1) : min(end[p], last)].min()]
    return np.array([0, *inside, last])
