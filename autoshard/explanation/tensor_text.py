"""A `TensorExplanation` as the parts of a report."""

from __future__ import annotations

from autoshard.explanation.tensor import Alternative, TensorExplanation
from autoshard.explanation.text import blame, format_spec
from autoshard.ir.words import array_type
from autoshard.render import Heading, Paragraph, Part, Table, format_bytes, format_count, format_percent, format_seconds

SAME = 1e-3  # of the step: below it two layouts are as fast
CLOSED = 12  # unavailable layouts that are listed


def tensor_parts(found: TensorExplanation) -> list[Part]:
    """Why it is sharded so, what moves it, and the other layouts."""
    return [Paragraph("\n".join((_what(found), _why(found)))), *_moves(found), *_alternatives(found)]


def _what(found: TensorExplanation) -> str:
    group, own = found.group, found.alternatives[0]
    several = f"{format_count(group.n)} tensors of type" if group.n > 1 else "a tensor of type"
    mirrored = f", with {group.alike} that mirror {'them' if group.n > 1 else 'it'}" if group.alike else ""
    split = "replicated: every device has all of it" if format_spec(own.spec) == "replicated" else f"sharded as {format_spec(own.spec)}"
    whole = f", {format_bytes(own.bytes)} a device of {format_bytes(group.whole_bytes)}"
    return f"{group.name}, {several} {array_type(group.dtype, group.shape)}{mirrored}, is {split}{whole}."


def _why(found: TensorExplanation) -> str:
    """The reason, in one sentence."""
    best, step = found.next_best, found.step_seconds or 1.0
    if found.pinned:
        return "Why: a pin fixes it."
    if best is None:
        closed = next((each.obstacle for each in found.alternatives if each.obstacle), "")
        return f"Why: no other layout is available{f'; {closed}' if closed else ''}."
    assert best.step_seconds is not None
    more, other = best.step_seconds - step, format_spec(best.spec)
    if abs(more) < SAME * step:
        own = found.alternatives[0].bytes
        held = f"it would hold {format_bytes(best.bytes)} a device instead of {format_bytes(own)}"
        return f"Why: others are as fast; the best of them, {other}, is within {format_percent(SAME)} of the step, and {held}."
    if more > 0:
        return f"Why: it is the fastest; the next one, {other}, would make the step {format_percent(more / step)} longer, at its best."
    return (
        f"It is not the fastest: with {other}, and everything else chosen anew, the step would be {format_percent(-more / step)} shorter. "
        "The search may have left it for memory, or somebody chose this layout."
    )


def _moves(found: TensorExplanation) -> list[Part]:
    if not found.moves:
        return [Heading("What moves it"), Paragraph("No collective does: each device reads the part that it has.")]
    rows = tuple(
        (
            f"{group.kind} over {', '.join(group.axes)}",
            format_count(group.count),
            format_seconds(group.seconds),
            format_seconds(group.exposed_seconds),
            blame(group.tensor, group.source, group.cause),
        )
        for group in found.moves
    )
    return [Heading("What moves it"), Table(("collective", ">count", ">seconds", ">exposed", "what, for whom, why"), rows)]


def _alternatives(found: TensorExplanation) -> list[Part]:
    available = [each for each in found.alternatives if not each.obstacle]
    closed = [each for each in found.alternatives if each.obstacle]
    rows = tuple(_row(each, found.step_seconds or 1.0) for each in available)
    notes = (
        "'alone': the step if only this tensor and what mirrors it change, resharded for every reader.",
        "'at best': the step with everything else chosen anew by dynamic programming on the same mesh; empty where time was over before.",
    )
    columns = ("layout", ">bytes a device", ">alone", ">at best", ">", ">peak then")
    parts: list[Part] = [Heading("Layouts"), Table(columns, rows, notes)]
    if closed:
        more = (f"{format_count(len(closed) - CLOSED)} more are not available either.",) if len(closed) > CLOSED else ()
        shut = tuple((format_spec(each.spec), each.obstacle) for each in closed[:CLOSED])
        parts += [Heading("Not available"), Table(("layout", "why not"), shut, more)]
    return parts


def _row(each: Alternative, step: float) -> tuple[str, ...]:
    best = each.step_seconds
    change = "this one" if each.is_own else ""
    if best is not None and not each.is_own:
        change = f"{'+' if best >= step else '-'}{format_percent(abs(best - step) / step)}"
    return (
        format_spec(each.spec),
        format_bytes(each.bytes),
        "" if each.fixed_seconds is None else format_seconds(each.fixed_seconds),
        "" if best is None else format_seconds(best),
        change,
        "" if each.peak_bytes is None else format_bytes(each.peak_bytes),
    )
