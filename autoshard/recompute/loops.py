"""A loop of the forward pass and the loop that differentiates it, as one block: trip by trip the one's body, then the other's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autoshard.ir import Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.lower import Path
from autoshard.recompute.block import Block, nbytes, stacked, variables
from autoshard.recompute.flat import Atom, Flat, flat
from autoshard.recompute.hosting import hostable
from autoshard.recompute.offload import moved, on_host
from autoshard.recompute.regions import backward, broadcasts, jaxpr_of
from autoshard.trace import scan_params


@dataclass(frozen=True)
class Pair:
    """A forward and a backward scan.

    Attributes:
        first, last: their numbers among the equations around them.
        forward, backward: their equations.
        one, other: their bodies.
        read: per input of the backward body that is a trip of one of the forward scan's stacks, the result of the forward body.
        returned: the results of the forward scan, by position, that others read too.
        spread: per value around the loops that is a broadcast its equation.
    """

    first: int
    last: int
    forward: JaxprEqn
    backward: JaxprEqn
    one: Flat
    other: Flat
    read: Mapping[Var, Atom]
    returned: frozenset[int]
    spread: Mapping[Var, JaxprEqn]

    @cached_property
    def block(self) -> Block:
        """The trip's forward and backward pass."""
        n, n_carry = num_consts(self.forward.params), num_carry(self.forward.params)
        eqns = [eqn.replace(invars=self._renamed(eqn.invars)) for eqn in self.other.eqns]
        outputs = [self.one.outputs[k] for k in self.returned if k >= n_carry]
        outputs += [v for eqn in eqns if eqn.primitive.name == "remat2" for v in eqn.invars]  # what the user's checkpoints keep
        return Block(
            (*self.one.eqns, *eqns),
            (*self.one.ops, *self.other.ops),
            len(self.one.eqns),
            self.one.inputs[n : n + n_carry],
            frozenset(variables(outputs)),
        )

    def outer(self, backward: bool) -> Iterator[tuple[Var, Atom, bool]]:
        """One of the loops' constants and slices: the variable of the body, the operand, and whether it is a constant."""
        loop, body = (self.backward, self.other) if backward else (self.forward, self.one)
        n, n_carry = num_consts(loop.params), num_carry(loop.params)
        for k, (v, operand) in enumerate(zip(body.inputs, loop.invars, strict=True)):
            if not n <= k < n + n_carry:
                yield v, operand, k < n

    def joined(self) -> Pair:
        """The pair whose backward body reads what enters both loops by its name in the forward body."""
        places = {(is_const, operand): v for v, operand, is_const in self.outer(False) if isinstance(operand, Var)}
        same = ((v, places.get((is_const, operand))) for v, operand, is_const in self.outer(True) if isinstance(operand, Var))
        return replace(self, read={**{v: found for v, found in same if found is not None}, **self.read})

    @property
    def results(self) -> list[Atom]:
        """What the backward body returns, by the names of the block."""
        return self._renamed(self.other.outputs)

    def _renamed(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else self.read.get(atom, atom) for atom in atoms]

    def hostable(self, kept: frozenset[Var]) -> list[Var]:
        """Those of the kept values of a trip whose stacks may be on hosts."""
        elsewhere = [self.one.outputs[k] for k in self.returned if k >= num_carry(self.forward.params)]
        return hostable(self.block, (), kept, elsewhere, self.forward.params["length"])

    def rewritten(self, kept: frozenset[Var], hosted: Collection[Var] = ()) -> tuple[JaxprEqn, JaxprEqn]:
        """Both scans, the first with stacks of what is kept of each trip, the other computing the rest again.

        Args:
            hosted: those of the kept values whose stacks are on hosts.
        """
        fwd, bwd = self.forward, self.backward
        n, n_carry, length = num_consts(fwd.params), num_carry(fwd.params), fwd.params["length"]
        results = self.results
        outside, entering = self._broadcasts()
        eqns = backward(self.block, (), kept, results, outside)
        wanted = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars)) | dict.fromkeys(variables(results))
        inside = self.block.made
        hosts = {v: on_host(v) for v in hosted if v in wanted}
        stacks = {v: stacked(hosts.get(v, v), length) for v in wanted if v in inside}

        outer = range(n_carry, len(fwd.outvars))
        own_stacks = stacks.keys() - hosts.keys()
        stays = [k for k in outer if k in self.returned or (isinstance(self.one.outputs[k], Var) and self.one.outputs[k] in own_stacks)]
        found = {self.one.outputs[k]: fwd.outvars[k] for k in stays if isinstance(self.one.outputs[k], Var)}
        new = {v: stack for v, stack in stacks.items() if v not in found}
        outputs = [*self.one.outputs[:n_carry], *(self.one.outputs[k] for k in stays), *(hosts.get(v, v) for v in new)]
        constants = tuple(self.one.constants)
        body = ClosedJaxpr(jaxpr_of(self.one.inputs, outputs, _sent(self.one.eqns, hosts), constants), [*self.one.constants.values()])
        made = [*fwd.outvars[:n_carry], *(fwd.outvars[k] for k in stays), *new.values()]
        forward = fwd.replace(outvars=made, params=scan_params(fwd.params, body, n, n_carry))

        places = dict(zip(self.one.inputs, fwd.invars, strict=True))
        consts = [v for v in self.one.inputs[:n] if v in wanted]
        slices = [v for v in self.one.inputs[n + n_carry :] if v in wanted]
        n_consts, m_carry = num_consts(bwd.params), num_carry(bwd.params)
        own = list(zip(self.other.inputs, bwd.invars, strict=True))
        own_consts = [(v, operand) for v, operand in own[:n_consts] if v in wanted]
        more = [(v, operand) for v, operand in entering.items() if v in wanted]
        xs = [(v, operand) for v, operand in own[n_consts + m_carry :] if v not in self.read]
        kept_stacks = [(hosts.get(v, v), found.get(v, stack)) for v, stack in stacks.items()]
        read = [
            *own_consts,
            *more,
            *((v, places[v]) for v in consts),
            *own[n_consts : n_consts + m_carry],
            *xs,
            *kept_stacks,
            *((v, places[v]) for v in slices),
        ]
        both = {**self.one.constants, **self.other.constants}
        jaxpr = jaxpr_of([v for v, _ in read], results, [*(moved(host, v) for v, host in hosts.items()), *eqns], tuple(both))
        n_read = len(own_consts) + len(more) + len(consts)
        params = scan_params(bwd.params, ClosedJaxpr(jaxpr, [*both.values()]), n_read, m_carry)
        return forward, bwd.replace(invars=[operand for _, operand in read], params=params)

    def _broadcasts(self) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
        """The equations of those of the loops' constants that are broadcasts, and per variable that they read the one around the loops."""
        found, entering = list[JaxprEqn](), dict[Var, Atom]()
        for flat_body, loop in ((self.one, self.forward), (self.other, self.backward)):
            for v, operand in zip(flat_body.inputs[: num_consts(loop.params)], loop.invars, strict=False):
                if isinstance(operand, Var) and operand in self.spread:
                    eqn = self.spread[operand]
                    read = [x if isinstance(x, Literal) else Var(x.aval) for x in eqn.invars]
                    entering.update((new, x) for new, x in zip(read, eqn.invars, strict=True) if isinstance(new, Var))
                    found.append(eqn.replace(invars=read, outvars=[v]))
        return found, entering


def _sent(eqns: Sequence[JaxprEqn], hosts: Mapping[Var, Var]) -> list[JaxprEqn]:
    """A trip's equations with the transfers of what it makes, or carries, to hosts."""
    made = {v for eqn in eqns for v in eqn.outvars}
    found = [moved(v, host) for v, host in hosts.items() if v not in made]
    for eqn in eqns:
        found.append(eqn)
        found += (moved(v, hosts[v]) for v in eqn.outvars if v in hosts)
    return found


def pairs(whole: Flat, turn: int, ops: Mapping[Path, Op], opens: Collection[str] = ()) -> Iterator[Pair]:
    """The scans of the forward pass with those of the backward pass that read most of their stacks; ``opens`` as for `flat`."""
    readers: dict[Var, list[int]] = {}
    for k, eqn in enumerate(whole.eqns):
        for v in variables(eqn.invars):
            readers.setdefault(v, []).append(k)
    returned, spread = set(variables(whole.outputs)), broadcasts(whole.eqns)
    taken: set[int] = set()
    for first, fwd in enumerate(whole.eqns[:turn]):
        if fwd.primitive.name != "scan":
            continue
        n_carry = num_carry(fwd.params)
        positions = {v: k for k, v in enumerate(fwd.outvars) if k >= n_carry}
        amounts: dict[int, float] = {}
        for v in positions:
            for k in readers.get(v, ()):
                amounts[k] = amounts.get(k, 0.0) + nbytes(v)
        found = [k for k in amounts if k >= turn and k not in taken and _trips(whole.eqns[k]) == fwd.params["length"]]
        last = max(found, key=lambda k: amounts[k], default=None)
        if last is None:
            continue
        taken.add(last)
        bwd = whole.eqns[last]
        one, other = (flat(whole.eqns[k].params["jaxpr"], ops, (*whole.ops[k].path, 0), opens) for k in (first, last))
        start = num_consts(bwd.params) + num_carry(bwd.params)
        read = {
            inner: one.outputs[positions[operand]]
            for inner, operand in zip(other.inputs[start:], bwd.invars[start:], strict=True)
            if isinstance(operand, Var) and operand in positions
        }
        elsewhere = {
            k
            for k, v in enumerate(fwd.outvars)
            if v in returned or any(reader != last or v in variables(bwd.invars[:start]) for reader in readers.get(v, ()))
        }
        yield Pair(first, last, fwd, bwd, one, other, read, frozenset(elsewhere), spread)


def _trips(eqn: JaxprEqn) -> int | None:
    return eqn.params["length"] if eqn.primitive.name == "scan" else None


def with_pairs(whole: Flat, rewritten: Mapping[int, JaxprEqn]) -> Flat:
    """The program with some equations, by their numbers, replaced."""
    return replace(whole, eqns=tuple(rewritten.get(k, eqn) for k, eqn in enumerate(whole.eqns)))
