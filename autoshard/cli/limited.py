"""Commands run for somebody else: in a process of their own, on files of one folder, within so much time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoshard.errors import AutoshardError
from autoshard.options import OPTIONS
from autoshard.render import format_bytes, format_seconds

OWN = "autoshard.demo."  # programs that come with the package
MOST_TEXT = 100_000  # characters of an answer
TICK_SECONDS = 0.2
APART = ("cluster", "pins")  # options that calls have arguments for


class Refused(AutoshardError):
    """A call that is not made, or was stopped; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of calls.

    Attributes:
        folder: of the files that they may name, in which they run.
        seconds: how long one may take.
        nbytes: of memory that its processes may have.
    """

    folder: Path
    seconds: float
    nbytes: float

    def file(self, name: str) -> str:
        """The name of a file, if it is in the folder.

        Raises:
            Refused: it is outside, or looks like an option.
        """
        if name.startswith("-") or not (self.folder / name).resolve().is_relative_to(self.folder.resolve()):
            raise Refused(f"files are those of the working folder {self.folder}, got {name!r}. Name a file inside, by a relative path.")
        return name

    def source(self, name: str) -> str:
        """A strategy or a cluster, if it is a file of the folder or a name that is no path."""
        return self.file(name) if "/" in name or os.sep in name or name.endswith((".json", ".toml")) or name.startswith("-") else name

    def program(self, name: str) -> str:
        """``module:function``, if the module is in the folder or of the demo: another library's functions are no programs to shard.

        Raises:
            Refused: it is neither.
        """
        module, colon, function = name.partition(":")
        words = [*module.split("."), *function.split(".")]
        if not colon or not all(word.isidentifier() for word in words):
            raise Refused(f"a program reads module:function, got {name!r}.")
        if not module.startswith(OWN):
            path = self.folder.joinpath(*module.split("."))
            places = [place for place in (path.with_suffix(".py"), path / "__init__.py") if place.is_file()]
            if not places:
                raise Refused(f"a program is in a module of the working folder {self.folder}, and it has no {module!r}. Write it there.")
            self.file(str(places[0]))
        return name

    def run(self, *words: str) -> str:
        """What a command prints.

        Raises:
            Refused: it failed, with what it said, or took too much time or memory.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        out, err = self._watched(process)
        if process.returncode not in (0, 1):  # 1: a check failed, which the report says
            told = err.strip()[-4000:]
            if told.startswith("usage:"):  # an error in options, after the command's usage
                told = told.splitlines()[-1]
            raise Refused(told or f"the command ended with exit code {process.returncode} and said nothing.")
        if len(out) > MOST_TEXT:
            out = f"{out[:MOST_TEXT]}\n... {len(out) - MOST_TEXT} more characters are left out."
        return out

    def _watched(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """What a process printed; it and its children are stopped at the limits."""
        end = time.monotonic() + self.seconds
        try:
            while True:
                try:
                    return process.communicate(timeout=min(TICK_SECONDS, self.seconds))
                except subprocess.TimeoutExpired:
                    if time.monotonic() > end:
                        raise Refused(_too_much(f"longer than the {format_seconds(self.seconds)}", "--seconds")) from None
                    if resident_bytes(process.pid) > self.nbytes:
                        raise Refused(_too_much(f"more than the {format_bytes(self.nbytes)} of memory", "--memory")) from None
        finally:
            if process.poll() is None:
                _stop(process)


def _too_much(what: str, option: str) -> str:
    less = "Ask for less: one mesh, a time limit, a smaller program"
    return f"a call has limits, and this one took {what} that it may. {less}; or start the server with more: autoshard mcp {option}."


def _stop(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def resident_bytes(group: int) -> float:
    """The memory that the processes of a group have; 0.0 where the system does not say, as elsewhere than on Linux."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                found += int((entry / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return float(found * os.sysconf("SC_PAGE_SIZE")) if found else 0.0


def option_words(limits: Limits, options: Mapping[str, str | float | bool] | None, pins: Mapping[str, str] | None = None) -> list[str]:
    """Options of a search by their names in Python, as a command line has them.

    Raises:
        Refused: there is no such option, or it names a file outside.
    """
    offered = [name for name in OPTIONS if name not in APART]
    found = []
    for name, value in (options or {}).items():
        if name not in offered:
            raise Refused(f"options are {', '.join(offered)}; got {name!r}. Use one of those.")
        option, text = OPTIONS[name], str(value)
        if isinstance(option.default, bool) or name == "plan":
            found += [option.command] if str(value).lower() != str(option.default).lower() else []
        else:
            found.append(f"{option.command}={limits.source(text) if name == 'start' else text}")
    return [*found, *(f"--pin={path}={spec}" for path, spec in (pins or {}).items())]
