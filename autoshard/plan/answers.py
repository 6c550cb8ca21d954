"""What the searches of a step's forms have answered, each of which is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from autoshard.errors import InfeasibleError, TraceError
from autoshard.ir import Mesh
from autoshard.plan.forms import Form
from autoshard.search import Searcher

Found = TypeVar("Found")

Ways = tuple[tuple[Searcher, Mesh | None], ...]
"""The searchers and meshes, None for all, with which a form is searched, one after the other until something is found."""


class Answers(Generic[Found]):
    """By form, whether within the memory limit, and ways, what was found, or why nothing was."""

    def __init__(self) -> None:
        self._found: dict[tuple[Form, bool, Ways], Found | Exception] = {}

    def once(self, form: Form, limited: bool, ways: Ways, search: Callable[[], Found]) -> Found:
        """What a search finds, or raises, that is made unless it was made before."""
        key = form, limited, ways
        if key not in self._found:
            try:
                self._found[key] = search()
            except (InfeasibleError, TraceError) as error:
                self._found[key] = error.with_traceback(None)  # which would keep the problem
        if isinstance(answer := self._found[key], Exception):
            raise answer
        return answer

    def elsewhere(self, form: Form) -> Found | None:
        """What was found of a form without a memory limit on any meshes; None: nothing."""
        found = (each for (other, limited, _), each in self._found.items() if other == form and not limited)
        return next((each for each in found if not isinstance(each, Exception)), None)
