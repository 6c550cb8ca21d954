"""One strategy for all processes of a program, which are to run the same collectives: that of process 0, and of what it is chosen from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import ParamSpec

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.errors import StrategyError
from autoshard.plan.plan import Plan
from autoshard.strategy import from_json, to_json

P = ParamSpec("P")

FINGERPRINT = 32  # bytes


class FailedElsewhere(StrategyError):
    """Another process failed, or runs another program, which all processes know."""


def agreed(search: Callable[P, Plan]) -> Callable[P, Plan]:
    """The search; in several processes, all of which call it as they call a jitted step, it returns what process 0 finds.

    Searches differ where a time limit ends them, where devices are timed, or where processes are given different options.
    """

    @functools.wraps(search)
    def everywhere(*args: P.args, **options: P.kwargs) -> Plan:
        if not _several():
            return search(*args, **options)
        try:
            found = search(*args, **options)
            text = to_json(found.record) if jax.process_index() == 0 else ""
        except FailedElsewhere:
            raise
        except Exception:
            _exchanged("", 0)
            raise
        sent = _of_process_0(found.record.program.fingerprint, text)
        return found if sent is None else found.with_record(from_json(sent))

    return everywhere


def finalists_of_process_0(found: Sequence[Plan], finders: Sequence[str], is_over: bool) -> tuple[list[Plan], list[str], bool]:
    """The finalists that process 0 met, which all processes time together, with their finders and whether its search was interrupted."""
    if not _several():
        return list(found), list(finders), is_over
    is_first = jax.process_index() == 0
    text = json.dumps([[to_json(each.record) for each in found], list(finders), is_over]) if is_first else ""
    sent = _of_process_0(found[0].record.program.fingerprint, text)
    if sent is None:
        return list(found), list(finders), is_over
    records, names, is_over = json.loads(sent)
    return [found[0].with_record(from_json(record)) for record in records], names, is_over


def everyones(value: int) -> list[int]:
    """A small number of each process, which all call alike; of one process alone its own."""
    return gathered(value) if _several() else [value]


def gathered(value: int) -> list[int]:
    """A small number of each process of several, which all call alike."""
    with jax.ensure_compile_time_eval():
        return np.asarray(multihost_utils.process_allgather(np.int32(value))).reshape(-1).tolist()


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _of_process_0(fingerprint: str, text: str) -> str | None:
    """The text of process 0, in the others, which have none.

    Raises:
        FailedElsewhere: a process failed, or runs a program of another fingerprint.
    """
    data = text.encode()
    programs, n_bytes = _exchanged(fingerprint, len(data))
    failed = [index for index, program in enumerate(programs) if not program]
    if failed:
        raise FailedElsewhere(f"all processes search before one runs, and process {failed[0]} failed to. Its output says why.")
    others = [index for index, program in enumerate(programs) if program != programs[0]]
    if others:
        raise FailedElsewhere(
            f"all processes run one program, and process {others[0]} traced another than process 0. Pass every process the same function, "
            "and arguments of the same structure, shapes and dtypes."
        )
    with jax.ensure_compile_time_eval():
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(n_bytes, b"\0"), np.uint8))
    return None if data else np.asarray(sent).tobytes().decode()


def _exchanged(fingerprint: str, n_bytes: int) -> tuple[list[str], int]:
    """Per process the fingerprint of its program, empty where its search failed, and the bytes that process 0 has to send."""
    row = np.frombuffer(fingerprint.encode().ljust(FINGERPRINT, b"\0") + n_bytes.to_bytes(4, "big"), np.uint8)
    with jax.ensure_compile_time_eval():
        rows = np.asarray(multihost_utils.process_allgather(row))
    return [row[:FINGERPRINT].tobytes().rstrip(b"\0").decode() for row in rows], int.from_bytes(rows[0, FINGERPRINT:].tobytes(), "big")
