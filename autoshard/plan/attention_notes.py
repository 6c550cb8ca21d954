"""What plain attention takes in a strategy as it is written, and what a fused kernel would take, in words."""

from __future__ import annotations

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.ir.rewrites import FusedAttention
from autoshard.plan.notes import TOP, WORTH
from autoshard.plan.plan import Plan
from autoshard.render import format_seconds
from autoshard.rewrite import Rewriting
from autoshard.rewrite.attention_program import fused
from autoshard.rewrite.ring_attention import IMPLEMENTATIONS


def attention_notes(strategy: Plan, rewriting: Rewriting) -> list[str]:
    """What fused kernels would save; where they were asked for, why attention stays as it is written."""
    record, judged = strategy.record, strategy._judged
    name = compiler_of(Cluster.from_dict(record.cluster)).fused_attention
    is_fused = any(isinstance(each, FusedAttention) for each in record.program.rewrites)
    if judged is None or strategy._traced is None or not name or is_fused:
        return []
    found = fused(strategy._traced, IMPLEMENTATIONS[name])
    if rewriting.kernels == "auto":
        return list(dict.fromkeys(found.left))
    if not found.places:
        return []
    facts, model, values = judged.facts, judged.model, judged.facts.graph.values
    written = sum(
        op.trips * model.op_seconds(facts, op, record.assignment.choice(op.index))
        for op in facts.graph.walk()
        if not op.bodies and any(values[value].shape in found.shapes for value in (*op.operands, *op.results))
    )
    kernels = sum(trips * model.kernel_seconds(work, record.mesh.size) for work, trips in found.work)
    if written - kernels <= WORTH * record.cost.makespan_seconds:
        return []
    places = list(dict.fromkeys(found.places))
    more = f" and in {len(places) - TOP} more places" if len(places) > TOP else ""
    step = format_seconds(record.cost.makespan_seconds)
    return [
        f"attention at {', '.join(places[:TOP])}{more} takes about {format_seconds(written)} of the step's {step} as it is written; "
        f"kernels='auto' runs it in {name}, about {format_seconds(kernels)}"
    ]
