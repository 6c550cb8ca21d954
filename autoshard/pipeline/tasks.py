"""The programs of a stage's tasks: a stage's lowered program, divided.

A stage is lowered once, under its assignment, to the program of each device (`autoshard.lower.manual`). That program is divided by what
depends on what. *Before* the loop over microbatches, and *after* it, there is a program for each level at which messages arrive. The loop's
body is divided into tasks: ``F`` is what the results of the forward pass depend on, ``B`` what else the messages to earlier stages depend
on, ``W`` the rest, which no other stage waits for. So every collective of the plan happens once, where the plan has it, and what one task
makes and another one reads is handed on as each device has it, without any resharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ir import Layout, Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.lower import holder_values, manual_program, stored_layout, to_partition_spec
from autoshard.lower.control_flow import FLOWS, Flows
from autoshard.pipeline.equations import as_they_are, evaluate, handed_dtypes, is_var, nbytes, needed_by, value
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.packing import SMALL_BYTES, Packing
from autoshard.pipeline.programs import Options, Outer, StagePlan, StagePrograms, TaskProgram
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.stages import Stage, Staged
from autoshard.primitives import primitive
from autoshard.rules import rules_of
from autoshard.trace import types_of

CHEAP = ("broadcast", "creation", "elementwise", "rearrangement", "reinterpretation", "slice")
"""Kinds of primitives that each task computes itself, where they read constants alone, so that no task hands on their results."""


def programs_of(
    stage: Stage, plan: StagePlan, loop_level: int, splits_weights: bool, joins: bool = False, options: Options = None
) -> StagePrograms:
    """The programs of a stage's tasks.

    Args:
        stage: the stage.
        plan: its assignment, mesh and reshards.
        loop_level: that of the loop (`Staged.loop_level`).
        splits_weights: whether the gradients of weights are tasks of their own, ``W``.
        joins: whether ``B`` computes the forward pass, too, and there is no ``F`` (`joins_tasks`).
        options: of the compiler, as `jax.jit` takes them in ``compiler_options``.

    Raises:
        ShardingError: the stage has no manual lowering.
    """
    return _Divided(stage, plan, loop_level, splits_weights, joins, options).programs()


def all_programs(staged: Staged, plans: Sequence[StagePlan], schedule: Schedule, options: Options = None) -> list[StagePrograms]:
    """The programs of all stages; with several chunks a stage, chunk ``c`` of stage ``s`` is number ``c * n_stages + s``."""
    found, splits = [], "W" in schedule.kinds
    for piece, (stage, plan) in enumerate(zip(staged.stages, plans, strict=True)):
        chunk, part = divmod(piece, schedule.n_stages)
        joins = joins_tasks(stage, schedule.orders[part], chunk)
        found.append(programs_of(stage, plan, staged.loop_level, splits, joins, options))
    return found


def joins_tasks(stage: Stage, order: Sequence[Task], chunk: int) -> bool:
    """Whether each backward task of a stage comes right after its forward task, and other stages wait for no result of the latter.

    So it is on the last stage. In one program what the backward pass reads, the logits among it, is not handed on in memory.
    """
    if any(message.kind == "loop" and not message.backward for message in stage.sends):
        return False
    after = {task: following for task, following in pairwise(order)}
    return all(after.get(task) == Task("B", task.microbatch, chunk) for task in order if task.kind == "F" and task.chunk == chunk)


class _Divided:
    """The lowered program of a stage while it is divided.

    Attributes:
        inner: the program of each device.
        known: the values of its inputs that are constants.
        argument_of: per other input its position among the stage's arguments.
        scan: its loop over microbatches.
    """

    def __init__(self, stage: Stage, plan: StagePlan, loop_level: int, splits_weights: bool, joins: bool, options: Options = None):
        self.stage, self.plan, self.loop_level = stage, plan, loop_level
        graph = stage.traced.graph
        rules = rules_of(graph)
        self.op: Op = loop_of(graph, rules, stage.traced.microbatches)
        # A trip of the loop is a task: what it would gather for the next one is gathered by that one.
        first = set(self.op.bodies[0].inputs)
        ahead = {value: layout for value, layout in plan.assignment.ahead.items() if value not in first}
        program = manual_program(stage.traced.jaxpr, graph, rules, replace(plan.assignment, ahead=ahead), plan.mesh, plan.reshard_path)
        closed = jax.make_jaxpr(program)(*types_of(stage.traced.jaxpr.jaxpr.invars))
        mapped = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
        self.inner: Jaxpr = mapped.params["jaxpr"]
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        place = {v: k for k, v in enumerate(closed.jaxpr.invars)}
        self.known: dict[Var, Any] = {}
        self.argument_of: dict[Var, int] = {}
        self.spec_of: dict[Var, PartitionSpec] = {}
        for var, atom, spec in zip(self.inner.invars, mapped.invars, mapped.params["in_specs"], strict=True):
            if isinstance(atom, Literal):
                self.known[var] = atom.val
            elif atom in constants:
                self.known[var] = constants[atom]
            else:
                self.argument_of[var] = place[atom]
                self.spec_of[var] = spec
        self.var_of = {k: var for var, k in self.argument_of.items()}
        outs = {v: k for k, v in enumerate(mapped.outvars)}
        self.outputs = [self.inner.outvars[outs[v]] if not isinstance(v, Literal) else v for v in closed.jaxpr.outvars]
        self.out_specs = [
            mapped.params["out_specs"][outs[v]] if not isinstance(v, Literal) else PartitionSpec() for v in closed.jaxpr.outvars
        ]
        n = stage.traced.microbatches
        scans = [eqn for eqn in self.inner.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == n]
        self.scan: JaxprEqn = max(scans, key=lambda eqn: len(eqn.params["jaxpr"].jaxpr.eqns))
        self.body: ClosedJaxpr = self.scan.params["jaxpr"]
        n_consts, n_carry = num_consts(self.scan.params), num_carry(self.scan.params)
        inputs, leaving = self.body.jaxpr.invars, self.body.jaxpr.outvars
        self.consts, self.carries, self.slices = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
        self.entering = dict(zip(self.consts, self.scan.invars[:n_consts], strict=True))
        self.started = self.scan.invars[n_consts : n_consts + n_carry]
        n_sent = sum(message.kind == "loop" for message in stage.sends)
        n_received = sum(message.kind == "loop" for message in stage.receives)
        assert len(leaving) == len(stage.forward), "the loop's results are those of the stage's"
        self.n_carry, self.n_stacked = n_carry, len(leaving) - n_carry - n_sent
        self.index = None if len(self.slices) == n_received else self.slices[0]
        self.arrivals = self.slices[len(self.slices) - n_received :]
        self.splits_weights, self.joins, self.options = splits_weights, joins, options
        self.axes = tuple(plan.mesh.axis_names)
        self.first_received = len(stage.receives) - n_received
        self.first_sent = len(stage.sends) - n_sent
        self.free = self._free()
        self.kinds = self._kinds()
        self._constants()

    # -- the loop -----------------------------------------------------------------------------------------------------------

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

    def _kind_of(self) -> dict[Var, str]:
        """Per variable of the body the kind of the task that makes it."""
        return {var: kind for kind, eqns in self.kinds.items() for eqn in eqns for var in eqn.outvars}

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
        self.constants_packing = self._packing(self.handed, self.body.jaxpr.eqns, as_they_are(self.body.jaxpr.outvars))

    def _tasks(self) -> dict[str, TaskProgram]:
        kind_of = self._kind_of()
        leaving = self.body.jaxpr.outvars
        of_kind: dict[str, list[int]] = {"F": [], "B": [], "W": []}
        last = next((kind for kind in "WBF" if self.kinds[kind]), "F")
        for k, v in enumerate(leaving):
            default = "F" if self.stage.forward[k] and not self.joins else last
            of_kind[kind_of.get(v, default) if isinstance(v, Var) else default].append(k)
        self.totals = {kind: [k for k in found if k < self.n_carry + self.n_stacked] for kind, found in of_kind.items()}
        self.total_packings = {kind: Packing.of([self._total_type(k) for k in found], True) for kind, found in self.totals.items()}
        sends = {kind: [k for k in found if k >= self.n_carry + self.n_stacked] for kind, found in of_kind.items()}
        read: dict[str, set[Var]] = {}
        for kind, eqns in self.kinds.items():
            read[kind] = {a for eqn in eqns for a in eqn.invars if isinstance(a, Var)}
            read[kind] |= {leaving[k] for k in of_kind[kind] if isinstance(leaving[k], Var)}
        # What a task hands on is what later ones read of it.
        self.residuals = {
            kind: [v for eqn in self.kinds[kind] for v in eqn.outvars if v not in self.free and any(v in read[other] for other in later)]
            for kind, later in (("F", "BW"), ("B", "W"), ("W", ""))
        }
        self.residual_packings = {kind: self._residual_packing(kind, of_kind) for kind in "FBW"}
        active = [kind for kind in "FBW" if self.kinds[kind] or of_kind[kind]]
        return {kind: self._task(kind, read[kind], sends[kind]) for kind in active}

    def _residual_packing(self, kind: str, of_kind: Mapping[str, Sequence[int]]) -> Packing:
        """How a kind of task hands on what later ones read; ``of_kind`` has what leaves the loop by each."""
        later = "FBW"["FBW".index(kind) + 1 :]
        outputs = as_they_are(self.body.jaxpr.outvars[k] for other in later for k in of_kind[other])
        return self._packing(self.residuals[kind], [eqn for other in later for eqn in self.kinds[other]], outputs)

    def _packing(self, handed: Sequence[Var], eqns: Iterable[JaxprEqn], outputs: Iterable[tuple[Any, Any]]) -> Packing:
        """How variables are handed on to a program of these equations and outputs."""
        return Packing.of([v.aval for v in handed], dtypes=handed_dtypes(handed, eqns, outputs) if self.plan.demotes else None)

    def _total_type(self, k: int) -> Any:
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

        every, whole = PartitionSpec(self.axes), PartitionSpec()
        in_specs = (
            whole,
            tuple(self.spec_of[self.var_of[self.direct[v]]] for v in direct),
            (every,) * self.constants_packing.n_arrays,
            (every,) * packing.n_arrays,
            tuple(self._arrival_spec(k) for k in arrivals),
            tuple((every,) * self.residual_packings[other].n_arrays for other in reads),
        )
        out_specs = (
            (every,) * packing.n_arrays,
            tuple(self._sent_spec(k) for k in sends),
            (every,) * self.residual_packings[kind].n_arrays,
        )
        call = self._jitted(task, kind, in_specs, out_specs, donate=(3,))
        first = self.n_carry + self.n_stacked
        return TaskProgram(
            kind,
            call,
            self._jitted(task, kind, in_specs, out_specs),
            tuple(self.direct[v] for v in direct),
            tuple(self.first_received + k for k in arrivals),
            reads,
            tuple(self.first_sent + k - first for k in sends),
            self.residual_packings[kind].nbytes,
        )

    @cached_property
    def _flows(self) -> Flows:
        """The layouts of what flows into the loop's body and out of it."""
        graph, assignment = self.stage.traced.graph, self.plan.assignment
        holders, constants = holder_values(graph), set(graph.constants)

        def layout(number: int) -> Layout:
            return (-1,) * len(assignment.mesh.axes) if number in constants else stored_layout(assignment, holders, number)

        return FLOWS["scan"](self.op, layout)

    def _arrival_spec(self, k: int) -> PartitionSpec:
        inputs = self._flows.inputs[0]
        layout = inputs[len(inputs) - len(self.arrivals) + k]
        return to_partition_spec(layout, self.arrivals[k].aval.ndim, self.plan.assignment.mesh.names)

    def _sent_spec(self, k: int) -> PartitionSpec:
        return to_partition_spec(self._flows.outputs[0][k], len(self._shape(k)), self.plan.assignment.mesh.names)

    def _send_specs(self) -> Iterator[PartitionSpec]:
        first = self.n_carry + self.n_stacked
        for k, message in enumerate(self.stage.sends):
            inside = message.kind == "loop"
            yield self._sent_spec(first + k - self.first_sent) if inside else self.out_specs[len(self.stage.results) + k]

    def _shape(self, k: int) -> tuple[int, ...]:
        """The shape of a result of the loop's body, whole."""
        return self.stage.traced.graph.values[self.op.bodies[0].outputs[k]].shape

    def _jitted(self, function: Callable, name: str, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Callable:
        mapped = jax.shard_map(function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def called(*groups: Any) -> Any:
            return mapped(*groups)

        called.__name__ = f"{self.stage.traced.graph.name}_{name}"
        return jax.jit(called, donate_argnums=donate, compiler_options=dict(self.options or {}) or None)

    # -- around the loop ----------------------------------------------------------------------------------------------------

    def programs(self) -> StagePrograms:
        """All programs."""
        tasks = self._tasks()
        levels, numbers = self._levels()
        self.handed_on: list[tuple[list[Var], Packing]] = []
        outers = [self._outer(level, levels) for level in numbers]
        n_args, n_results = len(self.stage.arguments), len(self.stage.results)
        shard = partial(NamedSharding, self.plan.mesh)
        whole = [self.spec_of[self.var_of[k]] if k in self.var_of else PartitionSpec() for k in range(n_args + len(self.stage.receives))]
        receives = [
            shard(whole[n_args + k] if message.kind != "loop" else self._arrival_spec(k - self.first_received))
            for k, message in enumerate(self.stage.receives)
        ]
        passed = {k: at for k, v in enumerate(self.outputs[:n_results]) if (at := self._argument(v)) is not None}
        return StagePrograms(
            tuple(outer for outer in outers if outer.level < self.loop_level),
            tasks,
            tuple(outer for outer in outers if outer.level >= self.loop_level),
            tuple(shard(spec) for spec in whole[:n_args]),
            tuple(shard(spec) for spec in self.out_specs[:n_results]),
            tuple(receives),
            tuple(self._send_specs()),
            passed,
        )

    def _argument(self, atom: Any) -> int | None:
        """The position of the argument that an atom is; None for what is computed, and for constants."""
        return self.argument_of.get(atom) if isinstance(atom, Var) else None

    def _is_passed(self, k: int, atom: Any) -> bool:
        """Whether a result is an argument as it is, which no program has to return."""
        return k < len(self.stage.results) and self._argument(atom) is not None

    def _received_level(self, var: Var) -> int:
        """The level of an input: that of the message that it is, 0 for an argument."""
        k = self.argument_of.get(var, 0) - len(self.stage.arguments)
        return self.stage.receives[k].level if k >= 0 else 0

    def _levels(self) -> tuple[dict[Var, int], list[int]]:
        """Per variable around the loop the level of the program that computes it; and the levels that have programs."""
        n_results = len(self.stage.results)
        is_loop = [False] * n_results + [message.kind == "loop" for message in self.stage.sends]
        self.given = [(k, v) for k, (v, loop) in enumerate(zip(self.outputs, is_loop, strict=True)) if not loop]
        eqns = [eqn for eqn in self.inner.eqns if eqn is not self.scan]
        level: dict[Var, int] = {var: self._received_level(var) for var in self.argument_of}
        level.update(dict.fromkeys(self.scan.outvars, self.loop_level))
        for eqn in eqns:
            level.update(dict.fromkeys(eqn.outvars, max((level.get(a, 0) for a in eqn.invars if isinstance(a, Var)), default=0)))
        kept = [self.entering[v] for v in self.handed] + list(self.started)
        early = [v for k, v in self.given if k >= n_results and isinstance(v, Var) and level.get(v, 0) < self.loop_level]
        before = needed_by(eqns, [*kept, *early])
        live = needed_by(eqns, [*kept, *(v for _, v in self.given)], effects=True)
        self.around: dict[int, list[JaxprEqn]] = {}
        for k, eqn in enumerate(eqns):
            if k in live:
                own = max((level.get(a, 0) for a in eqn.invars if isinstance(a, Var)), default=0)
                own = own if k in before else max(own, self.loop_level)
                level.update(dict.fromkeys(eqn.outvars, own))
                self.around.setdefault(own, []).append(eqn)
        given = {self._given_level(k, v, level) for k, v in self.given if not self._is_passed(k, v)}
        return level, sorted({*self.around, *given, self.loop_level - 1})

    def _given_level(self, k: int, atom: Any, level: dict[Var, int]) -> int:
        """The level of the program that gives a result or a message."""
        found = level.get(atom, 0) if isinstance(atom, Var) else 0
        return max(found, self.loop_level) if k < len(self.stage.results) else found

    def _outer(self, level: int, levels: dict[Var, int]) -> Outer:
        eqns, n_results = self.around.get(level, []), len(self.stage.results)
        is_last = level == self.loop_level - 1
        given = [(k, v) for k, v in self.given if self._given_level(k, v, levels) == level and not self._is_passed(k, v)]
        constants = [self.entering[v] for v in self.handed] if is_last else []
        starts = {kind: [self.started[k] for k in found if k < self.n_carry] for kind, found in self.totals.items()} if is_last else {}
        wanted = [*(v for _, v in given), *constants, *(a for found in starts.values() for a in found)]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = {a for eqn in eqns for a in eqn.invars if isinstance(a, Var)} | {a for a in wanted if isinstance(a, Var)}
        read = {v for v in read if v not in made and v not in self.known}
        everything = sorted(self.argument_of[v] for v in read if v in self.argument_of)
        of_loop = {v: k for k, v in enumerate(self.scan.outvars)}
        kinds = tuple(kind for kind in "FBW" if any(self.scan.outvars[k] in read for k in self.totals[kind]))
        reads = tuple(k for k, (found, _) in enumerate(self.handed_on) if any(v in read for v in found))
        later = [eqn for other, found in self.around.items() if other > level for eqn in found]
        donated = self._donated(everything, level, later, [k for k, _ in given])
        arguments = [k for k in everything if k not in donated]
        handed = self._handed_on(level, eqns, later, levels)
        constants_read = zip((self.entering[v] for v in self.handed), self.constants_packing.dtypes, strict=True)
        packing = self._packing(handed, later, [*as_they_are([*self.started, *(v for _, v in self.given)]), *constants_read])
        earlier = [self.handed_on[k] for k in reads]
        self.handed_on.append((handed, packing))
        constants_packing, total_packings = self.constants_packing, self.total_packings

        def outer(kept: tuple, gone: tuple, before: tuple, totals: tuple) -> tuple:
            env: dict[Var, Any] = dict(self.known)
            env.update(zip([self.var_of[k] for k in (*arguments, *donated)], (*kept, *gone), strict=True))
            for (variables, packed), arrays in zip(earlier, before, strict=True):
                env.update(zip(variables, packed.unpack(arrays), strict=True))
            for kind, arrays in zip(kinds, totals, strict=True):
                env.update(zip([self.scan.outvars[k] for k in self.totals[kind]], total_packings[kind].unpack(arrays), strict=True))
            evaluate(eqns, env)
            gives = tuple(jnp.asarray(value(v, env)) for _, v in given)
            packed = tuple(packing.pack([env[v] for v in handed]))
            if not is_last:
                return gives, packed
            sums = tuple(tuple(total_packings[kind].pack(self._start(kind, env))) for kind in "FBW")
            return gives, packed, tuple(constants_packing.pack([value(a, env) for a in constants])), sums

        assert not any(v in of_loop for v in read) or level >= self.loop_level, "a result of the loop is read after it"
        every = PartitionSpec(self.axes)
        in_specs = (
            tuple(self.spec_of[self.var_of[k]] for k in arguments),
            tuple(self.spec_of[self.var_of[k]] for k in donated),
            tuple((every,) * packed.n_arrays for _, packed in earlier),
            tuple((every,) * total_packings[kind].n_arrays for kind in kinds),
        )
        out_specs: tuple = (tuple(self.out_specs[k] for k, _ in given), (every,) * packing.n_arrays)
        if is_last:
            sums = tuple((every,) * total_packings[kind].n_arrays for kind in "FBW")
            out_specs = (*out_specs, (every,) * constants_packing.n_arrays, sums)
        n_args = len(self.stage.arguments)
        return Outer(
            level,
            self._jitted(outer, f"around{level}", in_specs, out_specs, donate=(1,)),
            tuple(k for k in arguments if k < n_args),
            tuple(donated),
            tuple(k - n_args for k in arguments if k >= n_args),
            reads,
            kinds,
            tuple(k for k, _ in given if k < n_results),
            tuple(k - n_results for k, _ in given if k >= n_results),
            is_last,
        )

    def _donated(self, arguments: Iterable[int], level: int, later: Iterable[JaxprEqn], given: Iterable[int]) -> list[int]:
        """The arguments whose memory a program may use for results: those that the results replace, and that no later program reads."""
        graph = self.stage.traced.graph
        read = {a for eqn in later for a in eqn.invars if isinstance(a, Var)}
        read |= {v for _, v in self.given if isinstance(v, Var)}
        replaced = {argument for result, argument in graph.aliases if result in set(given)}
        free = replaced.intersection(graph.donated) if level >= self.loop_level else set()
        return [k for k in arguments if k in free and self.var_of[k] not in read]

    def _handed_on(self, level: int, eqns: Iterable[JaxprEqn], later: Iterable[JaxprEqn], levels: dict[Var, int]) -> list[Var]:
        """What a program around the loop makes and later ones read or give."""
        read = {a for eqn in later for a in eqn.invars if isinstance(a, Var)}
        read |= {v for k, v in self.given if isinstance(v, Var) and self._given_level(k, v, levels) > level}
        if level < self.loop_level - 1:
            read |= {a for a in (*(self.entering[v] for v in self.handed), *self.started) if isinstance(a, Var)}
        return [v for eqn in eqns for v in eqn.outvars if v in read]

    def _start(self, kind: str, env: dict[Var, Any]) -> list[Any]:
        """The totals of a kind of task before the first microbatch."""
        found = []
        for k in self.totals[kind]:
            type_ = self._total_type(k)
            found.append(value(self.started[k], env) if k < self.n_carry else jnp.zeros(type_.shape, type_.dtype))
        return found
