"""Training with a parameter server on Ray: servers hold parameters, optimizer state and tables; workers pull them and push gradients."""

from autoshard.parameter_server.checkpoints import rows
from autoshard.parameter_server.scheduler import Result
from autoshard.parameter_server.sparse import CacheUse, Table
from autoshard.parameter_server.training import MODES, train

__all__ = ["MODES", "CacheUse", "Result", "Table", "rows", "train"]
