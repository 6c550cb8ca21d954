"""Orbax, and the layout of a checkpoint's folder: ``state`` has the arrays by their paths, ``autoshard`` the document."""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.checkpoint.contents import MAX_BYTES, Contents, contents_of
from autoshard.errors import AutoshardError, CheckpointError, StrategyError

STATE, DOCUMENT = "state", "autoshard"
FILE = "metadata"  # as Orbax names the file of a JSON item

MOST_WORDS = 300  # characters of what a library says
SETTLING_SECONDS = 0.1  # of reads that are under way where another fails

RESTORE_OTHER = "Restore another checkpoint."

T = TypeVar("T")


def orbax() -> Any:
    """The library.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError:
        raise CheckpointError(
            "checkpoints are written and read by Orbax, which is not installed. Run: pip install 'autoshard[checkpoint]'"
        ) from None
    return orbax.checkpoint


def absolute(path: str | os.PathLike[str]) -> str:
    """The path as Orbax takes it; one such as ``gs://bucket/folder`` stays as it is."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise CheckpointError(f"a checkpoint is a folder, given by its path; got {path!r}. Pass a string or a pathlib.Path.")
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def items(arrays: Mapping[str, jax.Array], document: Mapping[str, Any]) -> Any:
    """What Orbax is to save."""
    args = orbax().args
    return args.Composite(**{STATE: args.PyTreeSave(dict(arrays)), DOCUMENT: args.JsonSave(document)})


@contextmanager
def writing(path: str) -> Iterator[None]:
    """A context in which what Orbax raises while it writes is a `CheckpointError`."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint '{path}' was not written: {_first_line(error)}. Check the folder and the space that is left.") from error


def read_contents(path: str) -> Contents:
    """The document of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    orbax()
    from etils import epath

    file = epath.Path(path) / DOCUMENT / FILE
    try:
        if not file.exists():
            raise CheckpointError(f"'{path}' is no checkpoint that autoshard.checkpoint saved, or an incomplete one: it has no {DOCUMENT}/{FILE}. {RESTORE_OTHER}")
        n_bytes = file.stat().length
        if n_bytes > MAX_BYTES:
            raise damaged(path, f"{DOCUMENT}/{FILE} has {n_bytes} bytes, and may have {MAX_BYTES}")
        return contents_of(file.read_bytes().decode())
    except (StrategyError, UnicodeDecodeError) as error:
        raise damaged(path, f"{DOCUMENT}/{FILE}, {error}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint '{path}' cannot be read: {error.strerror or error}. {RESTORE_OTHER}") from None


def read_arrays(path: str, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of these names, shapes, types and shardings.

    Raises:
        CheckpointError: a file is damaged, or has arrays of other names or shapes.
    """
    library = orbax()
    args = {
        name: library.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=True) for name, x in wanted.items()
    }
    try:
        # The handler itself, since a checkpointer waits for all processes, also where one of them has failed.
        with _quiet():
            restored = library.PyTreeCheckpointHandler().restore(
                _folder(path) / STATE, args=library.args.PyTreeRestore(item=dict(wanted), restore_args=args)
            )
        found = {name: restored[name] for name in wanted}
    except Exception as error:  # whatever a damaged file leads to
        raise damaged(path, f"its arrays cannot be read ({_first_line(error)})") from None
    for name, x in wanted.items():
        if not isinstance(found[name], jax.Array) or (found[name].shape, found[name].dtype) != (x.shape, x.dtype):
            raise damaged(path, f"{name} is not the {x.dtype}{list(x.shape)} that its document says")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which the first error is the only one that shows.

    Where a read fails, Orbax 0.12 closes its event loop under all others, and each of these prints a traceback as it ends.
    """

    def ignored(*_: Any) -> None:
        pass

    before = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = sys.excepthook = ignored
    try:
        yield
    except Exception as error:
        error.__traceback__ = None  # and with it what the failed reads hold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that were never awaited
            gc.collect()
        time.sleep(SETTLING_SECONDS)
        raise
    finally:
        sys.unraisablehook, sys.excepthook = before


def _folder(path: str) -> Any:
    from etils import epath

    return epath.Path(path)


def damaged(path: str, what: str) -> CheckpointError:
    """The error for a checkpoint that cannot be used."""
    return CheckpointError(f"checkpoint '{path}' is damaged: {what.rstrip('.')}. {RESTORE_OTHER}")


def _first_line(error: Exception) -> str:
    """What an error says, as one line of a moderate length."""
    said = str(error).split(" [")[0]  # TensorStore adds where in its own source
    text = " ".join(f"{type(error).__name__}: {said}".split())
    text = "".join(character for character in text if character.isprintable())
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


# -- several processes -----------------------------------------------------------------------------------------------------


def together(read: Callable[[], T]) -> T:
    """What a function without collectives returns, once it has returned in all processes; where it fails in one, all raise."""
    if jax.process_count() == 1:
        return read()
    failure, result = None, None
    try:
        result = read()
    except Exception as error:
        failure = error
    failed = [index for index, code in enumerate(everyones(failure is not None)) if code]
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"all processes read a checkpoint before one goes on, and process {failed[0]} failed to. Its output says why.")
    return result  # pyright: ignore[reportReturnType]


def everyones(number: int) -> list[int]:
    """A number of each process, in all processes."""
    with jax.ensure_compile_time_eval():
        return np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1).tolist()
