"""The errors that autoshard raises on purpose; each message states the rule, what was got and what to do, with names and numbers."""


class AutoshardError(Exception):
    """Base of every error autoshard raises on purpose; the command line exits 2 on it."""


class TraceError(AutoshardError):
    """The function could not be traced to a graph."""


class RuleError(AutoshardError):
    """A sharding rule is malformed, or does not fit its operation."""


class ClusterError(AutoshardError):
    """A cluster description is unknown or inconsistent, or a mesh does not fit it."""


class ShardingError(AutoshardError):
    """A sharding, or a collective, is illegal for its tensor or mesh."""


class InfeasibleError(AutoshardError):
    """No strategy satisfies the constraints; names the smallest peak_bytes found.

    Attributes:
        smallest_peak_bytes: the least peak memory per device found, or None where memory was not the reason.
        proven: whether it is proven that no strategy on the mesh fits.
    """

    def __init__(self, message: str, smallest_peak_bytes: float | None = None, proven: bool = False):
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes
        self.proven = proven


class NothingFasterError(InfeasibleError):
    """Nothing can be faster than what an earlier search of the program found; whether anything fits is not known.

    ``proven``: whether that holds without a memory limit, too.
    """


class SearchLimitError(AutoshardError):
    """The problem is too large for the searcher; names the searcher to try instead."""


class OutOfTime(SearchLimitError):
    """The time limit of a search is over."""


class SearcherError(AutoshardError):
    """The given name or object is no searcher."""


class StrategyError(AutoshardError):
    """A strategy file is damaged, or belongs to another program or schema."""


class PipelineError(AutoshardError):
    """A program has no such stages, a schedule is impossible, or a task of a stage failed."""


class CheckpointError(AutoshardError):
    """A checkpoint is missing, incomplete or damaged, has another state than is asked for, or could not be written."""


class CompilerError(AutoshardError):
    """A compiler that a check needs is not installed, or fails on the program."""
