"""A program's graph, its plan and its compiled text, as files to look at.

A folder for each program, named after the function and the program's fingerprint:

- ``graph.graphml``: the operations and the arrays that they read, with layouts, for tools that draw graphs.
- ``plan.txt``: every operation with the dimensions that it splits and its layouts, and every planned collective with its reason.
- ``lowered.mlir``: the StableHLO that the compiler is given.
- ``compiled.txt``: the optimised HLO of one device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from autoshard.errors import StrategyError
from autoshard.ir import Collective, Graph, Layout, Op, Rule, layout_to_spec, operand_layout, result_layouts
from autoshard.ir.rule import factor_names
from autoshard.ir.words import array_type, spec_words
from autoshard.lower import holder_values, stored_layout
from autoshard.render import format_bytes, format_seconds
from autoshard.strategy import Program, Record

if TYPE_CHECKING:
    import networkx as nx

FINGERPRINT = 8  # characters of it that name a folder


def check_root(root: Any) -> None:
    """Raises `StrategyError` where what is passed as ``save_graphs`` is no path."""
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise StrategyError(f"save_graphs is the path of a folder to write to, got {root!r}. Name one, such as 'graphs'.")


def save_plan(root: str | os.PathLike[str], record: Record, graph: Graph, rules: Sequence[Rule | None]) -> None:
    """Writes a program's ``graph.graphml`` and ``plan.txt``, in process 0 alone."""
    import networkx as nx

    if jax.process_index() == 0:
        plan, folder = _Plan(record, graph, rules, holder_values(graph)), _folder(root, record.program)
        nx.write_graphml(plan.to_networkx(), folder / "graph.graphml")
        (folder / "plan.txt").write_text("\n".join(plan.lines()) + "\n", encoding="utf-8")


def save_text(root: str | os.PathLike[str], program: Program, name: str, text: str) -> None:
    """Writes a program's ``lowered.mlir`` or ``compiled.txt``, in process 0 alone."""
    if jax.process_index() == 0:
        (_folder(root, program) / name).write_text(text, encoding="utf-8")


def _folder(root: str | os.PathLike[str], program: Program) -> Path:
    name = re.sub(r"\W+", "_", program.name).strip("_") or "program"
    folder = Path(root) / f"{name}-{program.fingerprint[:FINGERPRINT]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StrategyError(
            f"save_graphs is a folder to write to, and '{os.fspath(root)}' cannot be used: {error.strerror}. Name another."
        ) from None
    return folder


@dataclass(frozen=True, slots=True)
class _Plan:
    """A program with its strategy."""

    record: Record
    graph: Graph
    rules: Sequence[Rule | None]
    holders: Mapping[int, int]

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        record, graph = self.record, self.graph
        cost = record.cost
        step = f"{format_seconds(cost.makespan_seconds)} a step and {format_bytes(cost.peak_bytes)} a device are predicted"
        yield f"{record.program.name} on mesh {record.mesh}: {step}."
        yield from ("", "arguments")
        for value, path in zip(graph.arguments, graph.argument_paths, strict=True):
            yield f"  {self._made(value)} = {path}"
        yield from ("", "operations")
        yield from self._ops(graph.ops, "  ")
        yield from ("", "results")
        for value, path, layout in zip(graph.results, graph.result_paths, result_layouts(graph, record.assignment), strict=True):
            yield f"  {path} = %{value} as {self._spec(layout, value)}"
        yield from ("", "collectives")
        yield from (f"  {_sent(one)}" for one in cost.collectives)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The program's graph with what is decided as texts."""
        import networkx as nx

        graph, found = self.graph, nx.MultiDiGraph(name=self.graph.name)
        plain, ops, leaving = graph.to_networkx(), graph.walk(), result_layouts(graph, self.record.assignment)
        for (kind, number), facts in plain.nodes(data=True):
            if kind == "op":
                op = ops[number]
                texts = {"makes": ", ".join(map(self._made, op.results)), "splits": self._splits(op)}
                texts |= {"origin": str(op.origin), "trips": op.trips}
            elif kind == "argument":
                texts = {"makes": self._made(graph.arguments[number])}
            else:
                texts = {"layout": self._spec(leaving[number], graph.results[number])}
            found.add_node(f"{kind} {number}", kind=kind, label=facts["label"], **texts)
        for (kind, number), (reader, place), facts in plain.edges(data=True):
            value = facts["value"]
            read = self._read(ops[place], value) if reader == "op" else leaving[place]
            found.add_edge(f"{kind} {number}", f"{reader} {place}", array=self._made(value), read=self._spec(read, value))
        return found

    def _ops(self, ops: Sequence[Op], indent: str) -> Iterator[str]:
        """A line for each op, and those of its bodies below."""
        for op in ops:
            made = ", ".join(map(self._made, op.results))
            operands = ", ".join(self._operand(op, value) for value in op.operands)
            splits = self._splits(op)
            yield f"{indent}{made} = {op.primitive}({operands}){splits and f' splits {splits}'}  # {op.origin}"
            for body in op.bodies:
                yield f"{indent}  body, {body.trips} times in one run" if body.trips > 1 else f"{indent}  body"
                yield from self._ops(body.ops, indent + "    ")

    def _made(self, value: int) -> str:
        """``%3 float32[8,16] as P('data', None)``."""
        found = self.graph.values[value]
        return f"%{value} {array_type(found.dtype, found.shape)} as {self._spec(self._stored(value), value)}"

    def _operand(self, op: Op, value: int) -> str:
        """The value, and its layout in the op where that is not the one in which it is stored."""
        read = self._read(op, value)
        return f"%{value}" if read == self._stored(value) else f"%{value} as {self._spec(read, value)}"

    def _stored(self, value: int) -> Layout:
        return stored_layout(self.record.assignment, self.holders, value)

    def _read(self, op: Op, value: int) -> Layout:
        """The layout in which an op reads a value; of control flow, that in which it is stored."""
        rule = self.rules[op.index]
        if op.bodies or value not in op.operands:
            return self._stored(value)
        if rule is None:
            return (-1,) * len(self.record.mesh.axes)
        return operand_layout(rule, self.record.assignment.choice(op.index), op.operands.index(value))

    def _spec(self, layout: Layout, value: int) -> str:
        return spec_words(layout_to_spec(layout, self.record.mesh.names, self.graph.values[value].rank))

    def _splits(self, op: Op) -> str:
        """``i=8 over data, reduced k=64 over model``."""
        rule, choice = self.rules[op.index], self.record.assignment.choice(op.index)
        if rule is None:
            return ""
        names, factors = factor_names(rule), rule.factors
        return ", ".join(
            f"{'reduced ' if factors[factor].kind == 'reduction' else ''}{names[factor]}={factors[factor].size} over {axis}"
            for axis, (factor, _) in zip(self.record.mesh.names, choice, strict=True)
            if factor >= 0
        )


def _sent(one: Collective) -> str:
    times = f", {one.count} times" if one.count > 1 else ""
    return f"{one.kind} over {', '.join(one.mesh_axes)} of {format_bytes(one.bytes)}{times}: {one.tensor}, for {one.source}: {one.cause}"
