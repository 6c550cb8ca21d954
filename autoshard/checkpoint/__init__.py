"""Checkpoints of sharded states with Orbax: the strategy is inside, and any other strategy restores them. And in memory."""

from autoshard.checkpoint.loop import Checkpoints
from autoshard.checkpoint.once import extra, restore, save, strategy
from autoshard.checkpoint.reshard import ReshardPlan, Transfer, reshard_plan

__all__ = ["Checkpoints", "ReshardPlan", "Transfer", "extra", "reshard_plan", "restore", "save", "strategy"]
