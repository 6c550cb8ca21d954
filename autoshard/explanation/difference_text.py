"""A `Difference` as the parts of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.explanation.difference import Change, Difference
from autoshard.explanation.text import format_spec
from autoshard.render import Heading, Paragraph, Part, Table, format_bytes, format_count, format_flops, format_percent, format_seconds

TOP = 15  # rows of a table
MANY = 10  # times more is told as a multiple, not in per cent
SAME = 1e-3  # shares of the step and of the peak below this are no difference


def difference_parts(found: Difference) -> list[Part]:
    """A sentence, the figures of both sides, and where they differ."""
    return [
        Paragraph(_sentence(found)),
        _figures(found),
        *_tensors(found),
        *_changes("Collectives", "kind", found, found.collectives, True),
        *_changes("By layer", "layer", found, found.layers, False),
    ]


def _sentence(found: Difference) -> str:
    """How much longer or shorter a step is, on how many devices, why, and what the peak of memory becomes."""
    one, two = found.before, found.after
    first, second = found.names
    more = two.step_seconds - one.step_seconds
    step = one.step_seconds or 1.0
    told = f"A step takes {format_seconds(two.step_seconds)} ({second})"
    if abs(more) < SAME * step:
        told += f", as long as {first}"
    else:
        how = f"{format_percent(abs(more) / step)} {'longer' if more > 0 else 'shorter'} than"
        how = f"{two.step_seconds / step:.3g} times" if more > MANY * step else how
        told += f", {how} the {format_seconds(step)} of {first}"
    if one.n_devices != two.n_devices:
        ratio = two.step_seconds * two.n_devices / (step * one.n_devices)
        told += f", on {two.n_devices} devices instead of {one.n_devices}: a step costs {ratio:.2f} times as many device seconds"
    told += "."
    reasons = [
        f"{format_seconds(abs(change))} {'more' if change > 0 else 'less'} {what}"
        for what, change in (
            ("compute", two.compute_seconds - one.compute_seconds),
            ("waiting for collectives", two.exposed_seconds - one.exposed_seconds),
        )
        if abs(change) >= SAME * step
    ]
    told += f" A device has {' and '.join(reasons)}." if reasons else ""
    peaks = [format_bytes(each.peak_bytes) for each in (one, two)]
    told += f" Its peak of memory goes from {peaks[0]} to {peaks[1]}." if peaks[0] != peaks[1] else ""
    return told + (f" Arguments of one of them alone: {', '.join(found.only)}." if found.only else "")


def _figures(found: Difference) -> Table:
    one, two = found.before, found.after
    rows: list[tuple[str, ...]] = [
        ("cluster", one.cluster, two.cluster, ""),
        ("mesh", one.mesh_words, two.mesh_words, ""),
    ]
    if one.microbatches != two.microbatches:
        rows.append(("microbatches", f"{one.microbatches}", f"{two.microbatches}", ""))
    if one.recomputes != two.recomputes:
        rows.append(("recomputation", *("yes" if side.recomputes else "no" for side in (one, two)), ""))
    numbers: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("step time", one.step_seconds, two.step_seconds, format_seconds),
        ("compute", one.compute_seconds, two.compute_seconds, format_seconds),
        ("collectives, exposed", one.exposed_seconds, two.exposed_seconds, format_seconds),
        ("collectives, overlapped", one.hidden_seconds, two.hidden_seconds, format_seconds),
        ("device seconds a step", one.step_seconds * one.n_devices, two.step_seconds * two.n_devices, format_seconds),
        ("peak memory", one.peak_bytes, two.peak_bytes, format_bytes),
        ("sent by a device", one.sent_bytes, two.sent_bytes, format_bytes),
        ("collectives", one.n_collectives, two.n_collectives, format_count),
        ("work of a device", one.flops, two.flops, format_flops),
    )
    rows += [(name, written(a), written(b), _ratio(a, b)) for name, a, b, written in numbers]
    return Table(("", found.names[0], found.names[1], ">change"), tuple(rows))


def _ratio(before: float, after: float) -> str:
    """The change in per cent, or as a multiple; empty where there is none."""
    if before == after or abs(before - after) < 1e-6 * before:
        return ""
    if before and after > (1 + MANY) * before:
        return f"{after / before:.3g} x"
    return "new" if not before else f"{'+' if after > before else '-'}{format_percent(abs(after - before) / before)}"


def _tensors(found: Difference) -> list[Part]:
    if not found.tensors:
        some = "All" if found.same_arguments else "Those of the same path" if found.n_common else ""
        alike = "are sharded alike" if found.before.mesh_words == found.after.mesh_words else "have the same specs, each on its own mesh"
        return [Heading("Arguments"), Paragraph(f"{some} {alike}." if some else "None has the same path in both.")]
    rows = tuple(
        (
            f"{change.name} x {change.n}" if change.n > 1 else change.name,
            f"{change.alike}" if change.alike else "",
            format_spec(change.before),
            format_spec(change.after),
            format_bytes(change.before_bytes),
            format_bytes(change.after_bytes),
        )
        for change in found.tensors[:TOP]
    )
    first, second = found.names
    columns = ("path", ">more", first, second, f">bytes, {first}", f">{second}")
    return [Heading("Arguments that are sharded otherwise"), Table(columns, rows, _rest(found.tensors))]


def _changes(title: str, column: str, found: Difference, changes: Sequence[Change], sends: bool) -> list[Part]:
    shown = [change for change in changes if change.before_seconds or change.after_seconds or change.before_count or change.after_count]
    if not shown:
        return []

    def row(change: Change) -> tuple[str, ...]:
        seconds = format_seconds(change.before_seconds), format_seconds(change.after_seconds)
        change_seconds = change.after_seconds - change.before_seconds
        sign = "+" if change_seconds > 0 else "-" if change_seconds < 0 else ""
        told = (change.name, *seconds, f"{sign}{format_seconds(abs(change_seconds))}" if sign else "")
        if not sends:
            return told
        return (
            *told,
            f"{format_count(change.before_count)} to {format_count(change.after_count)}",
            f"{format_bytes(change.before_bytes)} to {format_bytes(change.after_bytes)}",
        )

    more = (">number", ">bytes") if sends else ()
    columns = (column, f">{found.names[0]}", f">{found.names[1]}", ">change", *more)
    return [Heading(title), Table(columns, tuple(map(row, shown[:TOP])), _rest(shown))]


def _rest(rows: Sequence[object]) -> tuple[str, ...]:
    return (f"{format_count(len(rows) - TOP)} more differ less.",) if len(rows) > TOP else ()
