"""Smaller programs that still fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fuzz.block import abstract_eval
from fuzz.program import Program


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: fewer results, lines, pins; variables become arguments. Greedy, to a fixed point."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if len(str(smaller)) < len(str(program)) and fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something less, those that lose most first."""
    lines = program.lines
    for i in range(len(program.pins)):
        yield replace(program, pins=program.pins[:i] + program.pins[i + 1 :])
    for i in range(len(program.in_specs)):
        yield replace(program, in_specs=program.in_specs[:i] + program.in_specs[i + 1 :])
    for i, line in enumerate(lines):
        match = re.fullmatch(r"(v\d+) = .*", line)
        if match:  # a variable is passed in
            yield from _as_argument(program, i, match[1])
        if line.lstrip().startswith("return "):  # one of several results, or one of several terms
            indent, returned = line[: _indent(line)], line.lstrip().removeprefix("return ")
            for separator in (", ", " + "):
                for part in returned.split(separator) if separator in returned else ():
                    yield _swept(replace(program, lines=(*lines[:i], f"{indent}return {part}", *lines[i + 1 :])))
    for start in range(len(lines) - 1):  # a line, or a function with its body
        yield _swept(replace(program, lines=lines[:start] + lines[_end(lines, start) :]))
    for i, line in enumerate(lines):  # a variable is one of those it was made of
        match = re.fullmatch(r" *(v\d+) = (.*)", line)
        for name in dict.fromkeys(re.findall(r"\b[a-z]\d*\b", match[2])) if match else ():
            rest = [re.sub(rf"\b{match[1]}\b", name, other) for other in lines[i + 1 :]]
            yield _swept(replace(program, lines=(*lines[:i], *rest)))
    if program.arguments and program.arguments[0][0] == "state":  # a part of the state
        entries = program.arguments[0][1].strip("{}").split(", '")
        for i, entry in enumerate(entries):
            name = entry.strip("'")[0]
            kept = "{" + ", '".join(entries[:i] + entries[i + 1 :]).lstrip("'").join(["'", ""]) + "}" if len(entries) > 1 else "{}"
            cut = tuple(line for line in lines if line.strip() != f"{name} = state['{name}']")
            yield _swept(replace(program, arguments=(("state", kept), *program.arguments[1:]), lines=cut))


def _end(lines: Sequence[str], start: int) -> int:
    """Where the statement that starts on a line ends: a function with its body."""
    stop = start + 1
    while lines[start].lstrip().startswith("def ") and stop < len(lines) and _indent(lines[stop]) > _indent(lines[start]):
        stop += 1
    return stop


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _as_argument(program: Program, i: int, name: str) -> Iterator[Program]:
    """The program with the variable of a top-level line passed in."""
    block = re.compile(rf"\b{name}\b")
    try:
        aval = _type_of(program, i, name)
    except Exception:
        return
    kind = {"float32": "f32", "int32": "i32", "bool": "b1"}.get(str(aval.dtype))
    if kind is None or not any(block.search(line) for line in program.lines[i + 1 :]):
        return
    argument = (name, f"{kind}({', '.join(map(str, aval.shape))})")
    yield _swept(replace(program, arguments=(*program.arguments, argument), lines=program.lines[:i] + program.lines[i + 1 :]))


def _type_of(program: Program, i: int, name: str) -> Any:
    cut = replace(program, lines=(*program.lines[: i + 1], f"return {name}"))
    return abstract_eval(lambda args: cut.function()(*args), cut.args())


def _swept(program: Program) -> Program:
    """The program without functions, lines and arguments that nothing reads."""
    lines = list(program.lines)
    while True:
        for i, line in enumerate(lines[:-1]):
            made = re.match(r"\s*(?:def )?(\w+)(?: = |\()", line)
            if made and "return" not in line and not any(re.search(rf"\b{made[1]}\b", other) for other in lines[:i] + lines[i + 1 :]):
                del lines[i : _end(lines, i)]
                break
        else:
            break
    program = replace(program, lines=tuple(lines))
    for i in reversed(range(len(program.arguments))):
        if not any(re.search(rf"\b{program.arguments[i][0]}\b", line) for line in lines):
            program = _without(program, i)
    return program


def _without(program: Program, i: int) -> Program:
    name = program.arguments[i][0]
    kept = {entries: tuple(e for e in getattr(program, entries) if e[0] != name) for entries in ("pins", "in_specs")}
    return replace(program, arguments=program.arguments[:i] + program.arguments[i + 1 :], **kept)
