"""Files of servers: arrays by name, written whole or not at all, and the checkpoints in a folder that are complete."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from autoshard.errors import AutoshardError

KEPT = 2  # checkpoints; the one before the last is for a last one that turns out damaged


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name as .npz, under another name until the file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez(file, **dict(arrays))  # pyright: ignore[reportArgumentType]
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read(path: Path, names: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of a file by name; no file can make it run code.

    Raises:
        AutoshardError: the file is missing or damaged, or lacks one of the names.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in dict.fromkeys([*file.files, *names])}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise AutoshardError(
            f"training continues from the files of a checkpoint, and {str(path)!r} cannot be read: {error}. Remove {path.parent.name!r}, "
            "so that the checkpoint before it is taken."
        ) from error


def folder_of(folder: Path, updates: int) -> Path:
    return folder / f"checkpoint-{updates:010d}"


def server_file(checkpoint: Path, server: int) -> Path:
    return checkpoint / f"server-{server}.npz"


def scheduler_file(checkpoint: Path) -> Path:
    """The file that is written last: a checkpoint that has it is complete."""
    return checkpoint / "scheduler.npz"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the last one last."""
    return sorted(file.parent for file in folder.glob("checkpoint-*/scheduler.npz"))


def prune(folder: Path) -> None:
    """Removes all but the last complete checkpoints, each by its file that says that it is complete, first."""
    for old in complete(folder)[:-KEPT]:
        scheduler_file(old).unlink()
        shutil.rmtree(old)


def rows(checkpoint_folder: str | os.PathLike[str], table: str, ids: np.ndarray) -> np.ndarray:
    """Rows ``(*ids.shape, width)`` of a table in the last complete checkpoint of a folder; one server's file is read at a time.

    Raises:
        AutoshardError: there is no such checkpoint or table, or an id is out of range.
    """
    found = complete(Path(checkpoint_folder))
    if not found:
        raise AutoshardError(f"rows are read from a complete checkpoint, and {str(checkpoint_folder)!r} has none. Pass train's folder.")
    servers = int(read(scheduler_file(found[-1]), ("servers",))["servers"])
    flat = np.asarray(ids).reshape(-1)
    parts = []
    for server in range(servers):
        arrays = read(server_file(found[-1], server))
        if f"table/{table}" not in arrays:
            names = ", ".join(sorted(name.removeprefix("table/") for name in arrays if name.startswith("table/")))
            raise AutoshardError(f"rows are those of a table of the checkpoint, and it has no {table!r}. Its tables: {names or 'none'}.")
        part = arrays[f"table/{table}"]
        wanted = flat[flat % servers == server] // servers
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(part)):
            raise AutoshardError(f"ids count the rows of a table from 0, and some in {flat.min()} to {flat.max()} are not in {table!r}.")
        parts.append(part[wanted])
    result = np.empty((flat.size, parts[0].shape[1]), parts[0].dtype)
    for server, part in enumerate(parts):
        result[flat % servers == server] = part
    return result.reshape(*np.shape(ids), result.shape[1])
