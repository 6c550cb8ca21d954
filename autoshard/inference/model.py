"""Pairwise graphical models (Markov random fields of pair interactions), and their files.

The energy of labels ``x`` is ``sum_i unary[i][x_i] + sum_ij pairs[i, j][x_i, x_j]``; inference looks for the labels of least energy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoshard.errors import SearcherError

Pair = tuple[int, int]
"""Two variables that share a table."""

Pairs = Mapping[Pair, np.ndarray]
"""Pair tables ``(n_i, n_j)`` by their two variables."""

Messages = Mapping[Pair, tuple[np.ndarray, np.ndarray]]
"""Per pair the costs moved into its table: a vector over the labels of its first variable, and one over those of its second."""

SCHEMA = 1
"""The version of the file format."""


@dataclass(frozen=True, slots=True, eq=False)
class PairwiseModel:
    """A sum of unary and pair tables over discrete variables.

    Equal tables may be one array: what is computed from an array is computed once.

    Attributes:
        unary: per variable its costs ``(n_i,) float64``.
        pairs: the pair tables ``(n_i, n_j) float64``, ``i != j``.
    """

    unary: Sequence[np.ndarray]
    pairs: Pairs

    @property
    def sizes(self) -> list[int]:
        """The number of labels of each variable."""
        return [len(costs) for costs in self.unary]

    @property
    def n_entries(self) -> int:
        """The number of entries of all pair tables."""
        return sum(table.size for table in self.pairs.values())

    def energy(self, labels: Sequence[int] | np.ndarray) -> float:
        """The sum of all tables at some labels ``(n_variables,)``."""
        at = np.asarray(labels).tolist()
        total = math.fsum([table.item(label) for table, label in zip(self.unary, at, strict=True)])
        return total + math.fsum([table.item(at[i], at[j]) for (i, j), table in self.pairs.items()])

    def save(self, path: str | Path, **facts: object) -> None:
        """Writes the model as JSON, equal tables once.

        The file has ``schema``, the given ``facts`` (such as ``source`` and ``optimum``), ``tables`` (each a list of numbers or of rows),
        ``unary`` (a table's number per variable), and ``pairs`` (rows of two variables and a table's number).
        """
        numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        tables: list[object] = []

        def number(table: np.ndarray) -> int:
            key = table.shape, table.tobytes()
            if key not in numbers:
                numbers[key] = len(tables)
                tables.append(table.tolist())
            return numbers[key]

        unary = [number(table) for table in self.unary]
        pairs = [[i, j, number(table)] for (i, j), table in self.pairs.items()]
        parts = [f'"{name}": {json.dumps(fact)}' for name, fact in {"schema": SCHEMA, **facts, "unary": unary, "pairs": pairs}.items()]
        rows = ",\n".join(json.dumps(table) for table in tables)
        Path(path).write_text("{" + ",\n".join(parts) + f',\n"tables": [\n{rows}\n]}}\n', encoding="utf-8")


def load(path: str | Path) -> tuple[PairwiseModel, dict[str, object]]:
    """The model of a file that `PairwiseModel.save` wrote, and the file's facts.

    Raises:
        SearcherError: the file is of another schema.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if record.get("schema") != SCHEMA:
        raise SearcherError(f"a model file has schema {SCHEMA}, and {path} has {record.get('schema')!r}. Write it again with this version.")
    tables = [np.array(table, dtype=np.float64) for table in record["tables"]]
    unary = tuple(tables[number] for number in record["unary"])
    pairs = {(i, j): tables[number] for i, j, number in record["pairs"]}
    return PairwiseModel(unary, pairs), {name: fact for name, fact in record.items() if name not in ("tables", "unary", "pairs")}
