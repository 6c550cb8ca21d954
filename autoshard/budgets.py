"""Budgets of searches: limits of work, and thresholds of differences that count, in one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits and thresholds of searches. None of them makes an answer illegal or a bound wrong: they trade time against quality.

    Entries are numbers in tables, of 8 bytes each; a sweep is one pass of messages over all variables, forward and backward; shares and
    ratios have no unit. Options of single searchers, such as the largest table of an elimination, are fields of those.

    `python -m benchmarks.budgets` shows what each does to small programs. Large ones alone show those that guard memory and minutes, which
    are ``kept_entries``, ``joined_entries``, ``bound_entries``, ``bounding_entries``, ``counted_labels`` and ``reshard_layouts``; and only
    limits that nothing else fits show the last resort.

    Attributes:
        rounding: the relative error of sums of a few thousand terms in double precision, and the least gain of a change.
        symmetry_rounds: rounds of colour refinement: 3 give the optimum's labels of GPT, Llama and MoE steps of 2 to 32 layers, 2 come
            within 0.08 %.
        symmetry_share: the largest share of variables that a quotient problem may have.
        kept_entries: of the results that an eliminator keeps: 32 MiB.
        small_entries: a variable; adding up so many takes as long as planning its elimination does (20 us, 5 ns an entry), or as calls for
            one table. Orders of more are tried by fill, too, which takes twice as long to find as by weight; fewer are flattened.
        joined_entries: of all joined tables of an elimination, stored until labels are found: at most half a gigabyte, and a second.
        low_degree_entries: of a variable with its two neighbours: adding up so many takes as long as a few sweeps over their pairs.
        dominance_rounds: labels removed in one round may leave others dominated; nearly all go in the first rounds.
        passing_tolerance: of the bound; a sweep that raises it by less is the last.
        extrapolation_sweeps: one sweep of so many extrapolates.
        extrapolation_rise: of the bound; after a sweep that raises it by more, extrapolation goes too far, and first bounds put meshes of a
            U-Net in another order, whose answer on v5e:4x4 is then 0.6 % dearer.
        together_entries: of the pairs of one table that are processed together: a quarter of a megabyte, which fits a processor's cache.
        attempt_sweeps: before an attempt at a proof.
        attempt_lenience: times the tolerance, at most, that is tolerated after several attempts.
        table_sweeps: over tables that are one of many to be solved, or large, and over the quotient problem for a bound.
        tolerance: of the minimum of one axis's tables, where message passing helps to find it; and of objectives: an answer within the
            limit that is as near to the one without prices ends the search for prices.
        dual_steps: prices that are tried for a bound within a memory limit.
        judged_ops: that changes of single decisions may judge under a memory limit: about a second.
        judged_most: assignments that they may judge, of small programs.
        judged_part: of them, after which repair that saves too little ends.
        judged_least: prices of a baseline, and mixtures of two answers, on any program; and changes with which an answer that fits is
            expected to be beyond the limit, and may not be.
        price_dear: times the price at which bytes cost as much as seconds, where bytes decide alone.
        price_factor, price_factor_known: between the first prices: knowing none, and knowing one of another search. With one for both a GPT
            of two layers within 0.9 of its peak takes 1.4 times as long.
        near: times the least objective, makespan or memory limit: further starts are not worth their time where an objective is so near, a
            baseline so near on one mesh may be the best on another, and beyond a peak so near slow repair, or another search, is in vain.
        last_resort_entries, last_resort_nodes, last_resort_rounds: of integer programming where nothing else fits the limit: of all
            tables, of branch and bound in one model, and models solved. A model of so many entries takes HiGHS a second.
        counted_labels: of all kinds of variables; above it their least bytes are not computed. So many take some seconds.
        whole_labels: of a variable, all of which are costed when some are asked for: on two axes.
        bound_entries: of tables that are made for a bound alone: 256 MiB.
        first_sweeps: for the order of meshes: a GPT's placements on 2 x 4 devices are in the order of their optima by then.
        far_bound: times the least first bound of all meshes; those beyond it are searched last, however few axes they have.
        screening_sweeps: to decide whether a mesh is searched, and for the bound of an answer without one: on GPT steps of 8 layers on 64
            devices the bound is within 1 % after 8.
        bounding_entries: passed over for a bound: of the whole problem after its quotient, or of an answer without one. One core takes a
            second or two.
        least_gain: of the objective, that is worth a search of a mesh; a tenth of the predictions' accuracy.
        settled_gap: relative; an answer as near to its bound ends a portfolio, as the gap at which dynamic programming stops; of the
            smallest peak, that a higher price must save; and of the makespan, that overlap must.
        refined_tables: that a descent makes to find a mesh of more axes: a U-Net needs 700 for each time that an axis is freed.
        split_axes: that the axes of a mesh are split into: primes of up to 256 devices.
        axis_split_sweeps: over these.
        table_entries: of the largest table of one axis, split or in sharding propagation, beyond which the best-connected variables keep
            their labels; and of two labels of a variable by one of a neighbour: larger variables keep all labels.
        reshard_layouts: of an array; reshards between more are computed pair by pair. Between 729 all pairs take 5 s. Where groups of axes
            in such a pair have more, the array is gathered and sliced.
        probe_bytes: of the all_gather whose time tells which axis has the slower links.
    """

    rounding: float = 1e-9
    symmetry_rounds: int = 4
    symmetry_share: float = 0.4
    kept_entries: int = 1 << 22
    small_entries: int = 1 << 12
    joined_entries: int = 1 << 27
    low_degree_entries: int = 1 << 16
    dominance_rounds: int = 3
    passing_tolerance: float = 3e-7
    extrapolation_sweeps: int = 2
    extrapolation_rise: float = 0.1
    together_entries: int = 1 << 15
    attempt_sweeps: int = 20
    attempt_lenience: int = 5
    table_sweeps: int = 60
    tolerance: float = 1e-4
    dual_steps: int = 4
    judged_ops: int = 100_000
    judged_most: int = 128
    judged_part: float = 0.25
    judged_least: int = 4
    price_dear: float = 100
    price_factor: float = 4.0
    price_factor_known: float = 1.25
    near: float = 1.1
    last_resort_entries: int = 1 << 17
    last_resort_nodes: int = 200
    last_resort_rounds: int = 24
    counted_labels: int = 1 << 18
    whole_labels: int = 1 << 8
    bound_entries: int = 1 << 25
    first_sweeps: int = 2
    far_bound: float = 2.0
    screening_sweeps: int = 12
    bounding_entries: int = 1 << 27
    least_gain: float = 0.01
    settled_gap: float = 1e-3
    refined_tables: int = 1 << 16
    split_axes: int = 8
    axis_split_sweeps: int = 3
    table_entries: int = 1 << 20
    reshard_layouts: int = 512
    probe_bytes: float = 1e7


BUDGETS = Budgets()
