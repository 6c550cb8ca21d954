"""Which budgets and thresholds of searches matter? Each at half and at twice its value.

``python -m benchmarks.budgets`` searches four small train steps, and one of them within a memory limit, with each budget of
`autoshard.budgets` halved and doubled, and shows how the found step time and the search's CPU seconds change; once one program, of those
that are searched fastest, shows a budget, the others are left out. A budget that no search reads, or whose answers and seconds are the
same at half and twice, has nothing here that shows it. ``--constants ROOM`` does the same for the numeric constants of modules in a
folder of autoshard, such as ``memory_limit``; ``--names`` chooses some of either, ``--programs`` what is searched. CPU seconds of two
runs differ by a third at most. Nothing is allocated or compiled. It ends after five CPU minutes, unless ``--minutes`` says otherwise, and
names what was not reached.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import autoshard
from autoshard.budgets import BUDGETS, Budgets
from autoshard.cli.terminal import show
from autoshard.errors import AutoshardError
from autoshard.render import Paragraph, Report, Table
from benchmarks.single_dtype import gpt, mlp, moe, unet

PACKAGE = Path(autoshard.__file__).parent
FACTORS = (0.5, 2.0)
STEADY = 1.5  # times the CPU seconds: what changes less is noise
SAME = 1e-6  # of the step time: equal but for rounding
LIMITED = 0.6  # of the peak without a limit

PROGRAMS: Mapping[str, Callable] = {
    "mlp": partial(mlp, 2, width=64, hidden=128, batch=32),
    "gpt": partial(gpt, 1, width=64, heads=4, vocabulary=128, batch=16, length=16),
    "moe": partial(moe, 1, width=64, heads=4, vocabulary=128, batch=16, length=16),
    "unet": partial(unet, channels=8, batch=8, side=8),
}
CLUSTER = "v5e:2x2"

Places = Sequence[tuple[Any, str]]
"""Objects with an attribute each: the budgets, or the modules that have a constant."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: seconds of a step, infinite where nothing fits; and the CPU seconds that it took."""

    step_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Effect:
    """What a budget does at half and at twice its value.

    Attributes:
        name, value: of the budget.
        programs: the one that shows it; where none does, those that read it.
        steps: the step time over that with the usual value, at each of `FACTORS`.
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


def cases(programs: Sequence[str] = tuple(PROGRAMS)) -> dict[str, Callable[[], Any]]:
    """Searches by name: of each program, and of the first one within a memory limit that binds."""
    found: dict[str, Callable[[], Any]] = {}
    for name in programs:
        function, args = PROGRAMS[name]()
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


def steady(search: Callable[[], Any], usual: float) -> Found:
    """What a search finds; in the CPU seconds of another run where those of the first are far from the usual ones."""
    first = searched(search)
    return first if 1 / STEADY < first.cpu_seconds / usual < STEADY else searched(search)


def scaled(value: float, factor: float) -> float:
    """A multiple of a number, whole if that is."""
    return max(round(value * factor), 1) if isinstance(value, int) else value * factor


def effect(name: str, places: Places, value: float, searches: Mapping[str, Callable], usual: Mapping[str, Found]) -> Effect:
    """What a value does at half and at twice, on the first program that shows it, or where none does on that which changes most."""
    told = [Effect(name, value, (), (1.0,) * len(FACTORS), (1.0,) * len(FACTORS))]
    for program, search in searches.items():
        found = []
        for factor in FACTORS:
            with replaced(places, scaled(value, factor)):
                found.append(steady(search, usual[program].cpu_seconds))
        steps = tuple(_ratio(each.step_seconds, usual[program].step_seconds) for each in found)
        told.append(Effect(name, value, (program,), steps, tuple(each.cpu_seconds / usual[program].cpu_seconds for each in found)))
        if told[-1].shows:
            return told[-1]
    return replace(max(told, key=lambda each: max(abs(x - 1) for x in each.cpu)), programs=tuple(searches))


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


def measured(
    room: str | None, names: set[str], programs: Sequence[str] = tuple(PROGRAMS), most: float = math.inf
) -> Iterator[Effect | str]:
    """The effects of all budgets, or of a folder's constants; the names alone of those that come after so many CPU seconds."""
    begun, searches = time.process_time(), cases(programs)
    read: dict[str, set[str]] = {}
    usual: dict[str, Found] = {}
    for program, search in searches.items():
        with recorded() if room is None else nullcontext(set()) as found:
            search()
        read[program], usual[program] = found, searched(search)
    searches = dict(sorted(searches.items(), key=lambda item: usual[item[0]].cpu_seconds))
    if room is None:
        chosen = [(each.name, [(BUDGETS, each.name)], getattr(BUDGETS, each.name)) for each in fields(Budgets)]
    else:
        chosen = list(constants(room))
    for name, places, value in chosen:
        if names and name not in names:
            continue
        own = {k: v for k, v in searches.items() if room or name in read[k]}
        yield effect(name, places, value, own, usual) if not own or time.process_time() - begun < most else name


def main() -> None:
    """Prints a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--constants", metavar="ROOM", help="the constants of modules in a folder of autoshard, in place of the budgets")
    parser.add_argument("--names", nargs="*", default=[], help="of those that are measured; all unless given")
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=[*PROGRAMS], help="some programs only")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the processor, after which it ends")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found, left = [], list[str]()
    for each in measured(options.constants, set(options.names), options.programs, 60 * options.minutes):
        if isinstance(each, str):
            left.append(each)
            continue
        print(f"{each.name}: {_shown(each)}, {', '.join(map(_words, each.steps, each.cpu))}", file=sys.stderr, flush=True)
        found.append(each)
    if options.json:
        print(json.dumps([asdict(each) | {"shows": each.shows} for each in found]))
        return
    rows = [(each.name, f"{each.value:g}", _where(each), *map(_words, each.steps, each.cpu), _shown(each)) for each in found]
    table = Table(("budget", ">value", "searches", ">half", ">twice", "shown"), tuple(rows))
    parts = (table, Paragraph(f"Not reached: {', '.join(left)}.")) if left else (table,)
    show(Report("Budgets at half and at twice their values", parts))


def _where(each: Effect) -> str:
    return each.programs[0] if each.shows else str(len(each.programs))


def _words(step: float, cpu: float) -> str:
    return f"step x {step:.4g}, CPU x {cpu:.2f}"


def _shown(each: Effect) -> str:
    return "not read" if not each.programs else "yes" if each.shows else "no"


if __name__ == "__main__":
    main()
