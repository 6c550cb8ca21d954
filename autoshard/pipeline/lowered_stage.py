"""A stage's lowered program: the program of each device, and its loop over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from autoshard.ir import Layout, Op
from autoshard.ir.scan import scan_parts
from autoshard.lower import holder_values, manual_program, stored_layout, to_partition_spec
from autoshard.lower.control_flow import FLOWS, Flows
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.programs import Options, StagePlan
from autoshard.pipeline.stages import Stage
from autoshard.rules import rules_of
from autoshard.trace import types_of


class LoweredStage:
    """The lowered program of a stage.

    Attributes:
        stage, plan, options: what it is lowered from; options are of the compiler.
        inner: the program of each device.
        known: the values of its inputs that are constants.
        argument_of: per other input its position among the stage's arguments; ``var_of`` the inverse.
        spec_of: per such input its spec.
        outputs, out_specs: of the stage's results and what it sends, the atoms and their specs; of the loop's those of all microbatches.
        scan, op: its loop over microbatches, and the op of that.
        body: of the loop, with ``consts``, ``carries`` and ``slices``; ``entering`` and ``started`` are the operands of the first two.
        arrivals: the slices that are messages; index: that which is the microbatch's number.
        n_carry, n_stacked: how many of the body's results are totals; messages follow.
        first_received, first_sent: the number of the loop's first message among those that the stage receives, and sends.
    """

    def __init__(self, stage: Stage, plan: StagePlan, options: Options = None):
        self.stage, self.plan, self.options = stage, plan, options
        self.axes = tuple(plan.mesh.axis_names)
        rules = rules_of(stage.traced.graph)
        self.op: Op = loop_of(stage.traced.graph, rules, stage.traced.microbatches)
        # A trip of the loop is a task: what it would gather for the next one is gathered by that one.
        first = set(self.op.bodies[0].inputs)
        ahead = {value: layout for value, layout in plan.assignment.ahead.items() if value not in first}
        assignment = replace(plan.assignment, ahead=ahead)
        traced = stage.traced
        program = manual_program(traced.jaxpr, traced.graph, rules, assignment, plan.mesh, plan.reshard_path, compiler=plan.compiler)
        closed = jax.make_jaxpr(program)(*types_of(stage.traced.jaxpr.jaxpr.invars))
        self._name_ends(closed, next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"))
        self._open_loop()

    def _name_ends(self, closed: ClosedJaxpr, mapped: JaxprEqn) -> None:
        """Finds what each input and output of the program of a device is."""
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
        self.var_of: dict[int, Var] = {k: var for var, k in self.argument_of.items()}
        outs = {v: k for k, v in enumerate(mapped.outvars)}
        self.outputs = [self.inner.outvars[outs[v]] if not isinstance(v, Literal) else v for v in closed.jaxpr.outvars]
        specs = mapped.params["out_specs"]
        self.out_specs: list[Any] = [specs[outs[v]] if not isinstance(v, Literal) else PartitionSpec() for v in closed.jaxpr.outvars]

    def _open_loop(self) -> None:
        """Finds the loop over microbatches, and what its operands and results are."""
        stage = self.stage
        scans = [e for e in self.inner.eqns if e.primitive.name == "scan" and e.params["length"] == stage.traced.microbatches]
        self.scan: JaxprEqn = max(scans, key=lambda eqn: len(eqn.params["jaxpr"].jaxpr.eqns))
        self.body: ClosedJaxpr = self.scan.params["jaxpr"]
        self.consts, self.carries, self.slices = scan_parts(self.scan.params, self.body.jaxpr.invars)
        constants, self.started, _ = scan_parts(self.scan.params, self.scan.invars)
        self.entering = dict(zip(self.consts, constants, strict=True))
        leaving, self.n_carry = self.body.jaxpr.outvars, len(self.carries)
        n_sent = sum(message.kind == "loop" for message in stage.sends)
        n_received = sum(message.kind == "loop" for message in stage.receives)
        assert len(leaving) == len(stage.forward), "the loop's results are those of the stage's"
        self.n_stacked: int = len(leaving) - self.n_carry - n_sent
        self.index: Any | None = None if len(self.slices) == n_received else self.slices[0]
        self.arrivals = self.slices[len(self.slices) - n_received :]
        self.first_received, self.first_sent = len(stage.receives) - n_received, len(stage.sends) - n_sent

    @cached_property
    def _flows(self) -> Flows:
        """The layouts of what flows into the loop's body and out of it."""
        graph, assignment = self.stage.traced.graph, self.plan.assignment
        holders, constants = holder_values(graph), set(graph.constants)

        def layout(number: int) -> Layout:
            return (-1,) * len(assignment.mesh.axes) if number in constants else stored_layout(assignment, holders, number)

        return FLOWS["scan"](self.op, layout)

    def arrival_spec(self, k: int) -> PartitionSpec:
        """The spec of a message that arrives in the loop."""
        inputs = self._flows.inputs[0]
        layout = inputs[len(inputs) - len(self.arrivals) + k]
        return to_partition_spec(layout, self.arrivals[k].aval.ndim, self.plan.assignment.mesh.names)

    def sent_spec(self, k: int) -> PartitionSpec:
        """The spec of a result of the loop's body."""
        return to_partition_spec(self._flows.outputs[0][k], len(self._shape(k)), self.plan.assignment.mesh.names)

    def send_specs(self) -> Iterator[PartitionSpec]:
        """The specs of what the stage sends."""
        first = self.n_carry + self.n_stacked
        for k, message in enumerate(self.stage.sends):
            inside = message.kind == "loop"
            yield self.sent_spec(first + k - self.first_sent) if inside else self.out_specs[len(self.stage.results) + k]

    def _shape(self, k: int) -> tuple[int, ...]:
        """The shape of a result of the loop's body, whole."""
        return self.stage.traced.graph.values[self.op.bodies[0].outputs[k]].shape

    def jitted(self, function: Callable, name: str, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Callable:
        """A function of each device, of groups of arrays, as a jitted one of the stage's devices from all arrays to a list of all results.

        ``donate`` are groups.
        """
        mapped = jax.shard_map(function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        tree = jax.tree.structure(in_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        numbers = tree.unflatten(range(tree.num_leaves))

        def called(*arrays: Any) -> list[Any]:
            return jax.tree.leaves(mapped(*tree.unflatten(arrays)))

        called.__name__ = f"{self.stage.traced.graph.name}_{name}"
        donated = tuple(jax.tree.leaves([numbers[k] for k in donate]))
        return jax.jit(called, donate_argnums=donated, compiler_options=dict(self.options or {}) or None)
