"""The three sentences that an explanation opens with: what was split how, what bounds the step, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.explanation.data import Axis, CollectiveGroup, Explanation, Place, Stages
from autoshard.render import format_bytes, format_percent, format_seconds

MUCH = 0.15  # of the step; below it a change gains little
FULL = 0.9  # of the memory that a program may have
FEW = 1e-3
SMALL = 0.1  # of the longest layer; one that takes less is not named with it
SHORT = ("auto", "interleaved", "zero_bubble")  # schedules in which stages wait least
HIGH = 0.5  # of the matrix unit's peak


def sentences(found: Explanation) -> tuple[str, str, str]:
    """What was split how, what bounds the step, what to change; ``found`` has everything else."""
    return _split(found), _bound(found), _change(found)


def _avoidable(stages: Stages) -> float:
    """The seconds of the step that other tasks, or other stages, could save: the wait of the busiest, or what it has more than others."""
    most, n = max(stages.busy_seconds), len(stages.busy_seconds)
    return max(stages.step_seconds - most, most - sum(stages.busy_seconds) / n)


def _change_stages(stages: Stages) -> str:
    """What to change where stages wait for each other."""
    most, n, step = max(stages.busy_seconds), len(stages.busy_seconds), stages.step_seconds
    mean = sum(stages.busy_seconds) / n
    if step - most >= most - mean:
        other = "fewer stages" if stages.schedule in SHORT else "schedule='auto'"
        return (
            f"To change: the wait for other stages, {format_percent((step - most) / step)} of the step even on the busiest; more than "
            f"{stages.microbatches} microbatches shorten it, of a larger batch if need be, and so may {other}."
        )
    return (
        f"To change: the division into stages; {stages.busiest_words} has {format_seconds(most)} of work, and "
        f"{format_seconds(mean)} is the average of all {n}; another number of stages may be more even, which search(plan='full') tries."
    )


def _split(found: Explanation) -> str:
    devices = f"{found.n_devices} device{'s' if found.n_devices > 1 else ''}"
    axes = [axis for axis in found.mesh if axis.size > 1]
    if not axes:
        return f"{found.program} runs on {devices} without any sharding."
    roles: dict[str, list[str]] = {}
    for axis in axes:
        roles.setdefault(_role(axis), []).append(f"{axis.name} ({axis.size})")
    told = "; ".join(f"{names[0]} {role}" if len(names) == 1 else _several(names, role) for role, names in roles.items())
    return f"{found.program} runs on {devices} as a mesh {found.mesh_words}: {told}."


def _several(names: Sequence[str], role: str) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} each {role.replace('splits', 'split', 1)}"


def _role(axis: Axis) -> str:
    """``splits the inputs and 97 % of the state, most of which is gathered where it is used``; the activations, where no input is split."""
    if axis.divides_program:
        return "divides the program and its state into stages"
    parts = ["the inputs"] if axis.splits_inputs else []
    if axis.activation_share > FEW and not axis.splits_inputs:
        parts.append(_share(axis.activation_share, "the activations"))
    if axis.state_share > FEW:
        parts.append(_share(axis.state_share, "the state") + _gathered(axis.gathered_share))
    return f"splits {' and '.join(parts)}" if parts else "splits neither inputs nor state"


def _share(share: float, whole: str) -> str:
    """``97 % of the state``."""
    return whole if _is_all(share) else f"{format_percent(share)} of {whole}"


def _is_all(share: float) -> bool:
    """Whether a share is all but what rounding leaves out."""
    return format_percent(share) == format_percent(1.0)


def _gathered(share: float) -> str:
    if share < FEW:
        return ", each device computing with its own part"
    if _is_all(share):
        return ", which is gathered where it is used"
    return f", of which {format_percent(share)} is gathered where it is used"


def _bound(found: Explanation) -> str:
    time = found.time
    step = time.step_seconds or 1.0
    whole = f"A step takes {format_seconds(time.step_seconds)}"
    compute, exposed = format_percent(time.compute_seconds / step), format_percent(time.exposed_seconds / step)
    on, idle = ("", "") if found.stages is None else (f" on {found.stages.busiest_words}, the busiest", _idle(found.stages))
    if time.waiting_seconds > max(time.compute_seconds, time.exposed_seconds):
        return f"{whole}, bound by waiting{idle.replace(';', ':', 1)}."
    layer = next((place for place in found.layers if place.compute_seconds > 0), None)
    most = f", most of it in {_most(found.layers)}" if layer is not None and found.has_program else ""
    if time.exposed_seconds > time.compute_seconds:
        worst = _worst(found.collectives)
        return f"{whole}, bound by communication: {exposed} of it{on} is spent in collectives that no compute hides{worst}{idle}."
    waits = ""
    if time.exposed_seconds > FEW * step:
        waits = f"; {exposed} is spent in collectives that nothing hides{_worst(found.collectives)}"
    return f"{whole}, bound by compute: {compute} of it{on}{most}{waits}{idle}."


def _idle(stages: Stages) -> str:
    """``; stages wait for each other for 9 to 33 % of it``."""
    shares = stages.idle_shares
    least, most = format_percent(min(shares)), format_percent(max(shares))
    span = most if least == most else f"{least.removesuffix(' %')} to {most}"
    return f"; stages wait for each other for {span} of it"


def _most(layers: Sequence[Place]) -> str:
    """``_attention (6.1 ms) and experts_of (5.0 ms)``."""
    ranked = sorted(layers, key=lambda place: -place.compute_seconds)[:2]
    told = (place for place in ranked if place.compute_seconds > SMALL * ranked[0].compute_seconds)
    return " and ".join(f"{place.name} ({format_seconds(place.compute_seconds)})" for place in told)


def _worst(collectives: Sequence[CollectiveGroup]) -> str:
    """``, most in the all_to_all over model for dot_general moe.py:217``."""
    worst = max(collectives, key=lambda group: group.exposed_seconds, default=None)
    if worst is None or not worst.exposed_seconds:
        return ""
    return f", most in the {worst.kind} over {', '.join(worst.axes)} for {worst.source}"


def _change(found: Explanation) -> str:
    """The change that promises most, with the figure that says so."""
    time, step = found.time, found.time.step_seconds or 1.0
    repeated = max(found.repeated, key=lambda work: work.saved_seconds, default=None)
    full = found.peak_bytes / found.limit_bytes if found.limit_bytes else 0.0
    waiting = 0.0 if found.stages is None else _avoidable(found.stages)
    if found.stages is not None and waiting > max(MUCH * step, repeated.saved_seconds if repeated else 0.0):
        return _change_stages(found.stages)
    if repeated is not None and repeated.saved_seconds > MUCH * step:
        layer, seconds = repeated.layers[0]
        size, axis, saved = repeated.size, repeated.axis, format_percent(repeated.saved_seconds / step)
        told = f"To change: the {size} devices of {axis} repeat {format_seconds(repeated.seconds)} of compute, most in {layer} "
        told += f"({format_seconds(seconds)}); splitting all of it would save {saved} of the step at most. "
        if repeated.uneven_seconds > repeated.seconds / 2:
            return told + f"Most of it has no dimension that {size} divides: choose such sizes, or a smaller {axis} axis."
        return told + "Collectives would cost more than that, by the prediction: take larger sizes, or fewer devices."
    if time.exposed_seconds > MUCH * step:
        return (
            f"To change: collectives, which take {format_percent(time.exposed_seconds / step)} of the step; a larger batch spreads those "
            "of the state over more compute, which what_if(batch=...) predicts."
        )
    if full > FULL:
        return (
            f"To change: memory, of which {format_percent(full)} is taken ({format_bytes(found.peak_bytes)}); more devices, remat='auto' "
            "or microbatches='auto' leave the search more choices."
        )
    if time.matrix_share > HIGH:
        return (
            f"To change: little, by sharding; products keep the matrix unit busy {format_percent(time.matrix_share)} of the step. More "
            "devices shorten it, which what_if(cluster=...) predicts."
        )
    if not found.has_program:
        return "To change: what_if(...) predicts other pins, batches and clusters."
    return _change_kernels(found, step)


def _change_kernels(found: Explanation, step: float) -> str:
    """The change of a step whose time is that of its kernels."""
    time = found.time
    place = max(found.layers, key=lambda place: place.compute_seconds - place.product_seconds, default=None)
    where = f", most in {place.name}" if place is not None else ""
    rest = sum(place.compute_seconds - place.product_seconds for place in found.layers)
    if rest < time.compute_seconds / 2:
        return (
            "To change: the sizes rather than the sharding; most compute is that of matrix products, which keep the matrix unit busy only "
            f"{format_percent(time.matrix_share)} of the step: they are small, or bound by the memory that they read and write."
        )
    return (
        f"To change: the kernels rather than the sharding; {format_percent(rest / step)} of the step is spent on other kernels than matrix "
        f"products{where}, which memory traffic bounds."
    )
