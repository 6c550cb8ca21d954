"""Budgets: how much work searches may do, and how small a difference still counts, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits and thresholds of searches. None of them makes an answer illegal or a bound wrong: they trade time against quality.

    Entries are numbers in tables, of 8 bytes each; sweeps are passes of messages over all nodes, there and back; shares and ratios have no
    unit. Options of single searchers, such as the largest table of an elimination, are fields of those.

    Attributes:
        rounding: relative; what sums of a few thousand terms in double precision are exact to, and what a change must gain.
        folding_rounds: reads that a node looks around to find its like: 3 give the optimum's labels of GPT, Llama and MoE steps of 2 to 32
            layers, 2 come within 0.08 %.
        folding_share: of the nodes, at most, that must be left for a problem to be folded.
        kept_entries: of the tables that an eliminator remembers: 32 MiB.
        planning_entries: a variable; adding them up takes as long as planning its elimination does (20 us, 5 ns an entry).
        dear_entries: a variable, from where an order by fill is tried: it takes twice as long to find as one by weights.
        joined_entries: of all joined tables of an elimination, held until labels are found: at most half a gigabyte, and a second.
        contracted_entries: of a node with its two neighbours: adding up so many takes as long as a few sweeps over their pairs.
        dominance_entries: of two labels of a node by one of a neighbour: nodes with more stay as they are.
        dominance_rounds: labels that go may leave others dominated; nearly all go in the first rounds.
        passing_tolerance: of the bound; a sweep that raises it by less is the last.
        leap_sweeps: one sweep of so many is a leap.
        leap_rise: of the bound; after a sweep that raises it by more a leap goes too far.
        row_entries: of tables that are copied to lie in a row: adding to so many one by one takes as long as a few calls.
        together_entries: that pairs of the same table are looked at together: a quarter of a megabyte, which stays near the processor.
        attempt_sweeps: before an attempt at a proof.
        attempt_far: times the gap that is tolerated: beyond it twice the sweeps come before the next attempt, from the third on.
        attempt_lenience: times the tolerance, at most, that is tolerated after several attempts.
        table_sweeps: over tables whose answer is one of many, or that are large.
        axis_tolerance: of the minimum of one axis's tables, where message passing helps to find it.
        whole_entries: that are passed for a bound of the whole problem after its folded one: some 5 s on one core.
        dual_steps: prices that are tried for a bound within a memory limit.
        judged_ops: that changes of single decisions may judge under a memory limit: about a second.
        judged_most: assignments that they may judge, of small programs.
        judged_mixtures: of two answers, of any program.
        price_dear: times the price at which bytes cost as much as seconds, where bytes decide alone.
        price_factor, price_factor_known: between the first prices that are tried: knowing nothing, and knowing one that did elsewhere.
        near_objective: times the least one: what is left to gain is not worth further starts.
        counted_entries: of tables; beyond it what labels hold at least is not counted.
        bound_entries: of tables that are made for a bound alone: 256 MiB.
        folded_sweeps: of the folded problem for a bound, which are cheap; some of the whole follow.
        first_sweeps: that tell which mesh to search first: a GPT's placements on 2 x 4 devices stand in the order of their optima by then.
        screening_sweeps: that tell whether a mesh is searched: on GPT steps of 8 layers on 64 devices the bound is within 1 % after 8.
        bounding_sweeps: for the bound of an answer that nothing is proven of.
        bounding_entries: that may be passed for it: half a second on one core.
        least_gain: of the objective, that is worth a search of a mesh; a tenth of what the judge's predictions are good for.
        near_makespan: times the least one: a baseline that comes as near on one mesh may be the best on another.
        settled_gap: relative; an answer as near to its bound ends a portfolio, as the gap at which dynamic programming stops.
        finer_sweeps: over the prime axes of a mesh.
        finer_entries: of the largest table of an elimination there.
        propagation_rounds: over the mesh axes, of sharding propagation.
        propagation_entries: of its eliminations' tables; beyond it the best-connected nodes keep their labels.
        probe_bytes: of the all_gather that says which axis has the slower links.
    """

    rounding: float = 1e-9
    folding_rounds: int = 4
    folding_share: float = 0.4
    kept_entries: int = 1 << 22
    planning_entries: int = 1 << 12
    dear_entries: int = 1 << 13
    joined_entries: int = 1 << 27
    contracted_entries: int = 1 << 16
    dominance_entries: int = 1 << 20
    dominance_rounds: int = 3
    passing_tolerance: float = 3e-7
    leap_sweeps: int = 2
    leap_rise: float = 0.1
    row_entries: int = 1 << 12
    together_entries: int = 1 << 15
    attempt_sweeps: int = 20
    attempt_far: float = 4
    attempt_lenience: int = 5
    table_sweeps: int = 60
    axis_tolerance: float = 1e-4
    whole_entries: int = 1 << 28
    dual_steps: int = 4
    judged_ops: int = 100_000
    judged_most: int = 128
    judged_mixtures: int = 6
    price_dear: float = 100
    price_factor: float = 4.0
    price_factor_known: float = 1.25
    near_objective: float = 1.05
    counted_entries: int = 1 << 26
    bound_entries: int = 1 << 25
    folded_sweeps: int = 120
    first_sweeps: int = 2
    screening_sweeps: int = 12
    bounding_sweeps: int = 10
    bounding_entries: int = 1 << 26
    least_gain: float = 0.01
    near_makespan: float = 1.1
    settled_gap: float = 1e-3
    finer_sweeps: int = 3
    finer_entries: int = 1 << 20
    propagation_rounds: int = 6
    propagation_entries: int = 1 << 20
    probe_bytes: float = 1e7


BUDGETS = Budgets()
