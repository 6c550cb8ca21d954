"""Epilogues: what a product's kernel computes of its result before it is stored."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from autoshard.compilers.aliases import Aliases
from autoshard.compilers.fusion_rules import OpKinds
from autoshard.compilers.op_patterns import are_together, stays_narrow
from autoshard.ir import Graph, Op

LONGEST = 64  # ops of an epilogue that are looked at: the compiler sets no limit; evidence: long epilogues


class Epilogues:
    """The epilogues of a program's products, where these are fused: `autoshard.compilers.fusion` says how far they go.

    Attributes:
        stored: per value whether it is stored; the last value of an epilogue is, in place of the product's result.
        absorbed: per value whether a product's kernel makes it.
    """

    def __init__(self, graph: Graph, aliases: Aliases, kinds: OpKinds, stored: list[bool]):
        self.values, self.ops, self.aliases, self.kinds = graph.values, graph.walk(), aliases, kinds
        self.find, self.readers, self.stored = aliases.find, aliases.readers, stored
        self.absorbed = [False] * len(stored)
        for op in self.ops if kinds.rules.fuses_products else ():
            if kinds.computes_operands(op):
                self._epilogue(op)

    def _epilogue(self, op: Op) -> None:
        """Stores the last value of a product's epilogue instead of its result."""
        start = self.find(op.results[0])
        if self.values[start].size == 0 or not self.stored[start] or start in self.aliases.returned:
            return
        narrow = stays_narrow(op, self.values)
        unread = {start: len(self.readers[start])}
        queue = [reader.index for reader in self.readers[start]]
        heapify(queue)
        queued, inside, found, covered = set(queue), [start], start, 1
        while queue and len(queued) < LONGEST:
            reader = self.ops[heappop(queue)]
            if not self.kinds.is_elementwise(reader):
                break
            made = self.find(reader.results[0])
            if self.values[made].size != self.values[start].size or self.absorbed[made]:
                break
            for value in dict.fromkeys(map(self.find, reader.operands)):
                if value in unread:
                    unread[value] -= 1
                    if not unread[value]:
                        del unread[value]
            unread[made] = len(self.readers[made])
            inside.append(made)
            for other in self.readers[made]:
                if other.index not in queued:
                    queued.add(other.index)
                    heappush(queue, other.index)
            wider = self.values[made].itemsize > self.values[start].itemsize
            widens = wider and (reader.primitive == "convert_element_type" or narrow)
            if len(unread) == 1 and not widens:
                found, covered = made, len(inside)
                if self.stored[made]:
                    break
        only = self.readers[found]
        if self._is_reduced_only(found):
            for value in inside:  # as far as it was followed
                self.stored[value], self.absorbed[value] = False, True
            return
        if found == start or (len(only) == 1 and self.kinds.is_product(only[0]) and not self.stored[found]):
            return  # the one product that reads it does the work itself
        for value in inside[:covered]:
            self.stored[value] = value == found
            self.absorbed[value] = True

    def _is_reduced_only(self, value: int) -> bool:
        """Whether reductions alone read a value, widened perhaps: then the product's kernel reduces it, as to minima and their places."""
        shape = self.values[value].shape
        while len(only := self.readers[value]) == 1 and only[0].primitive == "convert_element_type":
            value = self.find(only[0].results[0])
        return are_together(only) and all(
            self.values[one.operands[0]].shape == shape and self.values[one.results[0]].rank > 0 for one in only
        )
