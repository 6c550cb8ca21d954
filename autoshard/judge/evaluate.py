"""The judge: the cost of an assignment, in a walk over the program's ops, without any search table.

*Objective.* The sum of all compute and all collectives of a step, one after the other: additive, so that searchers can
minimise and bound it. *Makespan.* The end of a schedule that hides asynchronous collectives behind independent compute; see
`autoshard.cost.schedule`. A value is resharded once for each distinct layout it is read in. An op that is fused into its reader runs with
that one: it fills no gap before.

*Compiled.* Where partial results are added before they are combined, or the compiler sends bfloat16, the makespan has the collectives as
compiled (`Collective.compiled`); the objective charges the planned ones, since it adds up the costs of ops one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from autoshard.analysis.partial_sums import Addition, late_sums
from autoshard.compilers.bf16_demotion import NARROW_SHARE, is_demoted
from autoshard.compilers.buffer_assignment import peak_memory
from autoshard.compilers.buffers import Copy, Peak
from autoshard.compilers.fused_program import Kernel
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.narrow_sums import is_narrow, phases
from autoshard.cost.prefetch import prefetches
from autoshard.cost.record import Cost, Recomputation
from autoshard.cost.reshard import Step, path_seconds
from autoshard.cost.schedule import CARRIED, COMPUTE, PRODUCT, WIRES
from autoshard.cost.windows import RESULT, Window, Windows
from autoshard.ir import Assignment, Choice, Collective, Flow, Layout, Op, Reason, served_from, shards, shift_layout, view_of
from autoshard.judge.attribution import Blame
from autoshard.judge.model import CostModel, OpCost
from autoshard.judge.task_graph import Cause, Maker, Region, Sent, TaskGraph
from autoshard.primitives import is_loop, is_matrix, is_transform


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """An assignment, its cost, and its memory: the peak's values, the copies in other layouts, the partial results."""

    assignment: Assignment
    cost: Cost
    peak: Peak
    copies: Mapping[tuple[int, Layout], Copy] = field(default_factory=dict, repr=False)
    partials: Mapping[int, Step] = field(default_factory=dict, repr=False)


def scheduled(facts: ProgramFacts, model: CostModel, assignment: Assignment) -> tuple[Judgement, TaskGraph]:
    """The cost of an assignment with the tasks that its makespan is of, each region with its schedule."""
    judge = _Judge(facts, model, assignment)
    return judge.judgement(), judge.tasks


def evaluate(facts: ProgramFacts, model: CostModel, assignment: Assignment) -> Judgement:
    """The cost of an assignment; O(n log n) in the program's size."""
    return _Judge(facts, model, assignment).judgement()


def recomputation(facts: ProgramFacts, model: CostModel, judgement: Judgement) -> Recomputation | None:
    """Values that the compiler computes again so that the program fits; None where it need not, and where that would not reach its goal."""
    compiler, limit = facts.compiler, model.cluster.memory_limit_bytes
    if not compiler.memory_goal or judgement.cost.peak_bytes <= compiler.memory_goal * limit:
        return None
    orders = compiler.buffers(facts, judgement.assignment, judgement.copies, judgement.partials)
    ops, roots = facts.graph.walk(), facts.fusion.root
    combined = {roots[value] for op in judgement.partials for value in ops[op].results}

    def costs(kernel: Kernel) -> list[OpCost]:
        return [model.op_cost(facts, ops[op], judgement.assignment.choice(op)) for op in dict.fromkeys((kernel.main, kernel.op))]

    def alone(kernel: Kernel) -> bool:
        sent = kernel.main in judgement.partials or not combined.isdisjoint(kernel.makes)
        return not (sent or any(cost.exchange for cost in costs(kernel)))

    found = {held: compiler.recomputed(facts, held, alone, limit) for held in orders}
    chosen = found[max(orders, key=lambda held: held.usage.max())]
    if chosen is None or None in found.values():
        return None
    return Recomputation(len(chosen.kernels), chosen.peak_bytes, sum(cost.seconds for kernel in chosen.kernels for cost in costs(kernel)))


_Made = int | tuple[int, Layout]
"""A value, or its copy in a layout."""


class _Judge:
    def __init__(self, facts: ProgramFacts, model: CostModel, assignment: Assignment):
        self.facts = facts
        self.graph = facts.graph
        self.model = model
        self.assignment = assignment
        self.sizes = model.mesh.sizes
        self.whole = (-1,) * len(self.sizes)
        streams = dict.fromkeys(facts.compiler.asynchronous, WIRES) | dict.fromkeys(facts.compiler.carried, CARRIED)
        self.tasks = TaskGraph(model, streams)
        self.fuses = bool(streams) and not facts.compiler.kernel_by_kernel  # kernels that are known have one task each as it is
        self.late = late_sums(facts.graph, facts.rules, assignment, facts.sums)
        paths = model.reshard_paths(facts.graph.values)
        self.windows: dict[int, Window] = {}
        if assignment.windows:
            self.windows = Windows(facts.graph, facts.rules, assignment, paths, facts.readers, self.late.values).assigned()
        self.additions = {each.op: each for each in facts.sums.additions if each.op in self.late.additions}
        self.flops = self.kernel_flops = self.transform_flops = self.skipped_flops = 0.0
        self.makers: dict[_Made, Maker | None] = {}
        self.copies: dict[tuple[int, Layout], Copy] = {}
        self.partials: dict[int, Step] = {}
        self.combined: dict[int, tuple[Region, int]] = {}  # per op the task that combines its partial results
        self.copied: dict[int, tuple[int, Layout]] = {}  # per collective the copy that it is for
        self.wide: set[tuple[int, Layout]] = set()  # copies of which a reader wants every bit
        self.exchanged: dict[tuple, tuple[Region, set[int]]] = {}  # where halos were sent, and the tasks that bring them

    def judgement(self) -> Judgement:
        self._run(self.graph.ops)
        end, self.tasks.op = len(self.graph.walk()), -1
        for result, argument in self.graph.aliases:
            value = self.graph.results[result]
            if self.facts.free[value]:
                continue
            target = self.assignment.layout(self.graph.arguments[argument])
            replaced = partial(_as_is, Reason("replaced", argument=self.graph.argument_paths[argument]))
            self._read(value, target, end, 1, self.graph.result_paths[result], replaced)
        makespan = self._scheduled()
        rounded = {made for made in self.copied.values() if made in self.copies and self._rounded(made)}
        self.copies |= {made: replace(self.copies[made], rounded=True) for made in rounded}
        peak = peak_memory(self.facts, self.assignment, self.copies, self.partials)
        tasks = self.tasks
        cost = Cost(
            objective_seconds=tasks.compute_seconds + tasks.communication_seconds + tasks.saved_seconds,
            makespan_seconds=min(makespan, tasks.compute_seconds + tasks.communication_seconds),  # which it exceeds by rounding at most
            compute_seconds=tasks.compute_seconds,
            communication_seconds=tasks.communication_seconds,
            exposed_communication_seconds=tasks.exposed_seconds,
            peak_bytes=peak.nbytes,
            flops=self.flops,
            kernel_flops=self.kernel_flops,
            collectives=self._collectives(),
            transform_flops=self.transform_flops,
            skipped_flops=self.skipped_flops,
            low_share=self.model.cluster.device.low_share,
            high_share=self.model.cluster.device.high_share,
            late_share=self.model.cluster.device.late_share,
        )
        return Judgement(self.assignment, cost, peak, self.copies, self.partials)

    def _scheduled(self) -> float:
        """The seconds of one run of the region that all tasks of have been added."""
        region = self.tasks.region
        for task, position in region.sent.items() if self.facts.compiler.demotes_operands else ():
            copy = self.copied.get(position)
            if copy is not None and self._rounded(copy):
                self.tasks.resize(region, task, self.tasks.sent[position].step.nbytes * NARROW_SHARE)
        return self.tasks.scheduled_seconds()

    def _collectives(self) -> tuple[Collective, ...]:
        blame = Blame(self.facts, self.assignment)
        names = self.model.mesh.names
        return tuple(
            Collective(
                kind=sent.step.kind,
                mesh_axes=tuple(names[axis] for axis in sent.step.axes),
                bytes=sent.nbytes if sent.step.trips > 1 and sent.nbytes else sent.step.nbytes,
                count=sent.trips * max(sent.step.hops, 1) // max(sent.step.trips, 1),
                op=blame.served(sent.source),
                value=blame.moved(sent.moved),
                reason=sent.cause(blame, sent.step),
                seconds=sent.step.seconds * max(sent.step.trips, 1) / max(sent.step.hops, 1),
                exposed_seconds=self._exposed(sent, self.tasks.exposures[position]),
                compiled=self._compiled(sent),
            )
            for position, sent in enumerate(self.tasks.sent)
            if any(self.sizes[axis] > 1 for axis in sent.step.axes) and not sent.added and sent.trips  # one device sends nothing
        )

    def _exposed(self, sent: Sent, exposure: float) -> float:
        """Of one collective, to a femtosecond: more than differences of a schedule's times say, which would differ between equal layers."""
        trips = max(sent.step.trips, 1) / max(sent.step.hops, 1)
        exposed = round(exposure * trips / sent.trips, 15) if sent.trips else 0.0
        return sent.step.seconds * trips if abs(exposed - sent.step.seconds * trips) <= 1e-15 else exposed

    def _compiled(self, sent: Sent) -> tuple[Collective, ...] | None:
        """The collectives that the compiler makes of one; None where it is compiled as planned."""
        step, nbytes = sent.step, sent.nbytes or sent.step.nbytes
        if (narrow := self._narrow(step, nbytes)) and step.trips:
            return tuple(Collective(kind, axes, each, sent.trips // step.trips) for kind, axes, each in narrow)
        if step.trips > 1 or (step.trips and nbytes == step.nbytes):
            return None
        names = self.model.mesh.names
        return (Collective(step.kind, tuple(names[axis] for axis in step.axes), nbytes, sent.trips),) if step.trips else ()

    def _narrow(self, step: Step, nbytes: float) -> tuple[tuple[str, tuple[str, ...], float], ...]:
        """The collectives of a sum that crosses levels in a narrow type; none of another one."""
        mesh, known = self.model.mesh, self.model.narrow
        if not known or not step.itemsize:
            return ()
        sizes = {mesh.names[axis]: mesh.sizes[axis] for axis in step.axes}
        crossing = {name: each for name, each in known.items() if name in sizes}
        is_one = is_narrow(nbytes, step.itemsize, tuple(sizes), crossing)
        return tuple(phases(step.kind, nbytes, step.itemsize, sizes, crossing)) if is_one else ()

    # -- the walk ----------------------------------------------------------------------------------------------------

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.tasks.op = op.index
            if op.bodies:
                self._control_flow(op)
            else:
                self._op(op)

    def _control_flow(self, op: Op) -> None:
        """Reads sources in their holders' layouts: once before the bodies, or once a trip inside them."""
        loop = is_loop(op.primitive)
        made_inside = {value for body in op.bodies for value in body.outputs}
        before = self._flows(op, lambda flow: not (flow.inside or flow.value in made_inside))
        if loop:
            self.tasks.enter(op.trips * max(body.trips for body in op.bodies), before.values())
        else:
            self.makers.update(before)
        self._prefetch(op)
        for body in op.bodies:
            self._run(body.ops)
        self.tasks.op = op.index
        after = self._flows(op, lambda flow: flow.inside or flow.value in made_inside)
        if not loop:
            self.makers.update((value, maker) for value, maker in after.items() if value in op.results)
            return
        self.makers.update(dict.fromkeys(op.results, self.tasks.leave(self._scheduled())))

    def _prefetch(self, op: Op) -> None:
        """Gathers for the next trip, for which no op of this one waits. The first trip's are gathered before the loop, beyond the plan."""
        tasks, paths = self.tasks, self.model.reshard_paths(self.graph.values)
        trips, outer = tasks.region.runs, tasks.region.runs // (op.bodies[0].trips or 1)
        for each in prefetches(self.graph, self.facts.rules, self.assignment, op, paths):
            own, key = self.assignment.layout(each.value), (each.value, each.target)
            path = paths(each.value, own, each.target)
            tasks.communicate(path, set(), trips + outer, op, each.value, partial(_ahead, each.value, own, each.target))
            carrying = self.model.storing_seconds(self.graph.values[each.value], own, each.target)  # to the next trip: a copy
            tasks.compute(carrying, trips, set())
            tasks.saved_seconds -= path_seconds(path) * outer + carrying * trips
            self.makers[key] = None
            nbytes = self.graph.values[each.value].nbytes / shards(each.target, self.sizes)
            self.copies[key] = Copy(2 * nbytes, op.index, _last(op))

    def _flows(self, op: Op, chosen: Callable[[Flow], bool]) -> dict[_Made, Maker | None]:
        """Reads some of the flows into an op's holders; gives the makers of each holder's value and its views."""
        found: dict[_Made, Maker | None] = {}
        for holder in op.holders:
            layout = self.assignment.layout(holder.value)
            makers = []
            for flow in filter(chosen, holder.sources):
                if self.facts.settled[flow.value]:
                    makers.append(self.makers.get(flow.value))
                    continue
                target = shift_layout(layout, flow.shift)
                assert target is not None, "a stacked result keeps its leading dimension whole"
                rounds = is_demoted(self.facts.demands.by_holder(holder))
                makers.append(self._read(flow.value, target, op.index, op.flow_trips(flow), op, _HELD, rounds))
            if makers:
                found |= dict.fromkeys((holder.value, *holder.views), self.tasks.join(self.tasks.needs(makers)))
        return found

    def _op(self, op: Op) -> None:
        facts, tasks = self.facts, self.tasks
        if facts.idle[op.index]:
            return
        choice = self.assignment.choice(op.index)
        cost = self.model.op_cost(facts, op, choice)
        makers, settled, layouts = self.makers, facts.settled, self.assignment.layouts
        window = self.windows.get(op.index)
        found = set()
        for value, target in zip(op.operands, cost.operands, strict=True):
            if window is not None and window.operand != RESULT and value == window.value:
                if (maker := makers.get(value)) is not None:
                    found.add(maker)
                continue
            if settled[value] or layouts.get(value, self.whole) == target:
                maker = makers.get(value)
            else:
                rounds = is_demoted(facts.demands.by_ops[op.index])
                maker = self._read(value, target, op.index, op.trips, op, partial(_splits, op, choice), rounds)
            if maker is not None:
                found.add(maker)
        if op.index in self.additions:
            self._add_first(self.additions[op.index])
        if cost.is_nothing and len(found) < 2:
            for maker in found:
                self._made(op, maker)
            return
        region = tasks.region
        needs, first = tasks.needs(found), len(region.tasks.seconds)
        if window is not None:
            self.flops += op.trips * cost.flops
            done = self._windowed(op, cost, window, needs)
            if window.operand == RESULT or not cost.combines:
                self._made(op, tasks.join(done))
                return
            needs = done
        beside: set[int] = set()
        if cost.exchange:
            needs, beside = self._exchange(op, cost, needs, partial(_exchanged, op, choice))
        if cost.seconds and window is None:
            self.flops += op.trips * cost.flops
            self.kernel_flops += op.trips * cost.flops if op.kernel is not None and not op.kernel.interpreted else 0.0
            if (grouped := facts.grouped.get(op.index)) is not None:
                self.skipped_flops += op.trips * cost.flops * (grouped.counted / grouped.done - 1)
            self.transform_flops += op.trips * cost.flops if is_transform(op.primitive) else 0.0
            last = cost.seconds / (1 + max(step.hops for step in cost.exchange)) if beside else 0.0  # with what comes last
            needs = tasks.compute(cost.seconds - last, op.trips, needs, PRODUCT if is_matrix(op.primitive) else COMPUTE)
            needs = tasks.compute(last, op.trips, needs | beside) if beside else needs
        if not cost.combines:
            maker = tasks.join(needs)
            self._made(op, maker)
            if self.fuses and maker is not None and maker[1] >= first and not any(facts.materialised[value] for value in op.results):
                region.fused.append(maker[1])
            return
        for value, combination in zip(op.results, cost.combinations, strict=True):
            done = needs
            if combination:
                self.partials[op.index] = combination[0]
                done = tasks.communicate(combination, needs, op.trips, op, value, partial(_combined, op, choice))
                if len(done) == 1 and (task := next(iter(done))) in region.sent:
                    self.combined[op.index] = region, task
                    trips, once = tasks.sent[region.sent[task]].step.trips, op.index in self.late.once
                    if trips > 1 and not once:
                        tasks.combine_each_trip(region, task)
                    elif trips == 1 and once:
                        tasks.combine_once(region, task, facts.sums.over[op.index], facts.sums.widened[op.index])
            makers[value] = tasks.join(done)

    def _windowed(self, op: Op, cost: OpCost, window: Window, needs: set[int]) -> set[int]:
        """A product's blocks, and the permutes between them; the objective keeps the cost of a plain product and its collective."""
        value, choice = self.graph.values[window.value], self.assignment.choice(op.index)
        tasks, turning = self.tasks, _ACCUMULATED if window.operand == RESULT else _CIRCULATED
        before = tasks.compute_seconds + tasks.communication_seconds
        step, seconds = self.model.window_step(value, window), self.model.window_seconds(self.facts, op, choice, window)

        def product(waits: set[int]) -> set[int]:
            return tasks.compute(seconds, op.trips, waits, PRODUCT)

        def sent(waits: set[int]) -> set[int]:
            return tasks.communicate((step,), waits, op.trips, op, window.value, turning)

        if window.operand == RESULT:
            ways = [needs] * window.halves
            for number in range(window.blocks):
                ways = [product(needs | sent(way)) if number else product(needs) for way in ways]
            done = set().union(*ways)
            replaced = path_seconds(cost.combinations[0])
        else:
            done, arriving = product(needs), [needs, needs]
            for number in range(1, window.blocks):  # from both sides, the nearest first
                arriving[number % 2] = sent(arriving[number % 2])
                done = product(done | arriving[number % 2])
            path = self.model.reshard_path(value, window.step.source, window.step.target)
            stored = 0.0 if self.facts.portable[window.value] else self.model.storing_seconds(value, path[0].source, path[0].target)
            replaced = path_seconds(path) + stored
            nbytes = step.nbytes * min(window.blocks, 3)  # the next one on either side
            self.copies[window.value, window.step.target] = Copy(nbytes, op.index, op.index)
        apart = self.model.unfused_seconds(self.facts, op, choice, window)
        done = tasks.compute(apart, op.trips, done) if apart else done
        taken = tasks.compute_seconds + tasks.communication_seconds - before
        tasks.saved_seconds += (replaced + cost.seconds) * op.trips - taken
        return done

    def _made(self, op: Op, maker: Maker | None) -> None:
        """All results of an op are there when one task is done."""
        for value in op.results:
            self.makers[value] = maker

    def _exchange(self, op: Op, cost: OpCost, needs: set[int], cause: Cause) -> tuple[set[int], set[int]]:
        """The exchange of an op's shards: the tasks before it, and those of rings beside it.

        Compilers send the halos of a value once for a convolution and its kernel's gradient.
        """
        once = op.primitive == "conv_general_dilated"
        key = op.operands[0], cost.operands[0], tuple((step.kind, step.axes, step.nbytes) for step in cost.exchange)
        region, sent = self.exchanged.get(key, (None, set())) if once else (None, set())
        if region is not self.tasks.region:
            first = [step for step in cost.exchange if not step.hops]
            sent = self.tasks.communicate(first, needs, op.trips, op, op.operands[0], cause)
            if once:
                self.exchanged[key] = self.tasks.region, sent
            rings = [step for step in cost.exchange if step.hops]
            return sent, self.tasks.communicate(rings, sent, op.trips, op, op.operands[0], cause) if rings else set()
        for step in (step for step in cost.exchange if step.nbytes):
            self.tasks.note_merged(step, op.trips, op, op.operands[0], cause)
        return needs | sent, set()

    def _add_first(self, addition: Addition) -> None:
        """Of two collectives whose results are only added keeps the second, which combines the sum."""
        first, self.combined[addition.op] = (self.combined[side] for side in addition.sides)
        self.tasks.drop(*first)

    def _rounded(self, copy: tuple[int, Layout]) -> bool:
        """Whether the compiler rounds before it sends a copy, since all readers of the copy round."""
        return self.facts.compiler.demotes_operands and copy not in self.wide and self.graph.values[copy[0]].dtype == "float32"

    def _read(self, value: int, target: Layout, op: int, trips: int, source: Op | str, reason: Cause, rounds: bool = False) -> Maker | None:
        """The maker of the value in the target layout for a reader that may round it; reshards it if no reader has before."""
        own = self.assignment.layout(value)
        maker = self.makers.get(value)
        if own == target:
            return maker
        values, path_of = self.graph.values, self.model.reshard_path
        copy = self.assignment.copies.get(value)
        served = served_from(own, copy, target, lambda a, b: path_seconds(path_of(values[value], a, b)))
        for previous, layout in pairwise(dict.fromkeys((own, served, target))):
            if (value, layout) not in self.makers and (seen := self._seen(value, layout)) is not None:
                self.tasks.saved_seconds += path_seconds(path_of(values[value], previous, layout)) * trips
                self.makers[value, layout] = self.makers[seen]
                if seen in self.copies:
                    self.copies[seen] = replace(self.copies[seen], last=op)
            if (value, layout) not in self.makers:
                path = path_of(values[value], previous, layout)
                needs = self.tasks.needs((maker,))
                start = len(self.tasks.sent)
                done = self.tasks.communicate(path, needs, trips, source, value, partial(_resharded, value, previous, layout, reason))
                self.copied.update(dict.fromkeys(range(start, len(self.tasks.sent)), (value, layout)))
                beside = any(self.assignment.layout(other) == target for other in self.facts.single_rows.get(value, ()))
                if beside and any(step.kind == "all_to_all" for step in path):
                    self.wide.add((value, layout))
                if not self.facts.portable[value]:
                    done = self.tasks.compute(self.model.storing_seconds(values[value], previous, layout), trips, done)
                self.makers[value, layout] = self.tasks.join(done)
                apart = any(a != b and size > 1 for a, b, size in zip(previous, layout, self.sizes, strict=True))
                sends = apart and any(step.kind != "slice" for step in path)
                sliced = not sends and isinstance(source, Op) and is_matrix(source.primitive) and not self.facts.free[value]
                if apart and (sliced or not self.facts.portable[value]):  # stored whole to be sliced by a product, or sent
                    self.copies.setdefault((value, own), Copy(values[value].nbytes / shards(own, self.sizes), op, op))
                if sends:
                    self.copies[value, layout] = Copy(values[value].nbytes / shards(layout, self.sizes), op, op)
            if (value, layout) in self.copies:
                self.copies[value, layout] = replace(self.copies[value, layout], last=max(op, self.copies[value, layout].last))
            maker = self.makers[value, layout]
        if not rounds:
            self.wide.update(((value, served), (value, target)))
        return maker

    def _seen(self, value: int, layout: Layout) -> tuple[int, Layout] | None:
        """The copy that is there already of the operand of a view, in the layout that the view turns into this one."""
        maker = self.facts.makers[value]
        if maker is None:
            return None
        op, rule = self.graph.walk()[maker], self.facts.rules[maker]
        before = view_of(op.primitive, rule, layout, self.sizes)
        seen = None if before is None else (op.operands[0], before)
        return seen if seen in self.makers else None


def _as_is(reason: Reason, blame: Blame, step: Step) -> Reason:
    return reason


_HELD, _CIRCULATED, _ACCUMULATED = (partial(_as_is, Reason(kind)) for kind in ("held", "circulated", "accumulated"))


def _ahead(value: int, before: Layout, after: Layout, blame: Blame, step: Step) -> Reason:
    return blame.read(value, before, after, Reason("ahead"))


def _last(op: Op) -> int:
    """The index of the last op in an op's bodies."""
    return max((_last(inner) for body in op.bodies for inner in body.ops), default=op.index)


def _splits(op: Op, choice: Choice, blame: Blame, step: Step) -> Reason:
    return blame.splits(op, choice, step)


def _exchanged(op: Op, choice: Choice, blame: Blame, step: Step) -> Reason:
    return blame.exchanged(op, choice, step)


def _combined(op: Op, choice: Choice, blame: Blame, step: Step) -> Reason:
    return blame.combined(op, choice, step)


def _resharded(value: int, before: Layout, after: Layout, reason: Cause, blame: Blame, step: Step) -> Reason:
    return blame.read(value, before, after, reason(blame, step))
