"""Where each variable of a program of scopes is made and read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from autoshard.recompute.flat import Atom
from autoshard.rewrite.scopes import Input, Output, Scope, made_by


@dataclass(frozen=True, eq=False)
class Wiring:
    """Where each variable of a program is made and read.

    Attributes:
        home: its scope.
        maker: the equation that makes it.
        entry: the input that it is.
        leaving: of a result of a nested scope, the output.
        readers: the equations that read it.
        entries: the inputs of nested scopes that it becomes.
        outputs: the outputs of its scope that it is.
    """

    home: dict[Var, Scope]
    maker: dict[Var, JaxprEqn]
    entry: dict[Var, Input]
    leaving: dict[Var, Output]
    readers: dict[Var, list[JaxprEqn]]
    entries: dict[Var, list[Input]]
    outputs: dict[Var, list[Output]]

    @classmethod
    def of(cls, root: Scope) -> Wiring:
        wiring = cls({}, {}, {}, {}, {}, {}, {})
        for scope in root.walk():
            wiring._add(scope)
        return wiring

    def _add(self, scope: Scope) -> None:
        self.home.update(dict.fromkeys(scope.constants, scope))
        for each in scope.inputs:
            self.home[each.inner], self.entry[each.inner] = scope, each
            if isinstance(each.outer, Var):
                self.entries.setdefault(each.outer, []).append(each)
        for step in scope.steps:
            self.home.update(dict.fromkeys(made_by(step), scope))
            if isinstance(step, Scope):
                self.leaving.update({each.outer: each for each in step.outputs if each.outer is not None})
                continue
            self.maker.update(dict.fromkeys(step.outvars, step))
            for v in dict.fromkeys(v for v in step.invars if isinstance(v, Var)):
                self.readers.setdefault(v, []).append(step)
        for each in scope.outputs:
            if isinstance(each.inner, Var):
                self.outputs.setdefault(each.inner, []).append(each)

    def source(self, atom: Atom) -> Atom:
        """The variable in which a value was first made, followed through loops' constants, stacks and slices, and checkpoints."""
        found, at, trips = atom, atom, 0
        while isinstance(at, Var):
            if (entry := self.entry.get(at)) is not None and entry.outer is not None and entry.passing != "carry":
                at, trips = entry.outer, trips + (entry.passing == "slice")
            elif (made := self.leaving.get(at)) is not None and (made.passing == "whole" or (made.passing == "slice" and trips)):
                at, trips = made.inner, trips - (made.passing == "slice")
            else:
                break
            if not trips:
                found = at
        return found

    def others(self, var: Var, trips: int = 0) -> Iterator[Var]:
        """The variables of other scopes that are the same value: in nested and surrounding ones, and in loops that read stacks of it.

        Args:
            trips: over so many loops the variable is a stack of the value.
        """
        for entry in self.entries.get(var, ()):
            if entry.passing == "whole" or (entry.passing == "slice" and trips):
                left = trips - (entry.passing == "slice")
                if not left:
                    yield entry.inner
                yield from self.others(entry.inner, left)
        for leaving in self.outputs.get(var, ()):
            if leaving.outer is not None and leaving.passing != "carry":
                more = trips + (leaving.passing == "slice")
                if not more:
                    yield leaving.outer
                yield from self.others(leaving.outer, more)
