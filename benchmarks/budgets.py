"""Which budgets and thresholds of searches matter? Each at half and at twice its value.

``python -m benchmarks.budgets`` searches a few small train steps with each budget of `autoshard.budgets` halved and doubled, and shows how
the found step time and the search's CPU seconds change: of all programs the largest change each. A budget that no search reads, or whose
answers and seconds are the same at half and twice, has nothing here that shows it. ``--constants ROOM`` does the same for the numeric
constants of modules in a folder of autoshard, such as ``memory_limit``; ``--names`` chooses some of either. CPU seconds of two runs differ
by a third at most. Nothing is allocated or compiled; a budget takes some ten seconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import autoshard
from autoshard.budgets import BUDGETS, Budgets
from autoshard.cli.terminal import show
from autoshard.errors import AutoshardError
from autoshard.render import Report, Table
from benchmarks.single_dtype import gpt, moe, unet

PACKAGE = Path(autoshard.__file__).parent
FACTORS = (0.5, 2.0)
STEADY = 1.5  # times the CPU seconds: what changes less is noise
SAME = 1e-6  # of the step time: equal but for rounding
LIMITED = 0.6  # of the peak without a limit

PROGRAMS: Mapping[str, Callable] = {
    "gpt": partial(gpt, 1, width=512, heads=8, vocabulary=2048, batch=32, length=128),
    "moe": partial(moe, 1, width=256, heads=8, vocabulary=1024, batch=16, length=64),
    "unet": partial(unet, channels=16, batch=16, side=32),
}
CLUSTER = "v5e:2x4"

Places = Sequence[tuple[Any, str]]
"""Objects with an attribute each: the budgets, or the modules that have a constant."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: seconds of a step, infinite where nothing fits; and the CPU seconds that it took."""

    step_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Effect:
    """What a budget does at half and at twice its value, of all programs that read it the most.

    Attributes:
        name, value: of the budget.
        programs: that read it; of a module's constant all.
        steps: the step time over that with the usual value, at each of `FACTORS`, where it differs most.
        cpu: the same of CPU seconds.
    """

    name: str
    value: float
    programs: tuple[str, ...]
    steps: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def shows(self) -> bool:
        """Whether anything tells half and twice from the value."""
        return any(abs(x - 1) > SAME for x in self.steps) or any(not 1 / STEADY < x < STEADY for x in self.cpu)


class _Recording(Budgets):
    """The budgets, with the names of those that were read."""

    __slots__ = ()
    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        _Recording.read.add(name)
        return super().__getattribute__(name)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of the budgets that are read in the context."""
    usual, _Recording.read = type(BUDGETS), set()
    object.__setattr__(BUDGETS, "__class__", _Recording)
    try:
        yield _Recording.read
    finally:
        object.__setattr__(BUDGETS, "__class__", usual)


@contextmanager
def replaced(places: Places, value: float) -> Iterator[None]:
    """Attributes of modules, or of the budgets, with another value in the context."""
    before = [(place, name, getattr(place, name)) for place, name in places]
    try:
        for place, name, _ in before:
            object.__setattr__(place, name, value)
        yield
    finally:
        for place, name, usual in before:
            object.__setattr__(place, name, usual)


def cases() -> dict[str, Callable[[], Any]]:
    """Searches by name: of each program, and of the first one within a memory limit that binds."""
    found: dict[str, Callable[[], Any]] = {}
    for name, program in PROGRAMS.items():
        function, args = program()
        found[name] = partial(autoshard.search, function, *args, cluster=CLUSTER, donate_argnums=0)
    name, search = next(iter(found.items()))
    return found | {f"{name}, limited": partial(search, memory_limit_bytes=LIMITED * search().cost.peak_bytes)}


def searched(search: Callable[[], Any]) -> Found:
    """What a search finds."""
    begun = time.process_time()
    try:
        step = search().cost.makespan_seconds
    except AutoshardError:  # nothing fits, or the search is too large
        step = float("inf")
    return Found(step, time.process_time() - begun)


def scaled(value: float, factor: float) -> float:
    """A multiple of a number, whole if that is."""
    return max(round(value * factor), 1) if isinstance(value, int) else value * factor


def effect(name: str, places: Places, value: float, searches: Mapping[str, Callable], usual: Mapping[str, Found]) -> Effect:
    """What a value does at half and at twice."""
    steps, cpu = [], []
    for factor in FACTORS:
        with replaced(places, scaled(value, factor)):
            found = {program: searched(search) for program, search in searches.items()}
        pairs = [(found[program], usual[program]) for program in searches]
        steps.append(max((_ratio(new.step_seconds, old.step_seconds) for new, old in pairs), key=lambda x: abs(x - 1), default=1.0))
        cpu.append(max((new.cpu_seconds / old.cpu_seconds for new, old in pairs), key=lambda x: max(x, 1 / x), default=1.0))
    return Effect(name, value, tuple(searches), tuple(steps), tuple(cpu))


def _ratio(new: float, old: float) -> float:
    return 1.0 if new == old else new / old if old < float("inf") else 0.0


def constants(room: str) -> Iterator[tuple[str, Places, float]]:
    """The numeric constants of a folder's modules: their names, the modules that have them, and their values."""
    for file in sorted((PACKAGE / room).rglob("*.py")):
        name = ".".join(("autoshard", *file.relative_to(PACKAGE).with_suffix("").parts))
        module = importlib.import_module(name.removesuffix(".__init__"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                name = node.targets[0].id
                value = getattr(module, name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    users = [m for at, m in list(sys.modules.items()) if at.startswith("autoshard.") and m.__dict__.get(name) == value]
                    yield f"{file.stem}.{name}", [(user, name) for user in users], value


def measured(room: str | None, names: set[str]) -> Iterator[Effect]:
    """The effects of all budgets, or of a folder's constants."""
    searches = cases()
    read: dict[str, set[str]] = {}
    usual: dict[str, Found] = {}
    for program, search in searches.items():
        with recorded() if room is None else nullcontext(set()) as found:
            search()
        read[program], usual[program] = found, searched(search)
    if room is None:
        chosen = [(each.name, [(BUDGETS, each.name)], getattr(BUDGETS, each.name)) for each in fields(Budgets)]
    else:
        chosen = list(constants(room))
    for name, places, value in chosen:
        if not names or name in names:
            yield effect(name, places, value, {k: v for k, v in searches.items() if room or name in read[k]}, usual)


def main() -> None:
    """Prints a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--constants", metavar="ROOM", help="the constants of modules in a folder of autoshard, in place of the budgets")
    parser.add_argument("--names", nargs="*", default=[], help="of those that are measured; all unless given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for each in measured(options.constants, set(options.names)):
        print(f"{each.name}: {'shown' if each.shows else 'not shown'}", file=sys.stderr, flush=True)
        found.append(each)
    if options.json:
        print(json.dumps([asdict(each) | {"shows": each.shows} for each in found]))
        return
    rows = [(each.name, f"{each.value:g}", str(len(each.programs)), *map(_words, each.steps, each.cpu), _shown(each)) for each in found]
    table = Table(("budget", ">value", ">searches", ">half", ">twice", "shown"), tuple(rows))
    show(Report("Budgets at half and at twice their values", (table,)))


def _words(step: float, cpu: float) -> str:
    return f"step x {step:.4g}, CPU x {cpu:.2f}"


def _shown(each: Effect) -> str:
    return "not read" if not each.programs else "yes" if each.shows else "no"


if __name__ == "__main__":
    main()
