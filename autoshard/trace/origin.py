"""Source locations of equations in the user's program."""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from autoshard.ir import Origin

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple({
    os.path.join(folder, "")
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_paths()[scheme] for scheme in ("stdlib", "platstdlib", "purelib", "platlib")),
        _PACKAGE,
    )
})  # fmt: skip
_DEMO = os.path.join(_PACKAGE, "demo", "")  # a user's program like any other
_OWN = os.path.join(_PACKAGE, "")
_JAX = tuple(os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), part) for part in ("", "_src"))


@cache
def is_library(file: str) -> bool:
    """Whether a source file is of Python, an installed package or autoshard, rather than the user's.

    >>> is_library(jax.__file__), is_library("/home/me/train.py"), is_library("<stdin>")
    (True, False, False)
    """
    return (file.startswith(_LIBRARIES) and not file.startswith(_DEMO)) or file.startswith("<frozen")


_CELL = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")


@cache
def shown(file: str) -> str:
    """The path without its package's folder, or relative to the working directory; ``cell`` of a notebook's.

    >>> shown("/tmp/ipykernel_5392/1959038493.py")
    'cell'
    """
    if _CELL.search(file):
        return "cell"
    roots = {os.path.join(os.getcwd(), ""), os.path.join(os.path.dirname(_PACKAGE), ""), *_LIBRARIES} - {os.path.join(_PACKAGE, "")}
    return file.removeprefix(max((root for root in roots if file.startswith(root)), key=len, default=""))


def error_place(error: BaseException) -> str:
    """``file:line (function)`` of the innermost user frame in an error's traceback, or an empty string."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return str(Origin(shown(frames[-1].filename), frames[-1].lineno or 0, frames[-1].name)) if frames else ""


class Origins:
    """Origins of equations, cached by traceback."""

    def __init__(self):
        self._frames: dict[Any, tuple[str, int, str, tuple[int, ...]]] = {}
        self._origins: dict[tuple, Origin] = {}

    def of(self, eqn: JaxprEqn, outer: Origin | None, prefix: str) -> Origin:
        """The origin of an equation: that of the call it was inlined from, ``outer``, if that called a library function.

        JAX caches the jaxpr of, say, `jax.nn.relu` with the line of its first caller.
        """
        source = eqn.source_info
        place = (outer.file, outer.line, outer.function, outer.columns) if outer is not None else self._place(source.traceback)
        names = str(source.name_stack)
        key = (*place[:3], f"{prefix}/{names}" if prefix and names else prefix or names, place[3])
        found = self._origins.get(key)
        if found is None:
            found = self._origins[key] = Origin(*key)
        return found

    def _place(self, trace: Any) -> tuple[str, int, str, tuple[int, ...]]:
        if trace is None:
            return "", 0, "", ()
        found = self._frames.get(trace)
        if found is None:
            found = self._frames[trace] = _innermost(trace)
        return found


def _innermost(trace: Any) -> tuple[str, int, str, tuple[int, ...]]:
    """The innermost user frame; if there is none, the innermost one outside JAX and autoshard, whose lines say nothing to a user."""
    codes, instructions = trace.raw_frames()
    frames = [(code, at) for code, at in zip(codes, instructions, strict=True) if not code.co_filename.startswith(_JAX)]
    frames = [frame for frame in frames if not frame[0].co_filename.startswith(_OWN) or frame[0].co_filename.startswith(_DEMO)]
    for code, at in [frame for frame in frames if not is_library(frame[0].co_filename)] or frames:
        return shown(code.co_filename), trace.code_addr2line(code, at), code.co_qualname, _columns(code, at)
    return "", 0, "", ()


def _columns(code: CodeType, at: int) -> tuple[int, ...]:
    """Where an instruction's expression starts in its first line, its last line, and where it ends there."""
    _, last, start, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    return () if last is None or start is None or end is None else (start, last, end)


def calls_library(eqn: JaxprEqn) -> bool:
    """Whether a call equation's function is a library's, so that its equations get the call's location."""
    for param in eqn.params.values():
        info = getattr(getattr(param, "jaxpr", param), "debug_info", None)
        if info is not None:
            return is_library(info.func_filename or "<frozen")
    return False
