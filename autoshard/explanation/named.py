"""The tensors that a name is of: arguments, results, or values that the program computes.

An argument or a result is named by its path, a pattern, the end of one that no other has, or the module that has it. A computed value is
named as `jax.ad_checkpoint.checkpoint_name` names it, by its source line (``gpt.py:41``), by its layer, or by its operation (``op 57``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autoshard.errors import StrategyError
from autoshard.explanation.data import TensorGroup
from autoshard.explanation.groups import argument_groups, shard_bytes
from autoshard.explanation.layers import line_of, pass_of
from autoshard.explanation.program import Judged
from autoshard.ir import Op, Spec, layout_to_spec
from autoshard.ir.naming import NEAR, near_words, parts
from autoshard.ir.words import array_type, spec_words
from autoshard.primitives import moves

_LINE = re.compile(r"(?:.*[/\\])?([^/\\]+):(\d+)")
_OP = re.compile(r"(?:op|#)\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Named:
    """Tensors of one name.

    Attributes:
        kind: ``"argument"``, ``"result"`` or ``"value"``, one that the program computes.
        group: what they have in common.
        values: their numbers.
        mirrors: those of arguments that mirror them, as an optimizer's moments do.
        remark: a sentence on what else the name is of, or on a result that is an argument's new value; empty where there is none.
    """

    kind: str
    group: TensorGroup
    values: tuple[int, ...]
    mirrors: tuple[int, ...] = ()
    remark: str = ""


def named(judged: Judged, name: str) -> Named:
    """The tensors that a name is of: arguments before results, results before computed values.

    Brackets, quotes, dots and slashes all separate components: ``layers/*/up`` is the end of ``state['params']['layers'][0]['up']``.

    Raises:
        StrategyError: none is named so, with the nearest names; or several arguments or results are.
    """
    if (found := found_by(judged, name)) is not None:
        return found
    if line := _LINE.fullmatch(name.strip()):
        raise StrategyError(_no_line(judged, line[1], int(line[2])))
    record = judged.record
    groups = argument_groups(record.arguments, record.mesh)
    paths = [path for group in groups for path in (group.name, *group.paths)]
    raise StrategyError(
        f"a tensor is an argument or a result, named by its path, a pattern, the end of one, or its module; or a computed value, named by "
        f"checkpoint_name, by a source line as model.py:41, by a layer, or by an operation as 'op 57'. Nothing in "
        f"{record.program.name!r} is named {name!r}. {near_words(name, paths, lambda path: _group_of(groups, path))}"
    )


def _no_line(judged: Judged, file: str, number: int) -> str:
    """The refusal of a source line in which nothing is computed that has a layout, with the nearest ones that have."""
    lines: dict[str, set[int]] = defaultdict(set)
    for op in judged.facts.graph.walk():
        if not op.bodies and any(_has_layout(judged, value) for value in op.results):
            place, _, at = line_of(op.origin).split(" ")[0].rpartition(":")
            if at.isdecimal():
                lines[place].add(int(at))
    near = sorted(sorted(lines[file], key=lambda at: abs(at - number))[:NEAR]) if file in lines else []
    if near:
        told = f"The nearest lines that do: {', '.join(f'{file}:{at}' for at in near)}."
    else:
        told = f"Its values are computed in {', '.join(sorted(lines)[: 2 * NEAR]) or 'no file that is known'}."
    return f"a source line names the arrays that it computes, and {file}:{number} computes none in {judged.record.program.name!r}. {told}"


def _has_layout(judged: Judged, value: int) -> bool:
    """Whether a value is an array that devices may have parts of."""
    return bool(judged.facts.graph.values[value].rank) and not judged.facts.free[value]


def found_by(judged: Judged, name: str) -> Named | None:
    """As `named`; None where nothing has the name.

    Raises:
        StrategyError: several arguments or results have it.
    """
    record, graph = judged.record, judged.facts.graph
    groups = argument_groups(record.arguments, record.mesh)
    if found := _of_name(groups, name):
        return _read_most(judged, found, name)
    if found := _of_name(argument_groups(record.results, record.mesh), name.removeprefix("result")):
        result = _only(found, name)
        position = graph.result_paths.index(result.paths[0])
        replaced = next((graph.argument_paths[argument] for one, argument in graph.aliases if one == position), None)
        if replaced is not None:
            group = next(group for group in groups if replaced in group.paths)
            return _argument(judged, group, f"The result {result.name} replaces it in the next step, and has its layout.")
        at = dict(zip(graph.result_paths, graph.results, strict=True))
        return Named("result", replace(result, name=f"result{result.name}"), tuple(at[path] for path in result.paths))
    return _computed(judged, name) or _of_module(judged, groups, name)


def _of_module(judged: Judged, groups: Sequence[TensorGroup], name: str) -> Named | None:
    """The largest of a module's parameters, and the names of the others; None where no path has such a part."""
    found = [group for group in groups if any(_has_part(path, name) for path in group.paths[: group.n])]
    if not found:
        return None
    chosen = max(found, key=lambda group: group.whole_bytes)
    others = [group.name for group in found if group is not chosen]
    more = f" and {len(others) - NEAR} more" if len(others) > NEAR else ""
    return _argument(judged, chosen, f"{name!r} has {', '.join(others[:NEAR])}{more}, too: write a path for it." if others else "")


def _argument(judged: Judged, group: TensorGroup, remark: str = "") -> Named:
    """The arguments of a group."""
    graph = judged.facts.graph
    at = dict(zip(graph.argument_paths, graph.arguments, strict=True))
    numbers = [at[path] for path in group.paths]
    return Named("argument", group, tuple(numbers[: group.n]), tuple(numbers[group.n :]), remark)


def _read_most(judged: Judged, groups: Sequence[TensorGroup], name: str) -> Named:
    """The only group of a name; of tensors of one type, such as a parameter and moments that are sharded otherwise, the one most read.

    Raises:
        StrategyError: it is of several types.
    """
    first = groups[0]
    if any((group.shape, group.dtype, group.n) != (first.shape, first.dtype, first.n) for group in groups[1:]):
        groups = [_only(groups, name)]
    at = dict(zip(judged.facts.graph.argument_paths, judged.facts.graph.arguments, strict=True))
    chosen = max(groups, key=lambda group: len(judged.facts.readers[at[group.paths[0]]]))
    others = ", ".join(f"{group.name}, {_words(group.spec)}" for group in groups if group is not chosen)
    return _argument(judged, chosen, f"The name is also of {others}: write more of the path for it." if others else "")


def _words(spec: Spec) -> str:
    return f"sharded as {spec_words(spec)}" if any(spec) else "replicated"


def _only(groups: Sequence[TensorGroup], name: str) -> TensorGroup:
    """The group, if there is one.

    Raises:
        StrategyError: there are several.
    """
    if len(groups) == 1:
        return groups[0]
    names = ", ".join(group.name for group in groups[:6])
    raise StrategyError(
        f"a tensor is named by its path, a pattern, or the end of one that no other has; {name!r} names {len(groups)} groups: {names}. "
        "Write more of the path."
    )


def _of_name(groups: Sequence[TensorGroup], name: str) -> list[TensorGroup]:
    """The groups of arguments or results that a name is of: by whole paths before ends of some, and before what mirrors them."""
    for paths_of in (lambda group: group.paths[: group.n], lambda group: group.paths):
        found = [group for group in groups if any(path == name for path in (group.name, *paths_of(group)))]
        found = found or [group for group in groups if any(_ends(path, name) for path in paths_of(group))]
        if found:
            return found
    return []


def _group_of(groups: Sequence[TensorGroup], path: str) -> str:
    """The name of the group that a path belongs to."""
    return next(group.name for group in groups if path == group.name or path in group.paths)


def _ends(path: str, name: str) -> bool:
    """Whether a path ends as a name says, component by component."""
    whole, end = parts(path), parts(name)
    return 0 < len(end) <= len(whole) and all(fnmatchcase(a, b) for a, b in zip(whole[-len(end) :], end, strict=True))


def _has_part(path: str, name: str) -> bool:
    """Whether components of a path, one after the other, are those of a name, such as a module's."""
    whole, part = parts(path), parts(name)
    starts = range(len(whole) - len(part) + 1) if part else ()
    return any(all(fnmatchcase(a, b) for a, b in zip(whole[at:], part, strict=False)) for at in starts)


# -- computed values -----------------------------------------------------------------------------------------------------


def _computed(judged: Judged, name: str) -> Named | None:
    """The computed values of a name: the largest of those that are alike, and what else the name is of."""
    graph, record = judged.facts.graph, judged.record
    alike: dict[tuple, list[Op]] = defaultdict(list)
    for op in _ops(judged, name):
        for value in op.results:
            found = graph.values[value]
            if _has_layout(judged, value):
                spec = layout_to_spec(record.assignment.layout(value), record.mesh.names, found.rank)
                alike[pass_of(op), op.primitive, line_of(op.origin), op.results.index(value), found.shape, found.dtype, spec].append(op)
    if not alike:
        return None
    groups = [_group_of_ops(judged, key, ops) for key, ops in alike.items()]
    forward = [one for one in groups if one[0] == "forward"] or groups
    _, ops, chosen = max(forward, key=lambda one: (not moves(one[1][0].primitive), one[2].whole_bytes, -one[1][0].index))
    position = next(key[3] for key, members in alike.items() if members is ops)
    others = sorted((one for one in groups if one[2] is not chosen), key=lambda one: -one[2].whole_bytes)
    beside = "; ".join(f"op {ops[0].index}, {one.name}, {array_type(one.dtype, one.shape)}" for _, ops, one in others[:NEAR])
    remark = f"The name is also of {beside}: write 'op' and a number for one of them." if beside else ""
    return Named("value", chosen, tuple(op.results[position] for op in ops), remark=remark)


def _group_of_ops(judged: Judged, key: tuple, ops: list[Op]) -> tuple[str, list[Op], TensorGroup]:
    """The pass of results that are alike, their operations, and the results as a group."""
    which, primitive, line, _, shape, dtype, spec = key
    nbytes = len(ops) * shard_bytes(shape, dtype, spec, judged.record.mesh)
    name = str(ops[0].params["name"]) if primitive == "name" else primitive
    where = "" if which == "forward" else f", {which}"
    return which, ops, TensorGroup(f"{name} at {line}{where}", len(ops), 0, shape, dtype, spec, nbytes)


def _ops(judged: Judged, name: str) -> Iterator[Op]:
    """The operations that a name is of, by the first way of naming that any has."""
    ops = [op for op in judged.facts.graph.walk() if op.results and not op.bodies]
    if match := _OP.fullmatch(name.strip()):
        yield from (op for op in ops if op.index == int(match[1]))
        return
    marked = [op for op in ops if op.primitive == "name" and op.params.get("name") == name]
    line = name.strip()
    line = line if (match := _LINE.fullmatch(line)) is None else f"{match[1]}:{match[2]}"
    lines = [op for op in ops if _is_line(line_of(op.origin), line)]
    yield from marked or lines or [op for op in ops if name and judged.layer(op) == name]


def _is_line(line: str, name: str) -> bool:
    """Whether a name is of a source line: ``gpt.py:41``, ``gpt.py:41 (loss)``, or a layer before that."""
    return bool(line) and (name == line or name == line.split(" ")[0] or name.endswith(f", {line}"))
