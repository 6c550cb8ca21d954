"""The searchers: one file each, and one row in the table below."""

from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches

from autoshard.errors import InfeasibleError, SearcherError
from autoshard.problem import NO_HINTS, Hints
from autoshard.progress import Progress, silent
from autoshard.search.auto import Auto
from autoshard.search.baselines import DataParallel, FullySharded, alike_arguments, batch_dims
from autoshard.search.brute_force import BruteForce
from autoshard.search.dynamic_programming import DynamicProgramming
from autoshard.search.integer_programming import IntegerProgramming
from autoshard.search.manual import Manual
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.searcher import AdaptedSearcher, Searcher, Solution
from autoshard.search.sharding_propagation import ShardingPropagation
from autoshard.search.tensor_parallel import TensorParallel

SEARCHERS = {
    "auto": Auto,
    "dynamic_programming": DynamicProgramming,
    "recursive_programming": RecursiveProgramming,
    "integer_programming": IntegerProgramming,
    "sharding_propagation": ShardingPropagation,
    "data_parallel": DataParallel,
    "fully_sharded": FullySharded,
    "tensor_parallel": TensorParallel,
    "manual": Manual,
    "brute_force": BruteForce,
}
# Names in other libraries.
ELSEWHERE = {"ddp": "data_parallel", "fsdp": "fully_sharded", "zero": "fully_sharded", "megatron": "tensor_parallel"}


def searcher_of(searcher: str | Searcher) -> Searcher:
    """The searcher of a name, or the searcher itself.

    Raises:
        SearcherError: no searcher has that name.
    """
    if isinstance(searcher, str):
        if searcher not in SEARCHERS:
            begun = [name for name in SEARCHERS if searcher and name.startswith(searcher)]
            near = begun or get_close_matches(searcher, SEARCHERS, n=1) or [ELSEWHERE.get(searcher, "")]
            raise SearcherError(
                f"a searcher is one of {sorted(SEARCHERS)}, got {searcher!r}. "
                f"{f'Did you mean {near[0]!r}?' if near[0] else 'Use one of those names, or a searcher value.'}"
            )
        return SEARCHERS[searcher]()
    if isinstance(searcher, type) or not callable(getattr(searcher, "solve", None)):
        raise SearcherError(
            f"a searcher is one of {sorted(SEARCHERS)} or a value with a solve method, got {searcher!r}. Use a name, or a value such as "
            "autoshard.DynamicProgramming()."
        )
    return searcher if isinstance(searcher, Searcher) else AdaptedSearcher(searcher)


def solve(searcher: Searcher, problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
    """The searcher's solution; of an automatic one, a baseline's where that is better.

    An automatic searcher's solution is never slower, by the judge, than data parallelism within the memory limit. Where it finds none, that
    of fully sharded data parallelism is returned, if it fits.

    Raises:
        InfeasibleError: no answer fits the memory limit.
    """
    if not searcher.automatic:
        return searcher.solve(problem, progress, hints)
    baseline = _solved(DataParallel(), problem)  # first, so that a search that ends early has an answer
    if baseline is not None:
        baseline = replace(baseline, finder=DataParallel.name)
    spare = _solved(FullySharded(stage=3), problem) if baseline is None else baseline
    try:
        solution = searcher.solve(problem, progress, hints)
    except InfeasibleError:
        if spare is None:
            raise
        return replace(spare, finder=spare.finder or FullySharded.name, hints=hints)
    if baseline is None:
        return solution
    if solution.judgement.cost.makespan_seconds <= baseline.judgement.cost.makespan_seconds:
        return replace(solution, others=(*solution.others, baseline))
    least = solution.judgement.cost.objective_seconds
    bound = min(solution.lower_bound_seconds, baseline.judgement.cost.objective_seconds)
    others = (replace(solution, others=()), *solution.others)
    least = min(least, solution.least_seconds)
    return replace(baseline, lower_bound_seconds=bound, least_seconds=least, others=others, hints=solution.hints)


def _solved(searcher: Searcher, problem) -> Solution | None:
    with suppress(InfeasibleError):
        return searcher.solve(problem)
    return None
