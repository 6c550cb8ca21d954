"""The ``autoshard`` command: one file a subcommand, each with ``add`` (its options) and ``run`` (what it does).

Subcommands import what they need inside ``run``: JAX and the searchers take seconds to load, which ``--help`` and a mistyped option should
not cost, and virtual devices must be asked for before a program's own import starts JAX.
"""

from autoshard.cli.main import main

__all__ = ["main"]
