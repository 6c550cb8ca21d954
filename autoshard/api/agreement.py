"""One strategy for all processes of a program, which are to run the same collectives: that of process 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.api.strategy import Strategy
from autoshard.errors import StrategyError
from autoshard.strategy import from_json, to_json

P = ParamSpec("P")

FINGERPRINT = 32  # bytes


def agreed(search: Callable[P, Strategy]) -> Callable[P, Strategy]:
    """The search; in several processes, all of which call it as they call a jitted step, it returns what process 0 finds.

    Searches differ where a time limit ends them, where devices are timed, or where processes are given different options.
    """

    @functools.wraps(search)
    def everywhere(*args: P.args, **options: P.kwargs) -> Strategy:
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            return search(*args, **options)
        try:
            found = search(*args, **options)
            text = to_json(found.record).encode() if jax.process_index() == 0 else b""
        except Exception:
            _exchanged("", 0)
            raise
        return _of_process_0(found, text)

    return everywhere


def _of_process_0(found: Strategy, text: bytes) -> Strategy:
    """The strategy of process 0, for the program as this process traced it; ``text`` is its JSON, in that process."""
    programs, n_bytes = _exchanged(found.record.program.fingerprint, len(text))
    failed = [index for index, program in enumerate(programs) if not program]
    if failed:
        raise StrategyError(f"all processes search before one runs, and process {failed[0]} failed to. Its output says why.")
    others = [index for index, program in enumerate(programs) if program != programs[0]]
    if others:
        raise StrategyError(
            f"all processes run one program, and process {others[0]} traced another than process 0. Pass every process the same function, "
            "and arguments of the same structure, shapes and dtypes."
        )
    with jax.ensure_compile_time_eval():
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(n_bytes, b"\0"), np.uint8))
    return found if text else Strategy(from_json(np.asarray(sent).tobytes().decode()), found._traced)


def _exchanged(fingerprint: str, n_bytes: int) -> tuple[list[str], int]:
    """Per process the fingerprint of its program, empty where its search failed, and the bytes that process 0 has to send."""
    row = np.frombuffer(fingerprint.encode().ljust(FINGERPRINT, b"\0") + n_bytes.to_bytes(4, "big"), np.uint8)
    with jax.ensure_compile_time_eval():
        rows = np.asarray(multihost_utils.process_allgather(row))
    return [row[:FINGERPRINT].tobytes().rstrip(b"\0").decode() for row in rows], int.from_bytes(rows[0, FINGERPRINT:].tobytes(), "big")
