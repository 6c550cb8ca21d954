"""Checkpoints of sharded states with Orbax: the strategy is inside, and any other strategy restores them."""

from autoshard.checkpoint.loop import Checkpoints
from autoshard.checkpoint.once import extra, restore, save, strategy

__all__ = ["Checkpoints", "extra", "restore", "save", "strategy"]
