"""The checkpoints of a training loop: written while it goes on, the newest few kept, the newest complete one found again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from autoshard.ask.strategy import Strategy
from autoshard.checkpoint import once
from autoshard.checkpoint.files import absolute, check_folder, folder_of, orbax, together, writing
from autoshard.errors import CheckpointError
from autoshard.plan.agreement import gathered
from autoshard.strategy import to_json


class Checkpoints:
    """The checkpoints in a folder, one a step; a context that ends when all is written.

    Opening it writes and removes nothing, so another program may read them meanwhile. What a killed process left half-written is ignored,
    and removed at the first save. In several processes all make the same calls.

    Args:
        folder: of the checkpoints; made at the first save.
        keep: how many of the newest are kept.
        every: `save` writes at steps that this divides.

    Raises:
        CheckpointError: the folder is a file, or in one; ``keep`` or ``every`` is no whole number from 1 up.

    >>> import tempfile, autoshard, jax.numpy as jnp
    >>> strategy = autoshard.search(lambda w, x: w - x.sum(), jnp.ones(4), jnp.ones(8), cluster="cpu:1")
    >>> with Checkpoints(tempfile.mkdtemp(), every=10) as checkpoints:
    ...     print(checkpoints.restore(strategy))
    ...     written = [checkpoints.save(step, jnp.full(4, float(step)), strategy) for step in (10, 15, 20)]
    ...     print(written, checkpoints.restore(strategy))
    None
    [True, False, True] (20, Array([20., 20., 20., 20.], dtype=float32))
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, every: int = 1):
        for name, value in (("keep", keep), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}= of checkpoints is a whole number from 1 up, got {value!r}. Write {name}=3, for instance.")
        self.folder: str = absolute(folder)
        check_folder(self.folder)
        self.keep = keep
        self.every = every
        self._manager: Any = None  # Orbax's, from the first save on
        self._text: tuple[Strategy, str] | None = None  # the latest strategy and its JSON
        self._is_entered = False

    def __enter__(self) -> Checkpoints:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._is_entered = False
        if kind is None or jax.process_count() == 1:  # else other processes, which may have ended, would be waited for
            self.close()

    def save(self, step: int, state: Any, strategy: Strategy, *, extra: Any = None, always: bool = False) -> bool:
        """Whether a step's state is written: where `every` divides the step, or ``always``.

        Returns as soon as the state is copied from the devices, so that its arrays may be donated; the files are written meanwhile. A save
        that is still being written is waited for. Outside a ``with`` block it returns when the files are written, since nothing would wait
        for the last ones.

        Args:
            step: how many steps have been done.
            state, strategy, extra: as for `autoshard.checkpoint.save`.

        Raises:
            CheckpointError: a later step is there already; this save, or the one before, cannot be written.
            StrategyError: no argument is structured as the state.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"a checkpoint is numbered by the steps that were done, got {step!r:.60}. Pass a whole number from 0 up.")
        once.check_strategy(strategy)
        if not always and step % self.every:
            return False
        with writing(self.path(step)):
            manager = self._writer()
            last = manager.latest_step()
            if last is not None and step <= last:
                raise CheckpointError(
                    f"steps of checkpoints ascend, and '{self.folder}' has step {last} already, got {step}. Restore that one before "
                    "training goes on, or use another folder."
                )
            if self._text is None or self._text[0] is not strategy:
                self._text = strategy, to_json(strategy.record)
            manager.save(step, args=once.prepared(state, strategy, extra, self._text[1]), force=True)
        if not self._is_entered:
            self.wait()
        return True

    def latest(self) -> int | None:
        """The newest step that is complete, the same in all processes; None: there is none."""
        self.wait()
        steps = together(self._steps)
        newest = gathered(max(steps, default=-1) + 1)[0] if jax.process_count() > 1 else max(steps, default=-1) + 1
        return newest - 1 if newest else None

    def restore(
        self, strategy: Strategy | None = None, *, like: Any = None, devices: Sequence[Any] | None = None, step: int | None = None
    ) -> tuple[int, Any] | None:
        """The newest step and its state, put where the strategy wants it; None where there is no checkpoint.

        Args:
            strategy, like, devices: as for `autoshard.checkpoint.restore`.
            step: another than the newest.

        Raises:
            CheckpointError: as `autoshard.checkpoint.restore` does.
        """
        found = self._found(step)
        return None if found is None else (found, once.restore(self.path(found), strategy, like=like, devices=devices))

    def strategy(self, step: int | None = None) -> Strategy | None:
        """The strategy of the newest checkpoint, or of a step's; None where there is no checkpoint."""
        found = self._found(step)
        return None if found is None else once.strategy(self.path(found))

    def extra(self, step: int | None = None) -> Any:
        """The JSON value that was saved with the newest checkpoint, or with a step's; None where there is none."""
        found = self._found(step)
        return None if found is None else once.extra(self.path(found))

    def path(self, step: int) -> str:
        """The folder of a step's checkpoint."""
        return f"{self.folder.rstrip('/')}/{step}"

    def wait(self) -> None:
        """Returns when all is written.

        Raises:
            CheckpointError: something could not be.
        """
        if self._manager is not None:
            with writing(self.folder):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all is written, and ends the threads that do so."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with writing(self.folder):
                manager.wait_until_finished()
                manager.close()

    def _found(self, step: int | None) -> int | None:
        if step is None:
            return self.latest()
        self.wait()
        return step

    def _steps(self) -> list[int]:
        library = orbax()
        folder = folder_of(self.folder)
        return library.utils.checkpoint_steps(folder) if folder.exists() else []

    def _writer(self) -> Any:
        if self._manager is None:
            library = orbax()
            options = library.CheckpointManagerOptions(
                max_to_keep=self.keep, cleanup_tmp_directories=True, save_root_metadata=False, lightweight_initialize=True
            )
            self._manager = library.CheckpointManager(self.folder, options=options)
        return self._manager
