"""The ``autoshard`` command: one file a subcommand, each with ``add`` (its options) and ``run`` (what it does).

Subcommands import what they need inside ``run``: JAX, Flax, the demo and a user's program take seconds to load, which ``--help`` and a
mistyped option should not cost, and virtual devices must be asked for before any of them starts JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a command line: 0, 1 where a check failed, 2 where the input was bad, 130 where the user interrupted."""
    try:
        from autoshard.cli.commands import run

        return run(argv)
    except KeyboardInterrupt:
        print("\nautoshard: interrupted; no file is left half-written.", file=sys.stderr)
        return INTERRUPTED
