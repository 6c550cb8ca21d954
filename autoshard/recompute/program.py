"""Recomputation of a traced train step: what may be kept between its passes, and the program of a choice."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autoshard.cluster import Device
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.compute import Roofline
from autoshard.errors import TraceError
from autoshard.ir import Op
from autoshard.ir.remat import Kept, LoopKept, Remat
from autoshard.ir.rewrites import Recompute
from autoshard.primitives import is_matrix
from autoshard.recompute.block import Block, nbytes, segments
from autoshard.recompute.choice import Chooser
from autoshard.recompute.hosting import fetched, hostable, sent
from autoshard.recompute.passes import Passes
from autoshard.recompute.regions import backward
from autoshard.recompute.replacing import without_checkpoints
from autoshard.trace import Traced, rebuilt
from autoshard.trace.structure import around, opened, subjaxprs

LEAST_SAVED = 0.01  # of what is kept without recomputation: a choice that saves no more than that over a faster one is left out
STEP = 0.1  # of what is kept without recomputation: two choices that are further apart have others between them
NEAR = STEP / 4  # of that: a choice between two others that is nearer to where it should be is near enough
MOST_TRIED = 6  # choices for one of these
HOSTED = (0.5, 1.0)  # shares of what is kept that are tried in the memory of hosts
PRICES = tuple(10.0**k for k in np.arange(-2.0, 3.01, 0.25))  # of a byte, times all that could be run again by all that is kept


def recomputed(rewrite: Recompute, traced: Traced) -> Traced:
    """The program that keeps what the choice says.

    Raises:
        TraceError: the choice is not for this program.
    """
    remat, traced = rewrite.remat, without_checkpoints(traced) if rewrite.remat.replaces else traced
    try:
        jaxpr = _rewritten(Passes.at(traced, remat.path, remat.kept.turn), remat, traced.jaxpr)
    except (IndexError, KeyError, ValueError):
        raise TraceError(
            f"recomputation is chosen for one program by the numbers of its equations, and {traced.graph.name!r} has others. Search again."
        ) from None
    return rebuilt(traced, jaxpr, rewrite)


def _rewritten(passes: Passes, remat: Remat, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    scans: dict[int, JaxprEqn] = {}
    found = {(pair.first, pair.last): pair for pair in passes.pairs}
    for loop in remat.loops:
        pair = found[loop.forward, loop.backward]
        scans[pair.first], scans[pair.last] = pair.rewritten(*_values(pair.block, loop.kept))
    block = passes.block(scans)
    kept, hosted = _values(block, remat.kept)
    again = backward(block, remat.kept.places, kept, passes.whole.outputs)
    forward, hosts = sent(block.eqns[: block.turn], remat.kept.places, hosted)
    made = replace(passes.whole, eqns=(*forward, *fetched(again, hosts))).closed()
    if not remat.path:
        return made
    position, _ = remat.path
    eqns = list(jaxpr.jaxpr.eqns)
    (old,) = subjaxprs(eqns[position])
    if len(made.consts) != len(opened(old)[1]):
        raise ValueError("a loop's body captures arrays")
    eqns[position] = around(eqns[position], [opened(made)[0]])
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def _values(block: Block, kept: Kept) -> tuple[frozenset[Var], list[Var]]:
    """What a block keeps, and what of it on hosts."""
    return frozenset(map(block.value, kept.values)), [*map(block.value, kept.hosted)]


class Options:
    """The choices of what a program keeps, from little time that it takes to little memory.

    Args:
        traced, facts: the program, which is not rewritten yet.
        device: that computes.
        hosts: whether what is kept may be in the memory of hosts; the device has a link to its host.
    """

    def __init__(self, traced: Traced, facts: ProgramFacts, device: Device, hosts: bool = False):
        self.passes: Passes = Passes.of(traced)
        self._transfer = 2 / device.host_bandwidth_bytes_per_second if hosts else np.inf  # seconds for a byte, there and back
        self._roofline, self._facts = Roofline(device), facts
        graph, fusion = traced.graph, facts.fusion
        self._stored = lambda op: [fusion.materialised[value] for value in op.results]
        self._free = lambda op: [facts.free[value] for value in op.results]
        assert graph is facts.graph, "facts are the program's"
        self._pairs = [(pair, self._chooser(pair.block, (), None)) for pair in self.passes.pairs]
        self._outside: dict[tuple[LoopKept, ...], tuple[Chooser, set[Var]]] = {}

    @cached_property
    def all(self) -> tuple[Remat, ...]:
        """Those among which a price per byte decides, of which none takes both more time and more memory than another.

        No byte is worth more than its transfer to a host and back: at that price what is still kept is there, in part or all of it.
        """
        scale = self._scale
        if not scale:
            return ()
        found, before = list[Remat](), (self.at(0.0, "auto"), 0.0)
        least = before[0].plain_bytes
        most = min(PRICES[-1] * scale, self._transfer)
        priced = [(price * scale, 0.0) for price in PRICES if price * scale <= most]
        for price, share in (*priced, *((most, share) for share in HOSTED if np.isfinite(self._transfer))):
            remat = self.at(price, "auto", share)
            if (remat.seconds > 0 or remat.hosted_bytes > 0) and remat.kept_bytes < least - LEAST_SAVED * remat.plain_bytes:
                found += self._between(before, (remat, price)) if not share else ()
                found.append(remat)
                before, least = (remat, price), remat.kept_bytes
        return tuple(found)

    def _between(self, more: tuple[Remat, float], less: tuple[Remat, float]) -> list[Remat]:
        """Choices of which the first equations have the price of one choice and the others that of another, which are far apart.

        Equal segments have the same best choice at any price, so that prices alone lead from all of these to none.
        """
        (most, lower), (least, price) = more, less
        known, near, whole = {0.0: most, 1.0: least}, NEAR * least.plain_bytes, most.kept_bytes - least.kept_bytes
        steps = ceil(whole / (STEP * least.plain_bytes))
        for wanted in (most.kept_bytes - whole * k / steps for k in range(1, steps)):
            for _ in range(MOST_TRIED):
                if min(abs(each.kept_bytes - wanted) for each in known.values()) < near:
                    break
                share = self._share(known, wanted)
                known[share] = self.at(price, "auto", lower=lower, first=share)
        found = [least]
        for each in sorted(known.values(), key=lambda each: each.kept_bytes):
            if found[-1].kept_bytes + near < each.kept_bytes < most.kept_bytes - near and each.seconds < found[-1].seconds:
                found.append(each)
        return found[:0:-1]

    def _share(self, known: Mapping[float, Remat], nbytes: float) -> float:
        """With which share of the first equations about so many bytes are kept: at the end of a segment, if one is between known shares."""
        above = max(share for share, each in known.items() if each.kept_bytes >= nbytes)
        below = min(share for share, each in known.items() if each.kept_bytes < nbytes and share > above)
        found = above + (below - above) * (known[above].kept_bytes - nbytes) / (known[above].kept_bytes - known[below].kept_bytes)
        ends = [place / self.passes.turn for place in self._places if above < place / self.passes.turn < below]
        return min(ends, key=lambda end: abs(end - found), default=(above + below) / 2)

    @cached_property
    def replaced(self) -> tuple[Remat, ...]:
        """The same of a program without its user's checkpoints: all that is kept first."""
        return tuple(replace(remat, replaces=True) for remat in (self.at(0.0, "replace"), *self.all))

    @cached_property
    def full(self) -> Remat | None:
        """The one that keeps little more than what enters each segment, or trip; None where there is nothing to compute again."""
        return replace(self.all[-1], mode="full") if self.all else None

    @cached_property
    def _scale(self) -> float:
        """Seconds of the forward pass for the bytes that are kept of it."""
        plain = self.at(0.0, "auto").plain_bytes
        return sum(map(self._seconds, self.passes.whole.ops[: self.passes.turn])) / plain if plain else 0.0

    def at(self, price: float, mode: str, share: float = 0.0, lower: float = 0.0, first: float = 1.0) -> Remat:
        """The choice at a price, in seconds a byte.

        Args:
            share: of the bytes that are kept and may be on hosts those that are, the first of the forward pass.
            lower: the price of what is made after the first share of the equations, in each trip of a loop as outside of them.
            first: that share.
        """
        loops: list[LoopKept] = []
        for pair, chooser in self._pairs:
            kept = chooser.kept(price, lower, first)
            there = _first(pair.hostable(kept), share)
            if chooser.seconds(kept) or there:
                loops.append(LoopKept(pair.first, pair.last, _numbers(pair.block, (), kept, there)))
        chooser, _ = self._around(tuple(loops))
        kept = chooser.kept(price, lower, first)
        there = _first(hostable(chooser.block, self._places, kept, self.passes.whole.outputs), share)
        return self._made(mode, tuple(loops), kept, there)

    def by_part(self, parts: Sequence[tuple[float, Remat | None]]) -> Remat | None:
        """The choice that is in each part of the forward pass as another one: such as in the part of each stage of a pipeline.

        Args:
            parts: of each part, first to last, the share of what the choices save up to its end, and its choice; None: it keeps all.
        """
        choices = [each for _, each in parts if each is not None]
        if not choices:
            return None
        most = min(choices, key=lambda each: each.kept_bytes)
        ends = self._ends([share for share, _ in parts], most)
        of_pairs = {pair.first: parts[bisect_right(ends[:-1], pair.first)][1] for pair, _ in self._pairs}
        chosen = ((k, loop) for k, own in of_pairs.items() if own is not None for loop in own.loops)
        loops = tuple(loop for k, loop in chosen if loop.forward == k)
        chooser, _ = self._around(loops)
        block, again, there = chooser.block, set[int](), set[Var]()
        for start, stop, (_, own) in zip((0, *ends), ends, parts, strict=False):
            if own is not None:
                kept, hosted = _values(block, _between(own.kept, start, stop))
                again.update(block.again(kept.union(v for v, k in block.made.items() if not start <= k < stop)))
                there.update(hosted)
        kept = chooser.kept_without(again)
        return self._made(most.mode, loops, kept, sorted(there & kept, key=block.number))

    def _ends(self, shares: Sequence[float], remat: Remat) -> list[int]:
        """The places at which a choice has saved about such shares of all that it saves; the last one is the end."""
        places, saved = (0, *self._places, self.passes.turn), np.zeros(self.passes.turn + 1)
        for sign, own in ((1, self.at(0.0, "")), (-1, remat)):
            chooser, made = self._around(own.loops)
            kept, hosted = _values(chooser.block, own.kept)
            for v in chooser.held(kept) - made.union(hosted):
                saved[chooser.block.made[v] + 1] += sign * nbytes(v)
            for loop in own.loops:
                pair = next(each for each, _ in self._pairs if each.first == loop.forward)
                values, on_hosts = _values(pair.block, loop.kept)
                saved[pair.first + 1] += sign * pair.forward.params["length"] * sum(map(nbytes, values.difference(on_hosts)))
        before = np.cumsum(saved)[[*places]]
        at = [int(np.argmin(np.abs(before - share * before[-1]))) for share in shares[:-1]]
        return [*(places[k] for k in np.maximum.accumulate([0, *at])[1:]), self.passes.turn]

    def _made(self, mode: str, loops: tuple[LoopKept, ...], kept: frozenset[Var], there: Sequence[Var]) -> Remat:
        """The choice that keeps some values outside of loops, some of them on hosts, and in loops what these say."""
        held = plain = seconds = hosted = 0.0
        of_loop = {each.forward: each.kept for each in loops}
        for pair, chooser in self._pairs:
            length, block = pair.forward.params["length"], pair.block
            own, on_hosts = _values(block, of_loop[pair.first]) if pair.first in of_loop else (block.needed, [])
            plain += length * sum(map(nbytes, block.needed))
            held += length * sum(map(nbytes, own.difference(on_hosts)))
            hosted += length * sum(map(nbytes, on_hosts))
            seconds += length * chooser.seconds(own)
        chooser, made = self._around(loops)
        block = chooser.block
        held += sum(map(nbytes, chooser.held(kept) - made.union(there)))
        hosted += sum(map(nbytes, there))
        plain += sum(map(nbytes, block.held(block.needed, chooser.stored) - made))
        seconds += chooser.seconds(kept)
        return Remat(mode, self.passes.path, _numbers(block, self._places, kept, there), loops, held, plain, seconds, hosted)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        block = self.passes.block({})
        return segments(block, self._marked(block, self._stored), self._marked(block, self._free))

    def _around(self, loops: tuple[LoopKept, ...]) -> tuple[Chooser, set[Var]]:
        """The chooser of what is outside loops, and the loops' results; the same as long as loops keep the same."""
        if loops not in self._outside:
            scans, of_loop = dict[int, JaxprEqn](), {each.forward: each.kept for each in loops}
            for pair in (each for each, _ in self._pairs if each.first in of_loop):
                scans[pair.first], scans[pair.last] = pair.rewritten(*_values(pair.block, of_loop[pair.first]))
            block = self.passes.block(scans)
            fixed = {k for pair in self.passes.pairs for k in (pair.first, pair.last)}
            self._outside[loops] = self._chooser(block, self._places, fixed), {v for k in fixed for v in block.eqns[k].outvars}
        return self._outside[loops]

    def _chooser(self, block: Block, places: tuple[int, ...], fixed: Collection[int] | None) -> Chooser:
        """The chooser of a block.

        Args:
            fixed: the equations that are not run again; None: the block is one trip of a loop.
        """

        def seconds(k: int) -> float | None:
            return None if fixed and k in fixed else self._seconds(block.ops[k])

        return Chooser(block, places, seconds, self._marked(block, self._stored), fixed is None)

    def _marked(self, block: Block, marks: Callable[[Op], Sequence[bool]]) -> frozenset[Var]:
        found = set()
        for eqn, op in zip(block.eqns[: block.turn], block.ops, strict=False):
            found.update(v for v, is_so in zip(eqn.outvars, marks(op), strict=False) if is_so)
        return frozenset(found)

    def _seconds(self, op: Op) -> float:
        """The time of an op on one device, its bodies included; nothing for what is fused into its readers."""
        return sum(self._alone(inner) * inner.trips / op.trips for inner in op.walk())

    def _alone(self, op: Op) -> float:
        traffic, facts = self._facts.traffic[op.index], self._facts
        moved = sum(amount for _, amount in (*traffic.tensors, *traffic.passes))
        if op.bodies or not (traffic.starts or moved):
            return 0.0
        dtype = facts.graph.values[(*op.operands, *op.results)[0]].dtype
        return float(self._roofline.seconds(is_matrix(op.primitive), facts.flops[op.index], dtype, moved, traffic.starts))


def _numbers(block: Block, places: tuple[int, ...], kept: frozenset[Var], hosted: Sequence[Var]) -> Kept:
    return Kept(block.turn, places, tuple(sorted(map(block.number, kept))), tuple(sorted(map(block.number, hosted))))


def _between(kept: Kept, start: int, stop: int) -> Kept:
    """What some of the equations make of what is kept."""
    values, hosted = (tuple(each for each in of if start <= each[0] < stop) for of in (kept.values, kept.hosted))
    return replace(kept, values=values, hosted=hosted)


def _first(values: Sequence[Var], share: float) -> list[Var]:
    """The first values with so large a share of the bytes of all."""
    sizes = np.cumsum([nbytes(v) for v in values])
    return [v for v, size in zip(values, sizes, strict=True) if size <= share * sizes[-1]]
