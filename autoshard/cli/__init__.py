"""The ``autoshard`` command: one file a subcommand, each with ``add`` (its options) and ``run`` (what it does).

Subcommands import what they need inside ``run``: Flax, the demo and a user's program take seconds to load, which ``--help`` and a mistyped
option should not cost, and virtual devices must be asked for before any of them starts JAX.
"""

from autoshard.cli.main import main

__all__ = ["main"]
