"""One program for a whole pipeline: the layers of a scan, divided into stages that all compute at the same time on different microbatches.

A scan of ``L`` layers over stacked weights becomes a scan over *ticks*. Each tick shifts a buffer, with a microbatch for each of ``S``
stages, by one stage, and applies ``K = L / S`` layers to it. In tick ``t`` stage ``s`` has microbatch ``t - s``, so that ``m`` microbatches
take ``m + S - 1`` ticks. The scan of the backward pass has its data shifted the other way, and goes through the ticks from the
last to the first: the same microbatch is at the same stage in the same tick, and reads what the forward pass kept in that tick.

Stages are a dimension of arrays like any other. It is constrained to the mesh axis `STAGE_AXIS`: stages are then computed by different
devices, and a shift is one collective permute of a microbatch's activations. All else of the step, such as the embedding, the loss and the
optimizer, is unchanged, and the devices of all stages share its work.

In ``v`` *rounds* each microbatch goes through all stages ``v`` times, each time through ``K = L / (v S)`` other layers: from the last stage
back to the first one, as in the interleaved schedule of Narayanan et al. (2021). Groups of ``S`` microbatches end all their rounds before
the next group enters, so that no microbatch waits: there are ``v m + S - 1`` ticks of ``1 / v`` of the work. The layers of a stage are then
not next to each other in the arrays of the step, whose stacks are exchanged once a step: weights before the ticks, gradients after them.

In the first and last ticks some stages have no microbatch. What they compute is never read: sums over microbatches select what counts.

With *weights apart* the ticks of the backward pass compute gradients of inputs alone, and keep what those of weights read. These are
computed after the last tick, all stages' of a microbatch at the same time: as in the zero-bubble schedules of Qi et al. (2024) no stage is
without work in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autoshard.errors import PipelineError, TraceError
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.rewrites import OneProgram
from autoshard.lower import AsItIs, Path, ops_by_path
from autoshard.microbatch.batch import HeldUpError, loop_of_batch, passes_of
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.rewrite import Inside
from autoshard.microbatch.rules import batch_rules
from autoshard.primitives import is_inlined
from autoshard.rewrite.stacks import scans_in, stacks_of
from autoshard.rewrite.stage_scan import StageScan
from autoshard.rewrite.ticks import Order, plain, staged
from autoshard.trace import Traced, rebuilt, types_of


def in_one_program(rewrite: OneProgram, traced: Traced) -> Traced:
    """The program with its scanned layers in so many stages.

    Raises:
        PipelineError: it has no scanned layers, or the number of stages does not divide them.
        TraceError: the batch cannot be computed in so many microbatches, or not by going over them once.
    """
    graph, rules = traced.graph, batch_rules(traced.graph)
    order = Order(rewrite.stages, rewrite.microbatches, rewrite.rounds, rewrite.weights_apart)
    try:
        loop = loop_of_batch(traced, rules, order.microbatches)
    except HeldUpError as error:
        raise _refusal(traced, order.microbatches, error) from None
    stacks = stacks_of(graph, loop, order)
    if not stacks:
        raise PipelineError(
            f"one program runs layers that are one lax.scan over their stacked weights, at the top level of the step, in stages; "
            f"{graph.name!r} has {scans_in(graph)}. Write the layers as such a scan, or use another schedule than 'one_program'."
        )
    ticking = _Ticking(ops_by_path(graph), graph, rules, loop, stacks, order)

    def function(*arguments: Any) -> list[Any]:
        return [plain(x) for x in ticking.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, arguments)]

    layers = ", ".join(dict.fromkeys(f"{op.equation.params['length']} at {op.origin}" for op in stacks))
    made = jax.make_jaxpr(function)(*types_of(traced.jaxpr.jaxpr.invars))
    return rebuilt(traced, made, rewrite, notes=(f"{rewrite.describe()}; layers: {layers}",))


def _refusal(traced: Traced, n: int, error: HeldUpError) -> TraceError:
    """Why a step cannot be computed by going once over ``n`` microbatches, with what runs it in stages, if anything does."""
    try:
        times = len(passes_of(traced, n))
    except TraceError:
        times = 1
    if times == 1:
        return TraceError(f"{error.reason}, or leave stages out.")
    return TraceError(
        f"one program goes over its microbatches once, and {traced.graph.name!r} has to {times} times, since later parts of the step read "
        "what comes of all examples in earlier ones. Use schedule='auto': its stages are programs of their own, with a pipeline each time."
    )


# -- the interpreter -----------------------------------------------------------------------------------------------------------


class _Ticking(AsItIs):
    """Evaluates a step with its stacks of layers in ticks."""

    def __init__(
        self, ops: Mapping[Path, Op], graph: Graph, rules: Sequence[Rule | None], loop: Loop, stacks: Collection[Op], order: Order
    ):
        super().__init__(ops)
        self._graph, self._loop, self._order = graph, loop, order
        self._stacks = {op.path for op in stacks}
        self._inside = Inside.of(ops, graph, rules, loop)
        self._weights: dict[int, tuple[Any, Any]] = {}

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        if path in self._stacks:
            return StageScan(self.ops[path], eqn, self._graph, self._loop, self._order, self._inside, self._staged).run(operands)
        return super()._equation(eqn, operands if is_inlined(eqn.primitive.name) else [plain(x) for x in operands], path)

    def _staged(self, x: Any) -> Any:
        """Weights as stages read them: one array for the forward and the backward pass, which share what is gathered of it."""
        if id(x) not in self._weights:
            self._weights[id(x)] = x, staged(jnp.asarray(x), self._order)
        return self._weights[id(x)][1]
