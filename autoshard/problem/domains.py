"""Domains of variables on a mesh: their labels, and the layout of each slot under each label.

Domains do not depend on costs: problems on all placements of a mesh share them, and so do variables whose rules differ in sizes alone that
the same numbers of shards divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, product
from typing import Any

import numpy as np

from autoshard.ir import NOWHERE, Dims, Rule, are_legal, given_choice, layout_dims, layout_numbers
from autoshard.problem.variables import Signature, Variable

Label = tuple[Any, ...]
"""A `Choice` for an op variable, a `Layout` for a layout variable."""


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The labels of a variable.

    Attributes:
        labels: ``n`` legal labels; pins may leave none.
        positions: the position of each label.
        slots: per slot the layout numbers ``(n,)``.
        array: the labels, ``(n, n_axes, 2)`` choices or ``(n, n_axes)`` layouts.
    """

    labels: tuple[Label, ...]
    positions: Mapping[Label, int]
    slots: tuple[np.ndarray, ...]
    array: np.ndarray


class Domains:
    """The domains of a program's variables on meshes of equal sizes, each made once.

    Attributes:
        signatures: of the program's ops.
        sizes: of the mesh axes.
    """

    def __init__(self, signatures: Sequence[Signature], sizes: tuple[int, ...]):
        self.signatures = signatures
        self.sizes = sizes
        self._n_devices = math.prod(sizes)
        # By kind, label and free axes; by what domains depend on; below, by the rules of signatures with sizes as `_divided_alike`.
        self._domains: dict[tuple[int, Label, tuple[int, ...]], Domain] = {}
        self._distinct: dict[tuple, Domain] = {}
        self._choices: dict[tuple[int, Label, tuple[int, ...]], tuple[list[Label], np.ndarray]] = {}
        self._numbers: dict[tuple, np.ndarray] = {}
        self._rules: dict[int, tuple[int, Rule]] = {}
        self._rule_numbers: dict[Rule, int] = {}

    def domain(self, variable: Variable, kind: int, label: Label, free: tuple[int, ...]) -> Domain:
        """The labels that differ from a given one on the free axes only.

        Args:
            variable: whose labels they are.
            kind: a number that variables of equal tables share.
            label: the given one.
            free: the free mesh axes.
        """
        key = kind, label, free
        if (domain := self._domains.get(key)) is None:
            own = self._shape(variable) if variable.leader < 0 else self._rule(variable)[0]
            depends = own, tuple(variable.slots), tuple(variable.pins), label, free
            if (domain := self._distinct.get(depends)) is None:
                domain = self._distinct[depends] = self._domain(variable, label, free)
            self._domains[key] = domain
        return domain

    def knows(self, kind: int, label: Label, free: tuple[int, ...]) -> bool:
        """Whether a domain was asked for before."""
        return (kind, label, free) in self._domains

    def most_labels(self, variable: Variable, n_free: int) -> int:
        """The number of labels of a variable with so many axes free, legal or not."""
        return (len(_atoms(self._rule(variable)[1])) if variable.leader >= 0 else len(variable.label_type[1]) + 1) ** n_free

    def _rule(self, variable: Variable) -> tuple[int, Rule]:
        """The rule of a variable's leader with sizes as `_divided_alike`, and its number."""
        signature = variable.label_type[1]
        if signature not in self._rules:
            rule = self.signatures[signature].rule
            if not rule.given and not any(factor.sends for factor in rule.factors):
                rule = replace(rule, factors=tuple(replace(one, size=self._divided_alike(one.size)) for one in rule.factors))
            self._rules[signature] = self._rule_numbers.setdefault(rule, len(self._rule_numbers)), rule
        return self._rules[signature]

    def _shape(self, variable: Variable) -> tuple[int, ...]:
        """The shape of a layout with sizes as `_divided_alike`."""
        return tuple(map(self._divided_alike, variable.label_type[1]))

    def _divided_alike(self, size: int) -> int:
        """One size for all that are larger than the number of devices, and that the same parts of it divide; smaller ones as they are."""
        return size if size <= self._n_devices else math.gcd(size, self._n_devices) * (self._n_devices + 1)

    def _domain(self, variable: Variable, label: Label, free: tuple[int, ...]) -> Domain:
        if variable.leader >= 0:
            labels, array = self._legal(*self._rule(variable), label, free)
        else:
            shape = self._shape(variable)
            labels, array = _vary(label, free, range(-1, len(shape)))
            divides = np.ones(len(labels), bool)
            for dim, size in enumerate(shape):
                divides &= size % np.where(array == dim, np.array(self.sizes, np.int64), 1).prod(axis=1) == 0
            labels, array = [*compress(labels, divides)], array[divides]
        slots: list[np.ndarray] = []
        for derivation in variable.slots:
            slots.append(self._slot(variable, derivation, label, free, array, slots))
        keep = np.ones(len(labels), dtype=bool)
        for numbers in slots:
            keep &= numbers >= 0
        for slot, rank, pin in variable.pins:
            dims = layout_dims(slots[slot], rank, len(self.sizes))
            for axis in free:
                keep &= np.isin(dims[:, axis], list(pin[axis]))
        if not keep.all():
            labels = [label for label, kept in zip(labels, keep, strict=True) if kept]
            slots, array = [numbers[keep] for numbers in slots], array[keep]
        return Domain(tuple(labels), {label: i for i, label in enumerate(labels)}, tuple(slots), array)

    def _legal(self, number: int, rule: Rule, label: Label, free: tuple[int, ...]) -> tuple[list[Label], np.ndarray]:
        """The legal choices of a rule, which has a number, that differ from a label on the free axes only, also as ``(n, n_axes, 2)``."""
        key = number, label, free
        if key not in self._choices:
            if rule.given:
                given = given_choice(rule, self.sizes)
                labels = [tuple(given[axis] if axis in free else atom for axis, atom in enumerate(label))]
                self._choices[key] = labels, np.array(labels, np.int64).reshape(1, len(self.sizes), 2)
            else:
                labels, array = _vary(label, free, _atoms(rule))
                kept = are_legal(rule, array, self.sizes)
                self._choices[key] = [*compress(labels, kept)], array[kept]
        return self._choices[key]

    def _slot(
        self, variable: Variable, derivation: tuple, label: Label, free: tuple[int, ...], labels: np.ndarray, slots: list[np.ndarray]
    ) -> np.ndarray:
        """The layout numbers ``(n,)`` of a slot; -1 for labels under which it has no layout."""
        match derivation:
            case ("layout",):
                return layout_numbers(labels, len(variable.label_type[1]))
            case ("operand" | "result" as side, position):
                number, rule = self._rule(variable)
                key = number, side, position, label, free
                if key not in self._numbers:
                    dims = (rule.operands if side == "operand" else rule.results)[position]
                    dim_of = np.full(len(rule.factors) + 1, -1)  # by factor; the last entry is for no factor
                    for dim, factors in enumerate(dims):
                        dim_of[list(factors)] = dim
                    layout, scattered = dim_of[labels[..., 0]], labels[..., 1]
                    layout = layout if side == "operand" else np.where(scattered >= 0, scattered, layout)
                    self._numbers[key] = layout_numbers(layout, len(dims))
                return self._numbers[key]
            case ("via", slot, source, target):
                return _via(slots[slot], source, target, len(self.sizes))
            case ("shift", slot, rank, by):
                return _shifted(slots[slot], rank, by, len(self.sizes))
        raise AssertionError(derivation)


def _atoms(rule: Rule) -> list[tuple[int, int]]:
    """The ways in which one mesh axis may shard an op: not at all, by a factor, or by a reduced factor with its sum scattered."""
    atoms = [NOWHERE]
    for factor, entry in enumerate(rule.factors):
        if entry.shardable and entry.size > 1:
            atoms.append((factor, -1))
            if entry.kind == "reduction" and entry.operator == "sum" and len(rule.results) == 1:
                atoms.extend((factor, dim) for dim in range(len(rule.results[0])))
    return atoms


def _vary(label: Label, free: tuple[int, ...], options: Sequence[Any]) -> tuple[list[Label], np.ndarray]:
    """The labels that differ from the given one on the free axes only, also as an array ``(n, n_axes, ...)``."""
    each = [options if axis in free else (atom,) for axis, atom in enumerate(label)]
    labels = list(product(*each))
    numbers = np.indices([len(some) for some in each]).reshape(len(each), len(labels))
    columns = [np.array(some, np.int64)[number] for some, number in zip(each, numbers, strict=True)]
    return labels, np.stack(columns, axis=1) if each else np.zeros((1, 0, *np.shape(options[0])), np.int64)


def _via(numbers: np.ndarray, source: Dims, target: Dims, n_axes: int) -> np.ndarray:
    """Layout numbers of a follower's result by those of its operand; -1 where the result lacks a sharded dimension."""
    dim_of = {factors[0]: dim for dim, factors in enumerate(target) if factors}
    dims = np.array([dim_of.get(factors[0], -2) if factors else -2 for factors in source] + [-1])  # the last entry is for no dimension
    return _numbers_or_none(dims[layout_dims(numbers, len(source), n_axes)], len(target), numbers)


def _shifted(numbers: np.ndarray, rank: int, by: int, n_axes: int) -> np.ndarray:
    """Layout numbers with so many more unsharded leading dimensions, or fewer; -1 where a removed one was sharded."""
    dims = layout_dims(numbers, rank, n_axes)
    return _numbers_or_none(np.where(dims < 0, -1, np.where(dims + by < 0, -2, dims + by)), rank + by, numbers)


def _numbers_or_none(dims: np.ndarray, rank: int, numbers: np.ndarray) -> np.ndarray:
    """The numbers of layouts; -1 where a dimension is -2, or where the given number is -1."""
    return np.where((dims == -2).any(axis=-1) | (numbers < 0), -1, layout_numbers(dims, rank))
