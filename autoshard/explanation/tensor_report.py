"""The report on a tensor's layout, in a step or in a stage of a pipeline: why it is so, what moves it, and other layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.explanation import Judged
from autoshard.explanation.named import found_by
from autoshard.explanation.program import Searched
from autoshard.explanation.tensor import Alternative, TensorExplanation
from autoshard.explanation.tensor import explain_tensor as tensor_explanation
from autoshard.explanation.text import blame, format_spec
from autoshard.ir import Spec
from autoshard.ir.words import array_type
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_count, format_percent, format_seconds
from autoshard.strategy.record import plain

SAME = 1e-3  # of the step: below it two layouts are as fast
CLOSED = 12  # unavailable layouts that are listed


@dataclass(frozen=True, slots=True)
class TensorReport(Report):
    """Why a tensor is sharded as it is; ``data`` is the same as numbers and names."""

    data: TensorExplanation

    def to_json(self) -> str:
        """The explanation as JSON."""
        return json.dumps(plain(self.data), indent=1, allow_nan=False)


def explain_tensor(judged: Judged, name: str, searched: Searched, spec: Spec | None = None, details: bool = False) -> TensorReport:
    """The report on a tensor's layout.

    Args:
        judged: the program.
        name: of the tensor.
        searched: the strategy's problem, and the hints of its search.
        spec: the layout in question.
        details: whether all layouts are searched.
    """
    assert searched.problem is not None, "made for the first question"
    data = tensor_explanation(judged, name, searched.problem, searched.hints, spec, details)
    return TensorReport(f"{data.group.name} on mesh {judged.record.mesh}", tuple(tensor_parts(data)), data)


def explain_tensor_of_stages(
    stages: Mapping[str, tuple[Judged, Searched]], name: str, spec: Spec | None = None, details: bool = False
) -> TensorReport:
    """The report on a tensor's layout in the first stage of a pipeline that has it.

    Args:
        stages: the program of each stage, and its problem, by what the stage is called.
        name, spec, details: as for `explain_tensor`.

    Raises:
        StrategyError: no stage has it, or one has several of that name.
    """
    having = [stage for stage, (judged, _) in stages.items() if found_by(judged, name)]
    first = having[0] if having else next(iter(stages))
    judged, searched = stages[first]
    found = explain_tensor(judged, name, searched, spec, details)
    others = f" Others that have tensors of that name, too: {', '.join(having[1:])}." if having[1:] else ""
    said = f"In {first}, whose seconds are of all microbatches, without those in which it waits for other stages.{others}"
    return TensorReport(f"{found.title}, {first}", (found.parts[0], Paragraph(said), *found.parts[1:]), found.data)


def tensor_parts(found: TensorExplanation) -> list[Part]:
    """Why it is sharded so, what moves it, and the other layouts."""
    sentences = [_what(found), *([found.remark] if found.remark else []), *_why_not(found), _why(found)]
    return [Paragraph("\n".join(sentences)), *_moves(found), *_alternatives(found)]


def _what(found: TensorExplanation) -> str:
    group, own = found.group, found.own
    several = f"{format_count(group.n)} tensors of type" if group.n > 1 else "a tensor of type"
    mirrored = f", with {group.alike} that mirror {'them' if group.n > 1 else 'it'}" if group.alike else ""
    split = f"sharded as {format_spec(own.spec)}" if _is_split(own) else "replicated: every device has all of it"
    whole = f", {format_bytes(own.bytes)} a device of {format_bytes(group.whole_bytes)}"
    return f"{group.name}, {several} {array_type(group.dtype, group.shape)}{mirrored}, is {split}{whole}."


def _why_not(found: TensorExplanation) -> list[str]:
    """What speaks against the layout that the question is about."""
    if found.asked is None:
        return []
    each, asked = found.in_question, format_spec(found.asked)
    if each is None:
        return [f"Why not {asked}: that is its layout."]
    if each.obstacle:
        return [f"Why not {asked}: it is not available; {each.obstacle}."]
    if each.step_seconds is None:
        return [f"Why not {asked}: it was not searched, since the program is too large for dynamic programming."]
    return [f"Why not {asked}: with it, and everything else chosen anew, {_change(found, each)}."]


def _why(found: TensorExplanation) -> str:
    """The reason, in one sentence or two."""
    best, step, own = found.next_best, found.step_seconds or 1.0, found.own
    why = "Why" if _is_split(own) else "Why replicated"
    if found.pinned:
        return f"{why}: a pin fixes it."
    if best is None:
        closed = next((each.obstacle for each in found.alternatives if each.obstacle), "")
        return f"{why}: no other layout is available{f'; {closed}' if closed else ''}."
    assert best.step_seconds is not None
    more, other = best.step_seconds - step, format_spec(best.spec)
    rest = _left(found)
    if abs(more) < SAME * step:
        held, would = format_bytes(own.bytes), format_bytes(best.bytes)
        memory = "" if held == would else f"; a device would hold {would} instead of {held}"
        same = f"a step differs by less than {format_percent(SAME)}"
        return f"{why}: it makes little difference. With the best other one{rest}, {other}, {same}{memory}."
    if more > 0:
        return f"{why}: it is the fastest. With the next best{rest}, {other}, and everything else chosen anew, {_change(found, best)}."
    return (
        f"It is not the fastest: with {other}, and everything else chosen anew, {_change(found, best)}. "
        "A search may leave it for memory, or since it ranks answers by compute and communication before these overlap; or somebody chose "
        "this layout."
    )


def _left(found: TensorExplanation) -> str:
    """Words on layouts that were not searched."""
    some = any(each.step_seconds is None and not each.obstacle for each in found.alternatives)
    return " of those that were searched" if some else ""


def _change(found: TensorExplanation, each: Alternative) -> str:
    """``the step takes 3 % longer (0.2 ms): 0.3 ms more waiting for collectives, 0.1 ms less compute``; the peak, where it changes."""
    own, step = found.own, found.step_seconds or 1.0
    assert each.step_seconds is not None
    more = each.step_seconds - step
    reasons = [
        f"{format_seconds(abs(change))} {'more' if change > 0 else 'less'} {what}"
        for what, change in (
            ("waiting for collectives", (each.exposed_seconds or 0.0) - (own.exposed_seconds or 0.0)),
            ("compute", (each.compute_seconds or 0.0) - (own.compute_seconds or 0.0)),
        )
        if abs(change) >= SAME * step
    ]
    said = f"the step would be {format_percent(abs(more) / step)} {'longer' if more > 0 else 'shorter'} ({format_seconds(abs(more))})"
    said = "the step would take as long" if abs(more) < SAME * step else said
    peak = (each.peak_bytes or 0.0) - (own.peak_bytes or 0.0)
    of_peak = abs(peak) >= SAME * (own.peak_bytes or 1.0)
    held = f"; the peak would be {format_bytes(abs(peak))} {'higher' if peak > 0 else 'lower'}" if of_peak else ""
    return f"{said}{': ' + ', '.join(reasons) if reasons else ''}{held}"


def _is_split(each: Alternative) -> bool:
    return any(entry is not None for entry in each.spec)


def _moves(found: TensorExplanation) -> list[Part]:
    if found.kind != "argument":
        return []
    moved = [("", group) for group in found.moves] + [("its gradient", group) for group in found.gradients]
    if not moved:
        return [Heading("What moves it"), Paragraph("No collective does: each device reads the part that it has.")]
    rows = tuple(
        (
            f"{group.kind} over {', '.join(group.axes)}",
            format_count(group.count),
            format_seconds(group.seconds),
            format_seconds(group.exposed_seconds),
            "\n".join(filter(None, (what, blame(group.tensor, group.source, group.cause)))),
        )
        for what, group in moved
    )
    return [Heading("What moves it"), Table(("collective", ">count", ">seconds", ">exposed", "what, for whom, why"), rows)]


def _alternatives(found: TensorExplanation) -> list[Part]:
    available = [each for each in found.alternatives if not each.obstacle]
    closed = [each for each in found.alternatives if each.obstacle]
    alone = any(each.fixed_seconds is not None for each in available)
    rows = tuple(_row(each, found.step_seconds or 1.0, alone) for each in available)
    notes = ["'at best': the step with everything else chosen anew by dynamic programming on the same mesh."]
    if alone:
        notes.insert(0, "'alone': the step if only this tensor and what mirrors it change, resharded for every reader.")
    if _left(found):
        notes.append("What is empty was not searched, since others promise more: details=True (--details) searches all.")
    columns = ("layout", ">bytes a device", *([">alone"] if alone else []), ">at best", ">", ">peak then")
    parts: list[Part] = [Heading("Layouts"), Table(columns, rows, tuple(notes))]
    if closed:
        more = (f"{format_count(len(closed) - CLOSED)} more are not available either.",) if len(closed) > CLOSED else ()
        shut = tuple((format_spec(each.spec), each.obstacle) for each in closed[:CLOSED])
        parts += [Heading("Not available"), Table(("layout", "why not"), shut, more)]
    return parts


def _row(each: Alternative, step: float, alone: bool) -> tuple[str, ...]:
    best = each.step_seconds
    change = "this one" if each.is_own else ""
    if best is not None and not each.is_own:
        change = f"{'+' if best >= step else '-'}{format_percent(abs(best - step) / step)}"
    return (
        format_spec(each.spec),
        format_bytes(each.bytes),
        *(["" if each.fixed_seconds is None else format_seconds(each.fixed_seconds)] if alone else []),
        "" if best is None else format_seconds(best),
        change,
        "" if each.peak_bytes is None else format_bytes(each.peak_bytes),
    )
