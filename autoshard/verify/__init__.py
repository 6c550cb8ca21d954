"""What compilers really do, read back: their collectives next to the predicted ones, and Shardy's propagated layouts."""

from autoshard.verify.buffers import Buffers, read_buffers
from autoshard.verify.compare import Row, compare
from autoshard.verify.hlo import collectives_of
from autoshard.verify.shardy import explicit_collectives, propagated

__all__ = ["Buffers", "Row", "collectives_of", "compare", "explicit_collectives", "propagated", "read_buffers"]
