"""What a program makes of weights alone, such as casts, and the operations that make their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Op
from autoshard.primitives import moves, of_kind

_AS_IT_IS = frozenset((*of_kind("identity"), *of_kind("placement")))
_EACH = _AS_IT_IS.union(of_kind("elementwise"))
_OF_EQUAL_SIZE = _EACH | frozenset(of_kind("reduction"))  # of dimensions of size one


def made_of(facts: ProgramFacts, arguments: Collection[int]) -> frozenset[int]:
    """The values that are computed from some arguments alone, element by element, or that rearrange them."""
    found = {*arguments}
    for op in facts.graph.walk():
        read = [value for value in op.operands if facts.graph.values[value].rank and not facts.free[value]]
        if read and not op.bodies and (op.primitive in _EACH or moves(op.primitive)) and found.issuperset(read):
            found.update(op.results)
    return frozenset(found)


def gradient_ops(facts: ProgramFacts, arguments: Collection[int]) -> frozenset[int]:
    """The numbers of the operations that make the gradients of arguments which results replace.

    These are found from the new values backwards, through what is computed element by element or rearranged, and into loops.
    """
    graph = facts.graph
    left = [graph.results[result] for result, argument in graph.aliases if graph.arguments[argument] in arguments]
    flows = defaultdict[int, list[int]](list)
    for holder in (holder for op in graph.walk() for holder in op.holders):
        for value in (holder.value, *holder.views):
            flows[value] += [flow.value for flow in holder.sources]
    seen, found = {*left, *graph.arguments}, set[int]()
    while left:
        value = left.pop()
        maker = facts.makers[value]
        op = None if maker is None else graph.walk()[maker]
        before = [*flows[value], *(_read(facts, op, value) if op is not None else ())]
        if op is not None and not op.bodies:
            found.add(op.index)
        new = {each for each in before if each not in seen}
        seen |= new
        left += new
    return frozenset(found)


def _read(facts: ProgramFacts, op: Op, value: int) -> list[int]:
    """What an operation reads for a value, if it rearranges that, or computes element by element what is as large."""
    if op.primitive in _AS_IT_IS and len(op.operands) == len(op.results):
        return [op.operands[op.results.index(value)]]
    size, values = facts.graph.values[value].size, facts.graph.values
    goes_on = not op.bodies and (op.primitive in _OF_EQUAL_SIZE or moves(op.primitive))
    return [each for each in op.operands if goes_on and (moves(op.primitive) or values[each].size == size)]
