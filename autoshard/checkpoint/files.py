"""Orbax, and the layout of a checkpoint's folder: ``state`` has the arrays by their paths, ``autoshard`` the document."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from autoshard.checkpoint.contents import MAX_BYTES, Contents, contents_of
from autoshard.errors import AutoshardError, CheckpointError, StrategyError
from autoshard.plan.agreement import gathered
from autoshard.plan.finalists import in_words

STATE, DOCUMENT = "state", "autoshard"
FILE = "metadata"  # as Orbax names the file of a JSON item

RESTORE_OTHER = "Restore another checkpoint."

EXCHANGES = ("Gloo", "NCCL", "Barrier", "coordination service", "closed by peer")  # in errors of what processes say to each other

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
        raise CheckpointError(f"a checkpoint is a folder, given by its path; got {path!r:.60}. Pass a string or a pathlib.Path.")
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def check_folder(path: str) -> None:
    """Raises `CheckpointError` where an absolute path is no folder and cannot become one, since a file is in its place or above it."""
    if "://" in path:
        return
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise CheckpointError(f"checkpoints are in a folder of their own, got '{path}', and '{there}' is a file. Name another folder.")


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
        remedy = "Check the folder, and the space that is left."
        if any(word in str(error) for word in EXCHANGES):
            remedy = "Another process has ended, or does not save this step: its output says why."
        raise CheckpointError(f"checkpoint '{path}' was not written: {in_words(error)}. {remedy}") from error


def read_contents(path: str) -> Contents:
    """The document of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    orbax()
    file = folder_of(path) / DOCUMENT / FILE
    try:
        if not file.exists():
            raise CheckpointError(
                f"'{path}' is no checkpoint that autoshard.checkpoint saved, or an incomplete one: it has no {DOCUMENT}/{FILE}. "
                f"{RESTORE_OTHER}"
            )
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
    kind = library.ArrayRestoreArgs
    places = {name: kind(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=True) for name, x in wanted.items()}
    args = library.args.PyTreeRestore(item=dict(wanted), restore_args=places)
    # The handler itself, since a checkpointer waits for all processes, also where one of them has failed.
    try:
        with _ending_reads():
            found = library.PyTreeCheckpointHandler().restore(folder_of(path) / STATE, args=args)
    except Exception as error:  # whatever a damaged file leads to
        raise damaged(path, f"its arrays cannot be read ({in_words(error)})") from None
    for name, x in wanted.items():
        array = found.get(name)
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (x.shape, x.dtype):
            raise damaged(path, f"{name} is not the {x.dtype}{list(x.shape)} that its document says")
    return found


class _Ending(asyncio.SelectorEventLoop):
    """An event loop that ends what runs in it before it closes."""

    def close(self) -> None:
        tasks = asyncio.all_tasks(self) if not self.is_closed() else ()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def _ending_reads() -> Iterator[None]:
    """A context in which all reads end before one that failed is reported.

    Orbax 0.12 closes its event loop under the others, and each of these would print a traceback as it ends.
    """
    before = asyncio.new_event_loop
    asyncio.new_event_loop = _Ending
    try:
        yield
    finally:
        asyncio.new_event_loop = before


def folder_of(path: str) -> Any:
    """The path as an object with a `pathlib.Path`'s methods, also one such as ``gs://bucket/folder``."""
    from etils import epath

    return epath.Path(path)


def damaged(path: str, what: str) -> CheckpointError:
    """The error for a checkpoint that cannot be used."""
    return CheckpointError(f"checkpoint '{path}' is damaged: {what.rstrip('.')}. {RESTORE_OTHER}")


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
    failed = [index for index, code in enumerate(gathered(failure is not None)) if code]
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(
            f"all processes read a checkpoint before one goes on, and process {failed[0]} could not. Its output says why."
        )
    return result  # pyright: ignore[reportReturnType]
