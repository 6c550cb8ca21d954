"""The programs of a stage's tasks: a stage's lowered program, divided.

A stage is lowered once, under its assignment, to the program of each device (`autoshard.lower.manual`). That program is divided by what
depends on what. *Before* the loop over microbatches, and *after* it, there is a program for each level at which messages arrive. The loop's
body is divided into tasks: ``F`` is what the results of the forward pass depend on, ``B`` what else the messages to earlier stages depend
on, ``W`` the rest, which no other stage waits for. So every collective of the plan happens once, where the plan has it, and what one task
makes and another one reads is handed on as each device has it, without any resharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.lower import HOST
from autoshard.pipeline.equations import as_they_are, evaluate, needed_by, value
from autoshard.pipeline.loop_tasks import LoopTasks
from autoshard.pipeline.packing import Packing
from autoshard.pipeline.programs import Options, Outer, StagePlan, StagePrograms
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.stages import Stage, Staged


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
    """The programs of all stages; with several chunks a stage, of all pieces."""
    found, splits = [], "W" in schedule.kinds
    for piece, (stage, plan) in enumerate(zip(staged.stages, plans, strict=True)):
        joins = joins_tasks(stage, schedule.orders[schedule.stage(piece)], schedule.chunk(piece))
        found.append(programs_of(stage, plan, staged.loop_level, splits, joins, options))
    return found


def joins_tasks(stage: Stage, order: Sequence[Task], chunk: int) -> bool:
    """Whether each backward task of a stage comes right after its forward task, and other stages wait for no result of the latter.

    So it is on the last stage. In one program what the backward pass reads, the logits among it, is not handed on in memory.
    """
    if not may_join(stage):
        return False
    after = {task: following for task, following in pairwise(order)}
    return all(after.get(task) == Task("B", task.microbatch, chunk) for task in order if task.kind == "F" and task.chunk == chunk)


def may_join(stage: Stage) -> bool:
    """Whether no other stage waits for what a stage's forward task makes."""
    return not any(message.kind == "loop" and not message.backward for message in stage.sends)


Handed = tuple[list[Var], Packing]
"""What a program hands on to later ones, and how."""


class _Divided(LoopTasks):
    """A stage that is divided into tasks and programs around the loop."""

    def __init__(self, stage: Stage, plan: StagePlan, loop_level: int, splits_weights: bool, joins: bool, options: Options = None):
        super().__init__(stage, plan, splits_weights, joins, options)
        self.loop_level = loop_level

    def programs(self) -> StagePrograms:
        """All programs."""
        tasks = self.task_programs()
        levels, numbers = self._levels()
        self.handed_on: list[Handed] = []
        outers = [self._outer(level, levels) for level in numbers]
        n_args, n_results = len(self.stage.arguments), len(self.stage.results)
        shard, graph = partial(NamedSharding, self.plan.mesh), self.stage.traced.graph
        argument_kinds = [HOST if graph.values[v].on_host else None for v in graph.arguments]
        result_kinds = [HOST if graph.values[v].on_host else None for v in graph.results]
        whole = [self.spec_of[self.var_of[k]] if k in self.var_of else PartitionSpec() for k in range(n_args + len(self.stage.receives))]
        receives = [
            shard(whole[n_args + k] if message.kind != "loop" else self.arrival_spec(k - self.first_received))
            for k, message in enumerate(self.stage.receives)
        ]
        passed = {k: at for k, v in enumerate(self.outputs[:n_results]) if (at := self._argument(v)) is not None}
        return StagePrograms(
            tuple(outer for outer in outers if outer.level < self.loop_level),
            tasks,
            tuple(outer for outer in outers if outer.level >= self.loop_level),
            tuple(shard(spec, memory_kind=kind) for spec, kind in zip(whole[:n_args], argument_kinds, strict=False)),
            tuple(shard(spec, memory_kind=kind) for spec, kind in zip(self.out_specs[:n_results], result_kinds, strict=False)),
            tuple(receives),
            tuple(self.send_specs()),
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
        starts = [*(self.entering[v] for v in self.handed), *self.started] if is_last else []
        wanted = [*(v for _, v in given), *starts]
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
        packing = self.packed_for(handed, later, [*as_they_are([*self.started, *(v for _, v in self.given)]), *constants_read])
        earlier = [self.handed_on[k] for k in reads]
        self.handed_on.append((handed, packing))
        assert not any(v in of_loop for v in read) or level >= self.loop_level, "a result of the loop is read after it"
        function = self._outer_function(eqns, (*arguments, *donated), earlier, kinds, [v for _, v in given], self.handed_on[-1], is_last)
        in_specs, out_specs = self._outer_specs(arguments, donated, earlier, kinds, [k for k, _ in given], packing, is_last)
        n_args = len(self.stage.arguments)
        sums = [self.constants_packing, *(self.total_packings[kind] for kind in "FBW")] if is_last else []
        return Outer(
            level,
            self.jitted(function, f"around{level}", in_specs, out_specs, donate=(1,)),
            tuple(k for k in arguments if k < n_args),
            tuple(donated),
            tuple(k - n_args for k in arguments if k >= n_args),
            reads,
            kinds,
            tuple(k for k, _ in given if k < n_results),
            tuple(k - n_results for k, _ in given if k >= n_results),
            (len(given), *(each.n_arrays for each in (packing, *sums))),
        )

    def _outer_function(
        self,
        eqns: Sequence[JaxprEqn],
        arguments: Sequence[int],
        earlier: Sequence[Handed],
        kinds: Sequence[str],
        given: Sequence[Any],
        handed: Handed,
        is_last: bool,
    ) -> Callable:
        """The function of a program around the loop; the last one before it makes constants and totals, too."""

        def outer(kept: tuple, gone: tuple, before: tuple, totals: tuple) -> tuple:
            env: dict[Var, Any] = dict(self.known)
            env.update(zip([self.var_of[k] for k in arguments], (*kept, *gone), strict=True))
            for (names, packed), arrays in zip(earlier, before, strict=True):
                env.update(zip(names, packed.unpack(arrays), strict=True))
            for kind, arrays in zip(kinds, totals, strict=True):
                env.update(zip([self.scan.outvars[k] for k in self.totals[kind]], self.total_packings[kind].unpack(arrays), strict=True))
            evaluate(eqns, env)
            gives = tuple(jnp.asarray(value(v, env)) for v in given)
            variables, packing = handed
            packed = tuple(packing.pack([env[v] for v in variables]))
            if not is_last:
                return gives, packed
            sums = tuple(tuple(self.total_packings[kind].pack(self._start(kind, env))) for kind in "FBW")
            return gives, packed, tuple(self.constants_packing.pack([value(self.entering[v], env) for v in self.handed])), sums

        return outer

    def _outer_specs(
        self,
        arguments: Sequence[int],
        donated: Sequence[int],
        earlier: Sequence[Handed],
        kinds: Sequence[str],
        given: Sequence[int],
        packing: Packing,
        is_last: bool,
    ) -> tuple[tuple, tuple]:
        """The specs of what such a program is given, and of what it makes."""
        every = PartitionSpec(self.axes)
        in_specs = (
            tuple(self.spec_of[self.var_of[k]] for k in arguments),
            tuple(self.spec_of[self.var_of[k]] for k in donated),
            tuple((every,) * packed.n_arrays for _, packed in earlier),
            tuple((every,) * self.total_packings[kind].n_arrays for kind in kinds),
        )
        out_specs: tuple[Any, ...] = (tuple(self.out_specs[k] for k in given), (every,) * packing.n_arrays)
        if is_last:
            sums = tuple((every,) * self.total_packings[kind].n_arrays for kind in "FBW")
            out_specs = (*out_specs, (every,) * self.constants_packing.n_arrays, sums)
        return in_specs, out_specs

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
            type_ = self.total_type(k)
            found.append(value(self.started[k], env) if k < self.n_carry else jnp.zeros(type_.shape, type_.dtype))
        return found
