"""The backward pass of a block, each segment's as one `jax.checkpoint` that computes the segment's values again.

This is the form that JAX gives a differentiated `jax.checkpoint`: one equation that reads what is kept and the cotangents that arrive, runs
the segment's forward equations, and then its backward ones. The barrier that JAX puts before it makes compilers run all that not earlier
than the cotangents are there.

Backward equations are grouped by the segment from which on they can run: the least of those whose values they, or what they read, read.
No equation reads what a lower segment's group makes, so the groups are run in order. A group's region is what is between its equations that
read recomputed values.

The barrier has a compiler store all that a region reads, and so a mask or a zero that is broadcast to the size of attention scores, which
it would otherwise fuse into readers. A region has its own copies of such broadcasts, and reads their operands.

What reads nothing but cotangents and values made of constants, such as the places to which a gradient is added, is in no region unless it
is between others: what layers share, as a bias of positions, has its gradients summed outside of them, and so once for all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autoshard.ir.remat import CARRIED
from autoshard.primitives import of_kind
from autoshard.recompute.block import Block, nbytes, segment_of, variables
from autoshard.recompute.flat import Atom, jaxpr_of

# Primitives that make large arrays of smaller ones, or of none.
SPREADING = frozenset((*of_kind("broadcast"), *of_kind("creation")))
OUTSIDE = -1  # in place of a region's number
AGAIN = "rematted_computation"  # what JAX calls it in the names of operations


def backward(
    block: Block, places: Sequence[int], kept: frozenset[Var], results: Sequence[Atom], outside: Sequence[JaxprEqn] = ()
) -> list[JaxprEqn]:
    """The equations of the backward pass.

    Args:
        places: where segments begin, except the first.
        kept: what is not computed again.
        results: what is read after the backward pass.
        outside: equations around a loop whose results its trips read.
    """
    spread = broadcasts([*outside, *block.eqns])
    again = frozenset(block.again(kept))
    eqns = block.eqns[block.turn :]
    regions = _regions(block, places, kept)
    inside = {j: number for number, region in enumerate(regions) for j in region}
    readers: dict[Var, set[int]] = {v: {OUTSIDE} for v in variables(results)}
    for j, eqn in enumerate(eqns):
        for v in _sources(variables(eqn.invars), spread):
            readers.setdefault(v, set()).add(inside.get(j, OUTSIDE))
    nodes = [Node(j, eqn) for j, eqn in enumerate(eqns) if j not in inside]
    for number, region in enumerate(regions):
        made = [v for j in region for v in eqns[j].outvars if readers.get(v, set()) - {number}]
        nodes.append(Node(min(region), _checkpoint(block, [eqns[j] for j in region], kept, again, made, spread)))
    return ordered(nodes)


def broadcasts(eqns: Sequence[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Per value that is larger than what it is broadcast from, if from anything, its equation."""
    found = (eqn for eqn in eqns if eqn.primitive.name in SPREADING)
    return {eqn.outvars[0]: eqn for eqn in found if nbytes(eqn.outvars[0]) > sum(map(nbytes, variables(eqn.invars)))}


def _sources(read: Sequence[Var], spread: Mapping[Var, JaxprEqn]) -> Iterator[Var]:
    """Values, and what they are broadcast from."""
    for v in read:
        yield v
        if v in spread:
            yield from _sources(variables(spread[v].invars), spread)


def _regions(block: Block, places: Sequence[int], kept: frozenset[Var]) -> list[list[int]]:
    """The backward equations, by their numbers in the backward pass, of each region, the last segment's first."""
    eqns = block.eqns[block.turn :]
    constant = block.constant
    maker: dict[Var, int] = {}
    label, reads = [len(places)] * len(eqns), [False] * len(eqns)
    for j, eqn in enumerate(eqns):
        for v in variables(eqn.invars):
            if v in maker:
                label[j] = min(label[j], label[maker[v]])
            elif v in block.made and v not in kept and v not in constant:
                reads[j] = True
                label[j] = min(label[j], segment_of(places, block.made[v]))
        maker.update((v, j) for v in eqn.outvars)
    down, up = list(reads), list(reads)
    for j, eqn in enumerate(eqns):
        down[j] = down[j] or any(down[maker[v]] and label[maker[v]] == label[j] for v in variables(eqn.invars) if v in maker)
    for j in reversed(range(len(eqns))):
        for v in variables(eqns[j].invars):
            if up[j] and v in maker and label[maker[v]] == label[j]:
                up[maker[v]] = True
    groups: dict[int, list[int]] = {}
    for j in range(len(eqns)):
        if down[j] and up[j]:
            groups.setdefault(label[j], []).append(j)
    return [groups[number] for number in sorted(groups, reverse=True)]


def _checkpoint(
    block: Block,
    eqns: list[JaxprEqn],
    kept: frozenset[Var],
    again: frozenset[int],
    results: list[Var],
    spread: Mapping[Var, JaxprEqn],
) -> JaxprEqn:
    """A region as one equation with these results; ``spread`` has the broadcasts of which it has copies."""
    inside = _Region(spread)
    for k in _repeated(block, eqns, kept, again):
        inside.add(block.eqns[k], kept)
    for eqn in eqns:
        inside.add(eqn)
    effects = frozenset().union(*(eqn.effects for eqn in inside.body))
    template = _template()
    jaxpr = jaxpr_of(list(inside.inputs.values()), [inside.names[v] for v in results], inside.body)
    params = {**template.params, "jaxpr": jaxpr, "differentiated": True, "prevent_cse": True, "policy": None}
    own = {"source_info": eqns[-1].source_info, "ctx": eqns[-1].ctx}
    return template.replace(invars=list(inside.inputs), outvars=results, params=params, effects=effects, **own)


def _repeated(block: Block, eqns: Sequence[JaxprEqn], kept: frozenset[Var], again: frozenset[int]) -> list[int]:
    """The equations of the forward pass that are run again for those of a region."""
    found: set[int] = set()
    waiting = [v for eqn in eqns for v in variables(eqn.invars)]
    while waiting:
        v = waiting.pop()
        k = block.made.get(v, CARRIED)
        if k in again and v not in kept and k not in found:
            found.add(k)
            waiting += variables(block.eqns[k].invars)
    return sorted(found)


class _Region:
    """The body of a region: its equations, per value its name there, and per value from outside the input that it is."""

    def __init__(self, spread: Mapping[Var, JaxprEqn]):
        self.spread = spread
        self.body: list[JaxprEqn] = []
        self.names: dict[Var, Var] = {}
        self.inputs: dict[Var, Var] = {}

    def add(self, eqn: JaxprEqn, kept: frozenset[Var] | None = None) -> None:
        """Appends an equation; with ``kept``, one that is run again, perhaps for another of its results than is kept."""
        read, made, info = [self._renamed(atom) for atom in eqn.invars], [], eqn.source_info
        for var in eqn.outvars:
            made.append(var if isinstance(var, DropVar) else Var(var.aval))
            if kept is None or var not in kept:
                self.names[var] = made[-1]
        if kept is not None:
            info = info.replace(name_stack=info.name_stack.extend(AGAIN))
        self.body.append(eqn.replace(invars=read, outvars=made, source_info=info))

    def _renamed(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom not in self.names and atom in self.spread:
            read, made = [self._renamed(each) for each in self.spread[atom].invars], Var(atom.aval)
            self.body.append(self.spread[atom].replace(invars=read, outvars=[made]))
            self.names[atom] = made
        elif atom not in self.names:
            self.names[atom] = self.inputs[atom] = Var(atom.aval)
        return self.names[atom]


@cache
def _template() -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(jax.checkpoint(lambda x: x * 2.0))(0.0).eqns
    return eqn


@dataclass(frozen=True, slots=True)
class Node:
    """An equation with the place where it would be."""

    place: int
    eqn: JaxprEqn


def ordered(nodes: Sequence[Node]) -> list[JaxprEqn]:
    """Equations in an order in which each comes after what it reads, as near to their places as that allows; O(n log n)."""
    import networkx

    maker = {v: k for k, node in enumerate(nodes) for v in node.eqn.outvars}
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from((maker[v], k) for k, node in enumerate(nodes) for v in variables(node.eqn.invars) if v in maker)
    return [nodes[k].eqn for k in networkx.lexicographical_topological_sort(graph, lambda k: nodes[k].place)]
