"""The portfolio is never worse than what it contains."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from problems import eager_cluster, problem_of
from programs import PROGRAMS, abstract, gpt, mlp, train_step_of

import autoshard
from autoshard import concurrency
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.ir import Collective
from autoshard.mesh_search.search import search_meshes
from autoshard.problem import NO_HINTS
from autoshard.progress import silent
from autoshard.reductions import symmetry
from autoshard.search import Auto, DataParallel, DynamicProgramming, RecursiveProgramming
from autoshard.search.auto import MEMBERS, exposed_shares, least_exposed_shares
from autoshard.search.searcher import Searcher

WAITING = replace(eager_cluster(), overlap=False)  # where nothing hides


@dataclass(frozen=True)
class Slower(Searcher):
    """Dynamic programming's answer, said to take some times as long."""

    name: ClassVar[str] = "slower"

    share: float
    calls: list = field(default_factory=list, compare=False)

    def solve(self, problem, progress=silent, hints=NO_HINTS):
        self.calls.append(problem)
        found = DynamicProgramming().solve(problem)
        cost = found.judgement.cost
        return replace(found, judgement=replace(found.judgement, cost=replace(cost, makespan_seconds=self.share * cost.makespan_seconds)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mlp", "convnet", "lstm", "moe"])
def test_no_member_is_better(program):
    """The makespan is at most the least of all members', and the bound the greatest that any proves."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args)
    found, members = Auto().solve(problem), [member.solve(problem) for member in MEMBERS]
    assert found.judgement.cost.makespan_seconds <= min(one.judgement.cost.makespan_seconds for one in members)
    bound = max(one.lower_bound_seconds for one in members)
    assert found.lower_bound_seconds == min(bound, found.judgement.cost.objective_seconds)


@pytest.mark.slow
def test_a_baseline_is_no_better_on_a_cut_mesh():
    """With a free mesh, on GPUs, where tensor parallelism's collectives hide: it also runs on meshes that bounds have cut."""

    def loss(params, x, y):
        up, b1, down, b2 = params
        return jnp.mean((jax.nn.relu(x @ up + b1) @ down + b2 - y) ** 2)

    params = [abstract(shape) for shape in ((512, 2048), (2048,), (2048, 512), (512,))]
    step, args = train_step_of(loss, params, abstract((512, 512)), abstract((512, 512)))
    names = ("auto", "tensor_parallel")
    by = {name: autoshard.search(step, *args, cluster="h100:8x2", searcher=name, donate_argnums=0) for name in names}
    assert by["auto"].cost.makespan_seconds <= by["tensor_parallel"].cost.makespan_seconds
    assert any("that bounds had cut" in note for note in by["auto"].notes)


@pytest.mark.slow
def test_no_member_runs_twice(monkeypatch):
    """Where memory binds, dynamic programming leaves the second opinion to the portfolio; a limit proven infeasible needs none."""
    fn, args = PROGRAMS["mlp"]()
    free = DynamicProgramming().solve(problem_of(fn, *args)).judgement.cost.peak_bytes
    solved, solve = [], RecursiveProgramming.solve
    monkeypatch.setattr(RecursiveProgramming, "solve", lambda *of: solved.append(of) or solve(*of))
    for limit in (0.999 * free, 1000.0):
        with suppress(InfeasibleError):
            Auto().solve(problem_of(fn, *args, cluster=WAITING, memory_limit_bytes=limit))
        assert len(solved) == 1


class Refusing(DataParallel):
    """A searcher that always refuses."""

    error = SearchLimitError("too large")

    def solve(self, problem, progress=None, hints=None):
        raise self.error


class Filling(Refusing):
    """A searcher whose answers never fit."""

    error = InfeasibleError("too much", 2048.0)


class Overlapping(DataParallel):
    """A searcher whose answers hide nearly all communication."""

    name = "overlapping"

    def solve(self, problem, progress=None, hints=NO_HINTS):
        solution = DataParallel.solve(self, problem, hints=hints)
        cost = replace(solution.judgement.cost, makespan_seconds=1e-9)
        return replace(solution, judgement=replace(solution.judgement, cost=cost))


def test_a_gap_beside_a_smaller_makespan_is_explained():
    """Where the fastest has the greater objective, notes say whose is less and why it is not the answer."""
    fn, args = PROGRAMS["mlp"]()
    found = Auto(members=(DynamicProgramming(), Overlapping())).solve(problem_of(fn, *args))
    assert found.judgement.cost.objective_seconds > found.lower_bound_seconds * (1 + BUDGETS.settled_gap)
    assert any("more than one of dynamic_programming" in note and "hides behind compute" in note for note in found.notes)
    assert not any("hides" in note for note in Auto(members=(DynamicProgramming(),)).solve(problem_of(fn, *args)).notes)


@pytest.mark.slow
def test_members_may_refuse():
    """Where one member refuses another one answers; where all do, the smallest peak is named."""
    fn, args = PROGRAMS["mlp"]()
    alone = Auto(members=(Refusing(), RecursiveProgramming())).solve(problem_of(fn, *args, cluster=WAITING))
    assert alone.stats["members"] == 1
    assert alone.notes == ("found by recursive_programming, the only searcher that auto ran", "too large")
    with pytest.raises(InfeasibleError, match=r"smallest peak that 2 searchers found.* is 2.05 kB.*Use more devices"):
        Auto(members=(Filling(), Filling())).solve(problem_of(fn, *args, memory_limit_bytes=1000.0))
    with pytest.raises(InfeasibleError, match=r"none takes less than.*smallest peak of two answers.*Use more devices"):
        Auto().solve(problem_of(fn, *args, memory_limit_bytes=1000.0))


def test_a_portfolio_of_one_that_refuses_passes_its_reason_on():
    """Where every member is beyond its limits, the first one's error is raised."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(SearchLimitError, match="too large"):
        Auto(members=(Refusing(),)).solve(problem_of(fn, *args))


def test_a_mesh_of_many_axes_is_searched_by_another_member():
    """Where dynamic programming's tables would be too large another searcher answers, and a note has the error."""
    fn, args = PROGRAMS["mlp"]()
    problem = problem_of(fn, *args, mesh={"a": 2, "b": 2, "c": 2})
    small = DynamicProgramming(max_problem_entries=1000)
    with pytest.raises(SearchLimitError, match="recursive_programming"):
        small.solve(problem)
    others = tuple(member for member in MEMBERS if not isinstance(member, DynamicProgramming))
    found = Auto((small, *others)).solve(problem)
    assert "dynamic programming keeps all axes' tables" in found.notes[-1]
    assert found.judgement.cost.makespan_seconds <= min(one.solve(problem).judgement.cost.makespan_seconds for one in others)


class Counting(RecursiveProgramming):
    """A searcher that counts its runs."""

    solved: ClassVar[list] = []

    def solve(self, problem, progress=None, hints=NO_HINTS):
        self.solved.append(problem)
        return super().solve(problem, hints=hints)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("cluster", "overlap", "solved"), [("v5e:2x4", True, 2), ("v5e:2x4", False, 0), ("v5p:2x2x2", True, 0)])
def test_no_other_member_runs_once_an_answer_is_settled(cluster, overlap, solved, monkeypatch):
    """A proven answer ends the portfolio where nothing can hide, and no member is faster; else all run, recursive programming twice."""
    monkeypatch.setattr(Counting, "solved", [])
    fn, args = PROGRAMS["moe"]()
    problem = problem_of(fn, *args, cluster=replace(eager_cluster(cluster), overlap=overlap))
    others = tuple(member for member in MEMBERS if not isinstance(member, RecursiveProgramming))
    found = Auto((others[0], Counting(), *others[1:])).solve(problem)
    assert len(Counting.solved) == solved
    least = min(member.solve(problem).judgement.cost.makespan_seconds for member in MEMBERS)
    assert found.judgement.cost.makespan_seconds <= least / (1 - 2 * BUDGETS.settled_gap)


class InVain(Filling):
    """A searcher that finds nothing within the limit."""

    automatic = True


@pytest.mark.slow
@pytest.mark.parametrize(("times", "fits"), [(1.05, True), (2.0, False)])
def test_what_was_left_out_is_searched_where_nothing_is_found(times, fits, monkeypatch):
    """Where layers are equal and the first search comes near the limit in vain on all meshes, the next one searches nearest peaks first."""
    fn, args = gpt(n_layers=8, d_model=64, heads=8, ffn=256, vocab=64, batch=8, seq=8)
    free = problem_of(fn, *args, mesh={"data": 8})
    assert symmetry.apply(free) is not None
    limit = 0.9 * RecursiveProgramming().solve(free).judgement.cost.peak_bytes  # no baseline fits it
    monkeypatch.setattr(InVain, "error", InfeasibleError("too much", times * limit))
    problems = [problem_of(fn, *args, mesh=mesh, memory_limit_bytes=limit) for mesh in ({"data": 8}, {"data": 4, "model": 2})]
    searcher = Auto(members=(InVain(), RecursiveProgramming()), last_resort=None)

    def search():
        return search_meshes(searcher, problems, lambda searcher, *asked: searcher.solve(*asked))

    if not fits:
        with pytest.raises(InfeasibleError):
            search()
        return
    found, _ = search()
    assert found.judgement.cost.peak_bytes <= limit
    assert found.finder == RecursiveProgramming.name


def test_hidden_communication_is_searched_for():
    """Where compute hides all_gathers, an answer of more objective and less makespan than any member's is found, and says how."""
    fn, args = mlp(layers=4, width=2048, batch=512)
    problem = problem_of(fn, *args, cluster=Cluster.parse("v5e:2x4"))
    found, members = Auto().solve(problem), [member.solve(problem) for member in MEMBERS]
    assert found.judgement.cost.makespan_seconds < 0.9 * min(one.judgement.cost.makespan_seconds for one in members)
    assert found.judgement.cost == problem.evaluate(found.assignment).cost
    assert found.lower_bound_seconds <= found.judgement.cost.objective_seconds
    assert any("does not hide behind compute: all_gather" in note for note in found.notes)
    hidden, exposed = (
        Cost(*[0.0] * 7, collectives=(Collective("all_gather", ("data",), 8.0, seconds=seconds, exposed_seconds=shown),))
        for seconds, shown in ((1.0, 0.0), (1e6, 1e6))
    )
    ((again, _),) = Auto()._with_exposed_shares(problem, [hidden, exposed], silent, NO_HINTS)
    assert again.notes[-1].endswith("all_gather 0 %")


def test_exposed_shares_are_of_all_answers_together():
    """Of a kind's seconds in all costs the exposed share, or in that which hides most; kinds that do not occur are left out."""
    one, two = (
        Collective("all_gather", ("data",), 8.0, count, seconds=seconds, exposed_seconds=exposed)
        for count, seconds, exposed in ((3, 2.0, 1.0), (1, 4.0, 0.0))
    )
    costs = [
        Cost(*[0.0] * 7, collectives=(each, Collective("all_reduce", ("data",), 8.0, seconds=1.0, exposed_seconds=1.0)))
        for each in (one, two)
    ]
    kinds = "all_gather", "collective_permute"
    assert exposed_shares(costs, kinds) == {"all_gather": 0.3}
    assert least_exposed_shares(costs, kinds) == {"all_gather": 0.0}
    assert least_exposed_shares(costs[:1], kinds) == {"all_gather": 0.5}


def test_other_forms_are_searched_without_what_was_far_from_the_best():
    """Tensor parallelism takes longest of all members, and where it was near the best it is one for other forms too."""
    for is_near in (False, True):
        members = Auto().for_other_forms(replace(NO_HINTS, near_tensor_parallel=is_near)).members
        assert any(member.name == "tensor_parallel" for member in members) == is_near and len(members) == len(MEMBERS) - (not is_near)


def test_a_baseline_that_is_far_from_the_best_runs_on_one_mesh_of_several():
    """It runs again where it was near, and on a mesh that splits the batch into more parts."""
    fn, args = PROGRAMS["mlp"]()
    one, other = (problem_of(fn, *args, mesh=mesh) for mesh in ({"data": 8}, {"data": 4, "model": 2}))
    for share, n in ((1.0, 2), (2.0, 1)):
        auto, calls = Auto((DynamicProgramming(), slower := Slower(share)), last_resort=None), slower.calls
        hints = auto.solve(one).hints
        assert set(hints.far) == ({1} if share > 1 else set())
        auto.solve(other, hints=hints)
        assert len(calls) == n
    fewer = replace(hints, far={1: (2, hints.far[1][1])})
    auto.solve(other, hints=fewer)
    assert len(calls) == n + 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("program", "share"), [("mlp", 0.7), ("gpt", None), ("gpt", 0.6)])
def test_the_answer_is_that_of_one_core(monkeypatch, program, share):
    """Members, placements and all that follows from them are the same, whether memory binds or not, however many processes there are."""
    fn, args = PROGRAMS[program]()
    monkeypatch.setattr(concurrency, "WORTHWHILE", 0.0)
    limit = None if share is None else share * autoshard.search(fn, *args, cluster="v5e:2x2", searcher="data_parallel").cost.peak_bytes
    found, copies = [], []
    monkeypatch.setattr(concurrency, "_copy", lambda *given, make=concurrency._copy: copies.append(1) or make(*given))
    for n in (1, 3):
        monkeypatch.setattr(concurrency, "cores", lambda n=n: n)
        found.append(autoshard.search(fn, *args, cluster="v5e:2x2", memory_limit_bytes=limit))
        assert bool(copies) == (n > 1)
    one, three = (replace(each.record, stats={}) for each in found)
    assert one == three
