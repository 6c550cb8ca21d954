"""Step time of a compiled program: from its schedule where the compiler estimates cycles, otherwise from its collectives and FLOPs.

A schedule's time is the compiler's cycles by a `Clock`, in the compiler's order, plus the exposed time of each collective, which
takes the cost model's time for the compiled bytes and axes, and is awaited at its ``-done`` if it is asynchronous.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from autoshard.cost.collectives import Communication
from autoshard.cost.record import Cost
from autoshard.ir import Collective, Mesh, as_compiled
from autoshard.verify.attribution import Clock, kernel_of
from autoshard.verify.compare import matched
from autoshard.verify.flops import cycles_of
from autoshard.verify.hlo import Computation, Instruction, Module, sent_by


def scheduled_seconds(hlo_text: str, mesh: Mesh, communication: Communication, clock: Clock) -> float:
    """The time of a compiled module's schedule: its instructions in order, with asynchronous collectives beside them.

    Args:
        hlo_text: from the TPU compiler, after code generation, so that it has cycles.
        mesh: the mesh.
        communication: the cost of collectives on it.
        clock: the device's, as `Clock.of` has it, or the compiler's own.
    """
    module = Module(hlo_text)

    def walk(name: str) -> float:
        computation = module.computations.get(name, Computation())
        now = wires = 0.0
        in_flight: dict[str, float] = {}
        for instruction in computation.values():
            started, channel, ends = _sends(module, computation, instruction, mesh)
            if ends:
                now = max(now, in_flight.pop(channel, now))
            elif started and channel:
                wires = in_flight[channel] = max(now, wires) + sent_seconds(started, mesh, communication)
            elif started:
                now = wires = max(now, wires) + sent_seconds(started, mesh, communication)
            if cycles_of(instruction) is not None:
                now += clock.seconds(kernel_of(module, computation, instruction))
            elif instruction.opcode != "fusion":
                now += sum(times * walk(callee) for callee, times in module.called(instruction))
        return max(now, wires)

    return walk(module.entry)


def sent_seconds(collectives: Iterable[Collective], mesh: Mesh, communication: Communication) -> float:
    """The time of collectives one after the other, times their executions; those with unknown axes count as over all axes.

    >>> from autoshard.cluster import Cluster
    >>> mesh = Mesh.of({"data": 8})
    >>> sent_seconds([], mesh, Communication(Cluster.parse("v5e:2x4").links(mesh)))
    0.0
    """
    everything = tuple(range(len(mesh.axes)))
    total = 0.0
    for one in collectives:
        axes = tuple(mesh.names.index(axis) for axis in one.mesh_axes if axis in mesh.names)
        total += one.count * float(communication.seconds(one.kind, one.bytes, axes or everything))
    return total


def corrected_seconds(cost: Cost, sent: Iterable[Collective], flops: float, mesh: Mesh, communication: Communication) -> float:
    """The predicted step time, corrected by the compiled FLOPs and collectives.

    Compute is scaled by the FLOPs. Collectives beyond the prediction count as exposed; missing ones are deducted by the predicted share
    of exposed communication.

    Args:
        cost: the prediction.
        sent: the compiled collectives.
        flops: of the compiled products and convolutions.
        mesh, communication: as for `scheduled_seconds`.
    """
    expected = as_compiled(cost.collectives)
    more = sent_seconds(matched(expected, tuple(sent)), mesh, communication) - sent_seconds(expected, mesh, communication)
    share = cost.exposed_communication_seconds / cost.communication_seconds if cost.communication_seconds else 1.0
    computing = cost.compute_seconds * (flops - cost.compiled_flops) / cost.flops if cost.flops else 0.0
    return max(0.0, cost.makespan_seconds + computing + (more if more > 0 else share * more))


def _sends(module: Module, computation: Computation, instruction: Instruction, mesh: Mesh) -> tuple[list[Collective], str, bool]:
    """The collectives of an instruction, the channel that it starts or ends (empty if it is synchronous), and whether it ends one."""
    if instruction.opcode.endswith("-start"):
        return sent_by(module, computation, instruction, mesh), instruction.name, False
    if instruction.opcode in ("collective-permute-done", "all-gather-done", "all-reduce-done"):
        return [], instruction.operands[0], True
    if instruction.opcode != "fusion":
        return sent_by(module, computation, instruction, mesh), "", False
    sent, channel, starts, ends = [], "", False, False
    for callee, _ in module.called(instruction):
        inside = module.computations.get(callee, Computation())
        for inner in inside.values():
            sent += sent_by(module, inside, inner, mesh)
            starts |= '"AsyncCollectiveStart"' in inner.rest
            ends |= '"AsyncCollectiveDone"' in inner.rest
            if found := re.search(r"channel_id=(\d+)", inner.rest):
                channel = found[1]
    return sent, channel if starts or ends else "", ends
