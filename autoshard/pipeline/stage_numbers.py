"""The stages of operations by a linear program over one stage number each, in which differences of two of them are charged or bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.errors import PipelineError


class StageNumbers:
    """The linear program of the backward pass: a stage number for each op, between 0 and the last stage."""

    def __init__(self, ops: Sequence[int], n: int):
        self.columns: dict[int, int] = {k: i for i, k in enumerate(ops)}
        self.n = n
        self.prices: list[float] = [1e-6] * len(ops)
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
