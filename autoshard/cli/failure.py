"""What went wrong, in words: by a rule of ours, in the user's program, or by a fault in autoshard."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from autoshard.errors import AutoshardError

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
MAX_SHOWN = 400


def describe(error: Exception) -> str:
    """One paragraph: an error of ours speaks for itself; of others, what was raised, the user's line it comes from, and how to see more."""
    if isinstance(error, AutoshardError):
        return f"{error} Add --debug to see the traceback." if error.__cause__ else str(error)
    what = f"{type(error).__name__}: {_shortened(str(error))}"
    place = user_place(error)
    if place is None:
        return f"{what} This looks like a fault in autoshard, not in your input. Add --debug to see the traceback, and please report it."
    return f"your program raised {what} It happened at {place}. Add --debug to see the traceback."


def user_place(error: BaseException) -> str | None:
    """``file:line (function)`` of the innermost line of the user's own code; None where no such line was running."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else None


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor a library's; names like ``<string>`` are nobody's."""
    path = Path(filename)
    if not path.is_absolute() or not path.exists():
        return False
    path = path.resolve()
    ours = path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "demo")
    return not ours and not any(path.is_relative_to(library) for library in LIBRARIES)


def _shortened(message: str) -> str:
    """The first paragraph on one line, with a full stop."""
    line = " ".join(message.strip().split("\n\n")[0].split())
    line = line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
    return line if line.endswith((".", "!", "?")) else f"{line}."
