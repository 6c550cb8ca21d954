"""The programs of a stage's tasks: the body of its loop over microbatches, divided by what depends on what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from autoshard.pipeline.equations import as_they_are, evaluate, handed_dtypes, is_var, nbytes, needed_by, value
from autoshard.pipeline.lowered_stage import LoweredStage
from autoshard.pipeline.packing import SMALL_BYTES, Packing
from autoshard.pipeline.programs import Options, StagePlan, TaskProgram
from autoshard.pipeline.stages import Stage
from autoshard.primitives import primitive

CHEAP = ("broadcast", "creation", "elementwise", "rearrangement", "reinterpretation", "slice")
"""Kinds of primitives that each task computes itself, where they read constants alone, so that no task hands on their results."""


class LoopTasks(LoweredStage):
    """A stage whose loop is divided into tasks.

    Attributes:
        free: what each task makes itself of what all microbatches share.
        kinds: per kind of task its equations.
        direct, handed, literal: the loop's constants that are arguments, those handed on by the program before it, and those with values.
        totals: per kind of task the totals that it adds to.
        residuals: per kind of task what it hands on.
        constants_packing, total_packings, residual_packings: how these are handed on.
    """

    def __init__(self, stage: Stage, plan: StagePlan, splits_weights: bool, joins: bool, options: Options = None):
        super().__init__(stage, plan, options)
        self.splits_weights, self.joins = splits_weights, joins
        self.free: set[Var] = self._free()
        self.kinds: dict[str, list[JaxprEqn]] = self._kinds()
        self._constants()

    def _kinds(self) -> dict[str, list[JaxprEqn]]:
        """The equations of the loop's body by the kind of the task that computes them."""
        leaving, eqns = self.body.jaxpr.outvars, self.body.jaxpr.eqns
        first = leaving[: self.n_carry + self.n_stacked]
        forward = [v for v, is_forward in zip(leaving, self.stage.forward, strict=True) if is_forward]
        sent = leaving[len(first) :]
        live = needed_by(eqns, leaving, effects=True)
        in_forward = self._with_effects(needed_by(eqns, forward), live - needed_by(eqns, leaving))
        in_backward = (needed_by(eqns, sent) if self.splits_weights else live) - in_forward
        found: dict[str, list[JaxprEqn]] = {"F": [], "B": [], "W": []}
        for k, eqn in enumerate(eqns):
            if k in live:
                in_first = k in in_forward
                found["B" if in_first and self.joins else "F" if in_first else "B" if k in in_backward else "W"].append(eqn)
        return {kind: self._with_free(own) for kind, own in found.items()}

    def _with_effects(self, in_forward: set[int], acting: set[int]) -> set[int]:
        """The equations of the forward task, and of those that effects alone need the ones that read no more than it has."""
        backward = {v for v, message in zip(self.arrivals, self.stage.receives[self.first_received :], strict=True) if message.backward}
        known = {*self.body.jaxpr.constvars, *self.body.jaxpr.invars} - backward
        found = set(in_forward)
        for k, eqn in enumerate(self.body.jaxpr.eqns):
            if k in found or (k in acting and known.issuperset(filter(is_var, eqn.invars))):
                found.add(k)
                known.update(eqn.outvars)
        return found

    def _free(self) -> set[Var]:
        """What the body makes cheaply of what all microbatches share, such as masks and casts of weights: each task makes its own."""
        free, leaving = {*self.body.jaxpr.constvars, *self.consts}, set(filter(is_var, self.body.jaxpr.outvars))
        for eqn in self.body.jaxpr.eqns:
            is_cheap = primitive(eqn.primitive.name).kind in CHEAP and leaving.isdisjoint(eqn.outvars)
            if is_cheap and all(not is_var(a) or a in free for a in eqn.invars):
                free.update(eqn.outvars)
        return free

    def _with_free(self, own: list[JaxprEqn]) -> list[JaxprEqn]:
        """The equations of a task, and before them those of `_free` that they need."""
        if not own:
            return own
        free = [eqn for eqn in self.body.jaxpr.eqns if not self.free.isdisjoint(eqn.outvars)]
        needed = needed_by(free, [a for eqn in own for a in eqn.invars])
        return [*(eqn for k, eqn in enumerate(free) if k in needed), *(eqn for eqn in own if self.free.isdisjoint(eqn.outvars))]

    def _constants(self) -> None:
        """Divides the loop's constants into large ones that are arguments, and those that the program before the loop hands on."""
        self.direct: dict[Var, int] = {}  # of the body: the argument
        self.handed: list[Var] = []
        self.literal: dict[Var, Any] = dict(zip(self.body.jaxpr.constvars, self.body.consts, strict=True))
        read = {a for eqn in self.body.jaxpr.eqns for a in eqn.invars if isinstance(a, Var)} | {
            a for a in self.body.jaxpr.outvars if isinstance(a, Var)
        }
        for var, atom in self.entering.items():
            if var not in read:
                continue
            if isinstance(atom, Literal):
                self.literal[var] = atom.val
            elif atom in self.known:
                self.literal[var] = self.known[atom]
            elif atom in self.argument_of and nbytes(atom) > SMALL_BYTES:
                self.direct[var] = self.argument_of[atom]
            else:
                self.handed.append(var)
        self.constants_packing: Packing = self.packed_for(self.handed, self.body.jaxpr.eqns, as_they_are(self.body.jaxpr.outvars))

    def task_programs(self) -> dict[str, TaskProgram]:
        """Per kind the program of its tasks."""
        kind_of = {var: kind for kind, eqns in self.kinds.items() for eqn in eqns for var in eqn.outvars}
        leaving = self.body.jaxpr.outvars
        of_kind: dict[str, list[int]] = {"F": [], "B": [], "W": []}
        last = next((kind for kind in "WBF" if self.kinds[kind]), "F")
        for k, v in enumerate(leaving):
            default = "F" if self.stage.forward[k] and not self.joins else last
            of_kind[kind_of.get(v, default) if isinstance(v, Var) else default].append(k)
        self.totals = {kind: [k for k in found if k < self.n_carry + self.n_stacked] for kind, found in of_kind.items()}
        self.total_packings = {kind: Packing.of([self.total_type(k) for k in found], True) for kind, found in self.totals.items()}
        sends = {kind: [k for k in found if k >= self.n_carry + self.n_stacked] for kind, found in of_kind.items()}
        read: dict[str, set[Var]] = {}
        for kind, eqns in self.kinds.items():
            read[kind] = {a for eqn in eqns for a in eqn.invars if isinstance(a, Var)}
            read[kind] |= {leaving[k] for k in of_kind[kind] if isinstance(leaving[k], Var)}
        # What a task hands on is what later ones read of it.
        self.residuals: dict[str, list[Var]] = {
            kind: [v for eqn in self.kinds[kind] for v in eqn.outvars if v not in self.free and any(v in read[other] for other in later)]
            for kind, later in (("F", "BW"), ("B", "W"), ("W", ""))
        }
        self.residual_packings: dict[str, Packing] = {kind: self._residual_packing(kind, of_kind) for kind in "FBW"}
        active = [kind for kind in "FBW" if self.kinds[kind] or of_kind[kind]]
        return {kind: self._task(kind, read[kind], sends[kind]) for kind in active}

    def _residual_packing(self, kind: str, of_kind: Mapping[str, Sequence[int]]) -> Packing:
        """How a kind of task hands on what later ones read; ``of_kind`` has what leaves the loop by each."""
        later = "FBW"["FBW".index(kind) + 1 :]
        outputs = as_they_are(self.body.jaxpr.outvars[k] for other in later for k in of_kind[other])
        return self.packed_for(self.residuals[kind], [eqn for other in later for eqn in self.kinds[other]], outputs)

    def packed_for(self, handed: Sequence[Var], eqns: Iterable[JaxprEqn], outputs: Iterable[tuple[Any, Any]]) -> Packing:
        """How variables are handed on to a program of these equations and outputs."""
        return Packing.of([v.aval for v in handed], dtypes=handed_dtypes(handed, eqns, outputs) if self.plan.demotes else None)

    def total_type(self, k: int) -> Any:
        """The type of a total of the loop: a carry, or what is stacked up."""
        return (self.scan.outvars[k] if k >= self.n_carry else self.carries[k]).aval

    def _task(self, kind: str, read: set[Var], sends: list[int]) -> TaskProgram:
        eqns, leaving = self.kinds[kind], self.body.jaxpr.outvars
        direct = [v for v in self.direct if v in read]
        arrivals = [k for k, v in enumerate(self.arrivals) if v in read]
        reads = tuple(other for other in "FBW"[: "FBW".index(kind)] if any(v in read for v in self.residuals[other]))
        totals, packing = self.totals[kind], self.total_packings[kind]

        def task(index: Any, large: tuple, constants: tuple, sums: tuple, messages: tuple, before: tuple) -> tuple:
            env: dict[Var, Any] = dict(self.literal)
            env.update(zip(direct, large, strict=True))
            env.update(zip(self.handed, self.constants_packing.unpack(constants), strict=True))
            env.update(zip([self.arrivals[k] for k in arrivals], messages, strict=True))
            for other, arrays in zip(reads, before, strict=True):
                env.update(zip(self.residuals[other], self.residual_packings[other].unpack(arrays), strict=True))
            if self.index is not None:
                env[self.index] = index.astype(self.index.aval.dtype)
            old = packing.unpack(sums)
            env.update((self.carries[k], x) for k, x in zip(totals, old, strict=True) if k < self.n_carry)
            evaluate(eqns, env)
            new = [
                value(leaving[k], env) if k < self.n_carry else lax.dynamic_update_index_in_dim(x, value(leaving[k], env), index, 0)
                for k, x in zip(totals, old, strict=True)
            ]
            handed = self.residual_packings[kind].pack([env[v] for v in self.residuals[kind]])
            return tuple(packing.pack(new)), tuple(value(leaving[k], env) for k in sends), tuple(handed)

        in_specs, out_specs = self._task_specs(kind, direct, arrivals, reads, sends)
        call = self.jitted(task, kind, in_specs, out_specs, donate=(3,))
        first = self.n_carry + self.n_stacked
        return TaskProgram(
            kind,
            call,
            self.jitted(task, kind, in_specs, out_specs),
            tuple(self.direct[v] for v in direct),
            tuple(self.first_received + k for k in arrivals),
            reads,
            tuple(self.first_sent + k - first for k in sends),
            (packing.n_arrays, len(sends), self.residual_packings[kind].n_arrays),
            self.residual_packings[kind].nbytes,
        )

    def _task_specs(
        self, kind: str, direct: Sequence[Var], arrivals: Sequence[int], reads: Sequence[str], sends: Sequence[int]
    ) -> tuple[tuple, tuple]:
        """The specs of what a task is given, and of what it makes."""
        every, whole = PartitionSpec(self.axes), PartitionSpec()
        in_specs = (
            whole,
            tuple(self.spec_of[self.var_of[self.direct[v]]] for v in direct),
            (every,) * self.constants_packing.n_arrays,
            (every,) * self.total_packings[kind].n_arrays,
            tuple(self.arrival_spec(k) for k in arrivals),
            tuple((every,) * self.residual_packings[other].n_arrays for other in reads),
        )
        out_specs = (
            (every,) * self.total_packings[kind].n_arrays,
            tuple(self.sent_spec(k) for k in sends),
            (every,) * self.residual_packings[kind].n_arrays,
        )
        return in_specs, out_specs
