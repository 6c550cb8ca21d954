"""Every error autoshard raises on purpose.

A message states the rule, then what was got, then what to do, with names and numbers.
"""


class AutoshardError(Exception):
    """Base of every error autoshard raises on purpose; the command line exits 2 on it."""


class TraceError(AutoshardError):
    """The function could not be traced to a graph."""


class RuleError(AutoshardError):
    """A sharding rule is malformed, or does not fit its operation."""


class ClusterError(AutoshardError):
    """A cluster description is unknown or inconsistent, or a mesh does not fit it."""


class ShardingError(AutoshardError):
    """A sharding is illegal for its tensor or mesh."""


class InfeasibleError(AutoshardError):
    """No strategy satisfies the constraints; names the smallest peak_bytes found.

    Attributes:
        smallest_peak_bytes: the least peak memory per device found, or None where memory was not the reason.
        proven: whether nothing else on the mesh can fit either.
    """

    def __init__(self, message: str, smallest_peak_bytes: float | None = None, proven: bool = False):
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes
        self.proven = proven


class SearchLimitError(AutoshardError):
    """The search met a size it cannot handle; names the searcher to try instead."""


class SearcherError(AutoshardError):
    """What was named or given as a searcher is none."""


class StrategyError(AutoshardError):
    """A strategy file is damaged, or belongs to another program or schema."""


class CompilerError(AutoshardError):
    """A compiler that a check needs is not installed, or fails on the program."""
