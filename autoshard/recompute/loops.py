"""A loop of the forward pass and the loop that differentiates it, as one block: trip by trip the one's body, then the other's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.ir import Op
from autoshard.ir.scan import num_carry, num_consts, scan_parts
from autoshard.lower import Path
from autoshard.recompute.block import Block, nbytes, stacked, variables
from autoshard.recompute.flat import Atom, Flat, flat
from autoshard.recompute.hosting import hostable
from autoshard.recompute.offload import moved, on_host
from autoshard.recompute.regions import backward, broadcasts
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
        _, carried, _ = scan_parts(self.forward.params, self.one.inputs)
        eqns = [eqn.replace(invars=self._renamed(eqn.invars)) for eqn in self.other.eqns]
        outputs = [self.one.outputs[k] for k in self.returned if k >= len(carried)]
        outputs += [v for eqn in eqns if eqn.primitive.name == "remat2" for v in eqn.invars]  # what the user's checkpoints keep
        return Block(
            (*self.one.eqns, *eqns),
            (*self.one.ops, *self.other.ops),
            len(self.one.eqns),
            tuple(carried),
            frozenset(variables(outputs)),
        )

    def outer(self, backward: bool) -> Iterator[tuple[Var, Atom, bool]]:
        """One of the loops' constants and slices: the variable of the body, the operand, and whether it is a constant."""
        loop, body = (self.backward, self.other) if backward else (self.forward, self.one)
        consts, _, slices = scan_parts(loop.params, [*zip(body.inputs, loop.invars, strict=True)])
        yield from ((v, operand, True) for v, operand in consts)
        yield from ((v, operand, False) for v, operand in slices)

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
        results, length = self.results, self.forward.params["length"]
        outside, entering = self._broadcasts()
        eqns = backward(self.block, (), kept, results, outside)
        wanted = dict.fromkeys(v for atoms in (*(eqn.invars for eqn in eqns), results) for v in variables(atoms))
        hosts = {v: on_host(v) for v in hosted if v in wanted}
        stacks = {v: stacked(hosts.get(v, v), length) for v in wanted if v in self.block.made}
        forward, found = self._stacking(stacks, hosts)

        consts, carry, slices = scan_parts(self.backward.params, [*zip(self.other.inputs, self.backward.invars, strict=True)])
        own, _, own_slices = scan_parts(self.forward.params, [*zip(self.one.inputs, self.forward.invars, strict=True)])
        consts = [(v, operand) for v, operand in (*consts, *entering.items(), *own) if v in wanted]
        slices = [(v, operand) for v, operand in slices if v not in self.read]
        slices += [(hosts.get(v, v), found.get(v, stack)) for v, stack in stacks.items()]
        slices += [(v, operand) for v, operand in own_slices if v in wanted]
        read = [*consts, *carry, *slices]
        again = replace(
            self.other,
            inputs=tuple(v for v, _ in read),
            outputs=tuple(results),
            constants={**self.one.constants, **self.other.constants},
            eqns=(*(moved(host, v) for v, host in hosts.items()), *eqns),
        )
        params = scan_params(self.backward.params, again.closed(), len(consts), len(carry))
        return forward, self.backward.replace(invars=[operand for _, operand in read], params=params)

    def _stacking(self, stacks: Mapping[Var, Var], hosts: Mapping[Var, Var]) -> tuple[JaxprEqn, dict[Atom, Var]]:
        """The forward scan with stacks of values; per value that it stacked before the stack."""
        fwd, outputs = self.forward, self.one.outputs
        n_carry = num_carry(fwd.params)
        in_memory = stacks.keys() - hosts.keys()
        stays = [k for k in range(n_carry, len(outputs)) if k in self.returned or not in_memory.isdisjoint(variables([outputs[k]]))]
        found = {outputs[k]: fwd.outvars[k] for k in stays if isinstance(outputs[k], Var)}
        new = [v for v in stacks if v not in found]
        body = replace(
            self.one,
            outputs=(*outputs[:n_carry], *(outputs[k] for k in stays), *(hosts.get(v, v) for v in new)),
            eqns=tuple(_sent(self.one.eqns, hosts)),
        )
        made = [*fwd.outvars[:n_carry], *(fwd.outvars[k] for k in stays), *(stacks[v] for v in new)]
        params = scan_params(fwd.params, body.closed(), num_consts(fwd.params), n_carry)
        return fwd.replace(outvars=made, params=params), found

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
        *others, sliced = scan_parts(bwd.params, [*zip(other.inputs, bwd.invars, strict=True)])
        read = {v: one.outputs[positions[operand]] for v, operand in sliced if isinstance(operand, Var) and operand in positions}
        whole_reads = set(variables([operand for part in others for _, operand in part]))
        returned_too = whole_reads | returned
        elsewhere = {k for k, v in enumerate(fwd.outvars) if v in returned_too or any(by != last for by in readers.get(v, ()))}
        yield Pair(first, last, fwd, bwd, one, other, read, frozenset(elsewhere), spread)


def _trips(eqn: JaxprEqn) -> int | None:
    return eqn.params["length"] if eqn.primitive.name == "scan" else None
