"""The recomputation that a search chooses for a step, as the option ``remat`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, NothingFasterError, SearchLimitError, TraceError
from autoshard.ir.remat import Remat
from autoshard.plan.refusals import AGAIN, or_refused
from autoshard.recompute import Options, without_checkpoints
from autoshard.rules import rules_of
from autoshard.trace import Traced

T = TypeVar("T")


def recomputations(traced: Traced, facts: ProgramFacts, cluster: Cluster, remat: str | None, hosts: bool) -> Sequence[Remat]:
    """The recomputations that there are of a program, of the option's kind: of all that it keeps, or in place of its own checkpoints.

    Args:
        hosts: whether what is kept may be in the memory of hosts.
    """
    if remat != "replace":
        return Options(traced, facts, cluster.device, hosts).all
    opened = without_checkpoints(traced)
    if opened is traced:
        return ()
    own = program_facts(opened.graph, rules_of(opened.graph), compiler_of(cluster)).corrected(facts.corrections)
    return Options(opened, own, cluster.device, hosts).replaced


def half_of_loops(traced: Traced, options: Iterable[Remat]) -> list[Remat]:
    """Of some recomputations the one that keeps about half of what loops keep on devices; [] where there are no loops."""
    if not any(op.primitive == "scan" for op in traced.graph.walk()):
        return []
    loops = [each for each in options if each.loops and not each.hosted_bytes]
    half = sum(each.kept_bytes + each.plain_bytes for each in loops[-1:]) / 2
    return sorted(loops, key=lambda each: abs(each.kept_bytes - half))[:1]


def _fastest(found: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The fastest of what was found.

    Raises:
        InfeasibleError: there is nothing.
    """
    if not found:
        raise InfeasibleError("nothing fits with recomputation.")
    return min(found, key=seconds)


def staged_remat(
    attempt: Callable[[Remat | None], T],
    remat: str | None,
    options: Callable[[], Sequence[Remat]],
    seconds: Callable[[T], float],
    first: Remat | None = None,
) -> T:
    """The pipeline with as much recomputation as asked for, of all stages alike; ``"auto"`` is as ``"fit"``.

    Args:
        first: the one that is tried first; None: no recomputation. Where nothing fits with it, one that keeps less is tried.

    Raises:
        InfeasibleError: no pipeline fits with any that was tried.
    """
    if remat == "replace":
        return _better(attempt, options(), seconds)
    if remat == "full":
        return attempt(next(reversed(options()), None))
    try:
        return attempt(first)
    except InfeasibleError as error:
        choices = () if remat is None else [each for each in options() if first is None or each.kept_bytes < first.kept_bytes]
        if not choices:
            raise
        return or_refused(error, lambda: _fastest(_least_that_fits(attempt, choices), seconds), AGAIN)


def _better(attempt: Callable[[Remat | None], T], options: Sequence[Remat], seconds: Callable[[T], float]) -> T:
    """The pipeline of the step as it is, or with its own checkpoints replaced by the least that fits, whichever is faster."""
    if not options:
        return attempt(None)
    try:
        found = attempt(None)
    except InfeasibleError as error:
        return or_refused(error, lambda: _fastest(_least_that_fits(attempt, options), seconds), AGAIN)
    with suppress(InfeasibleError):
        return min((found, *_least_that_fits(attempt, options)), key=seconds)
    return found


def _least_that_fits(attempt: Callable[[Remat | None], T], options: Sequence[Remat]) -> list[T]:
    """What is found with those that fit, down to the one that takes least time, by bisection; what is slower than known is left out.

    Nothing where a step of several passes, such as of two optimizers, runs in microbatches without recomputation alone.
    """
    found: list[T] = []
    first, last = 0, len(options) - 1
    number = last  # where nothing fits with this one, nothing fits
    while first <= last:
        try:
            found.append(attempt(options[number]))
            last = number - 1
        except NothingFasterError:
            last = number - 1
        except InfeasibleError:
            if number == len(options) - 1:
                raise
            first = number + 1
        except (SearchLimitError, TraceError):
            break
        number = (first + last) // 2
    return found
