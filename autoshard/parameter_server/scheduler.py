"""The scheduler: the order of pulls and pushes, checkpoints, and the way back to one after a server was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autoshard.errors import AutoshardError
from autoshard.parameter_server import checkpoints
from autoshard.parameter_server.actors import Actors
from autoshard.parameter_server.server import Program, ServerLost
from autoshard.parameter_server.sparse import CacheUse


@dataclass(frozen=True)
class Result:
    """What a training ends with.

    Attributes:
        params: the parameters, as numpy arrays.
        losses: ``(steps, workers)``, of each worker's batch before its update; the mean over workers is that of the whole batch.
        rollbacks: how often all servers were taken back to a checkpoint, or to the start, since one was lost.
        caches: for each worker how the cache of each table was used.
        authenticated: whether the Ray on which it ran has token authentication.
    """

    params: Any
    losses: np.ndarray
    rollbacks: int
    caches: tuple[dict[str, CacheUse], ...]
    authenticated: bool = False


@dataclass(frozen=True)
class Settings:
    """How the scheduler runs a program; see `train`."""

    steps: int
    mode: str
    folder: Path | None
    checkpoint_every: int
    max_restarts: int
    timeout_seconds: float
    on_step: Callable[[int, int, float], None] | None


class _Lost(Exception):
    """A server or worker was lost while something was expected from it."""


class Scheduler:
    """Orders pulls and pushes, and alone knows how far the training is."""

    def __init__(self, ray: Any, actors: Actors, program: Program, settings: Settings, leaves: Sequence[np.ndarray] | None):
        self.ray, self.actors, self.program, self.settings = ray, actors, program, settings
        self.given: list[Any | None] = [None if leaves is None else ray.put([leaves[i] for i in part.leaves]) for part in program.parts]
        self.clocks = [0] * program.workers  # steps whose gradients were pushed, of each worker
        self.updates = self.rollbacks = 0
        self.losses = np.full((settings.steps, program.workers), np.nan, np.float32)
        self.pending: dict[Any, str] = {}  # what was asked of actors, and may not have ended yet

    def run(self) -> Result:
        """The result, however often servers are lost on the way; workers are restarted by Ray alone."""
        while True:
            try:
                self._await_processes()
                self._restore()
                self._synchronous() if self.settings.mode == "synchronous" else self._asynchronous()
                return self._result()
            except _Lost as lost:
                self.rollbacks += 1
                if self.rollbacks > (self.settings.max_restarts + 1) * (len(self.actors.servers) + len(self.actors.workers)):
                    raise AutoshardError(
                        f"each loss of a server takes all back to a checkpoint once, and this was the loss number {self.rollbacks} with "
                        f"max_restarts={self.settings.max_restarts}: {lost} Look for the cause in Ray's logs."
                    ) from lost
                self._settle()

    # -- the two modes -----------------------------------------------------------------------------------------------------

    def _synchronous(self) -> None:
        done: list[Any] = []
        for step in range(self.clocks[0], self.settings.steps):
            pulled = self._pull()
            found = [self._gradients(worker, self.updates, [*pulled, *done]) for worker in range(self.program.workers)]
            done = self._push(found)
            for worker, loss in enumerate(self._get([each[0] for each in found])):
                self._ended(worker, loss)
            if self._is_due(step + 1):
                self._save(done)
        self._get(done)

    def _asynchronous(self) -> None:
        running: dict[Any, tuple[int, list[Any]]] = {}  # by the reference to the loss: worker, and all that it returns
        done: list[list[Any]] = [[] for _ in self.clocks]
        saved = min(self.clocks)
        while min(self.clocks) < self.settings.steps:
            busy = {worker for worker, _ in running.values()}
            for worker, clock in enumerate(self.clocks):
                if worker not in busy and clock < self.settings.steps and clock - min(self.clocks) <= self.program.max_staleness:
                    found = self._gradients(worker, None, [*self._pull(), *done[worker]])
                    running[found[0]] = (worker, found)
            first = self._wait(list(running), 1)[0]
            worker, found = running.pop(first)
            loss = self._get([first])[0]
            done[worker] = self._push([found])
            self._ended(worker, loss)
            if min(self.clocks) > saved and self._is_due(min(self.clocks)):
                self._save([each for acknowledged in done for each in acknowledged])
                saved = min(self.clocks)
        self._get([each for acknowledged in done for each in acknowledged])

    def _ended(self, worker: int, loss: float) -> None:
        """Notes a worker's step, whose gradients were pushed."""
        step = self.clocks[worker]
        self.clocks[worker] += 1
        self.losses[step, worker] = loss
        waiting = self.ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0, fetch_local=False)[1]
        self.pending = {reference: self.pending[reference] for reference in waiting}
        if self.settings.on_step is not None:
            self.settings.on_step(worker, step, loss)

    # -- what actors are asked ---------------------------------------------------------------------------------------------

    def _ask(self, what: str, references: list[Any]) -> list[Any]:
        self.pending |= dict.fromkeys(references, what)
        return references

    def _pull(self) -> list[Any]:
        return self._ask("a pull", [server.pull.remote(self.updates) for server in self.actors.servers])

    def _gradients(self, worker: int, updates: int | None, pulled: list[Any]) -> list[Any]:
        """References to a worker's loss in its next step, and to what it pushes to each server."""
        step, actor = self.clocks[worker], self.actors.workers[worker]
        references = actor.gradients.options(num_returns=1 + len(self.actors.servers)).remote(step, updates, *pulled)
        return self._ask(f"step {step} of worker {worker}", references)

    def _push(self, found: Sequence[list[Any]]) -> list[Any]:
        """One update of each server by what some workers found, which is sent from these to those."""
        done = [server.push.remote(self.updates, *(each[1 + i] for each in found)) for i, server in enumerate(self.actors.servers)]
        self.updates += 1
        return self._ask("a push", done)

    def _get(self, references: list[Any]) -> list[Any]:
        """The values of references, in time."""
        self._wait(references, len(references))
        return [self._value(each) for each in references]

    def _value(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise self._explained(error, self.pending.get(reference, "a call")) from error

    def _wait(self, references: list[Any], count: int) -> list[Any]:
        if not references:
            return []
        seconds = self.settings.timeout_seconds
        ready, waiting = self.ray.wait(references, num_returns=count, timeout=seconds)
        if len(ready) < count:
            names = ", ".join(sorted({self.pending.get(each, "a call") for each in waiting}))
            raise AutoshardError(
                f"a step, or whatever else servers and workers are asked, ends within timeout_seconds={seconds:g}, compilation included, "
                f"and these have not: {names}. Pass a longer time, or look for what they wait for in Ray's logs."
            )
        return ready

    def _explained(self, error: Exception, what: str) -> Exception:
        """`_Lost` where an error is due to a process that was lost, else an AutoshardError with what failed."""
        losses = (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError, self.ray.exceptions.NodeDiedError, ServerLost)
        cause: Any = error
        while getattr(cause, "cause", None) is not None and not isinstance(cause, losses):
            cause = cause.cause
        if isinstance(cause, losses):
            return _Lost(_last_line(cause))
        if isinstance(cause, AutoshardError):
            return AutoshardError(str(cause))
        return AutoshardError(
            f"gradients_fn, batches and the other functions of a training run without errors in its processes, and {what} ended with "
            f"{type(cause).__name__}: {cause} Its traceback is above; correct it."
        )

    # -- losses, and checkpoints -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Waits until nothing that was asked before is under way, so that nothing old comes after what is asked next."""
        self._wait(list(self.pending), len(self.pending))
        self.pending = {}

    def _await_processes(self) -> None:
        """Waits until all actors run, restarted ones included."""
        for actor in (*self.actors.servers, *self.actors.workers):
            role = self.actors.role(actor)
            try:
                self.ray.get(actor.process.options(max_task_retries=-1).remote(), timeout=self.settings.timeout_seconds)
            except self.ray.exceptions.GetTimeoutError as error:
                raise AutoshardError(
                    f"a server or worker starts within timeout_seconds={self.settings.timeout_seconds:g}, and {role} has not. Ray has "
                    f"{self.ray.available_resources()} free: ask for less in worker_options and server_options, or add machines."
                ) from error
            except self.ray.exceptions.RayActorError as error:
                raise AutoshardError(
                    f"a server or worker that is lost is started again up to max_restarts={self.settings.max_restarts} times, and {role} "
                    f"is lost for good: {_last_line(error)} Look for the reason above or in Ray's logs; pass "
                    "more restarts if it is one that goes away."
                ) from error

    def _restore(self) -> None:
        """Takes servers to the last complete checkpoint, or to the start, and empties the workers' caches."""
        found = checkpoints.complete(self.settings.folder) if self.settings.folder is not None else []
        self.clocks, self.updates = [0] * self.program.workers, 0
        if found:
            self._take(found[-1])
        checkpoint = found[-1] if found else None
        starts = [server.start.options(max_task_retries=-1) for server in self.actors.servers]
        started = [start.remote(checkpoint, self.updates, given) for start, given in zip(starts, self.given, strict=True)]
        self._get(self._ask("the start of a server", started))
        self._get(self._ask("the start of a worker", [each.forget.remote() for each in self.actors.workers]))

    def _take(self, checkpoint: Path) -> None:
        saved = checkpoints.read(checkpoints.scheduler_file(checkpoint), ("clocks", "updates", "servers", "losses"))
        clocks, servers = saved["clocks"].tolist(), int(saved["servers"])
        if (len(clocks), servers) != (self.program.workers, len(self.actors.servers)):
            raise AutoshardError(
                f"a checkpoint is continued by as many workers and servers, and {str(checkpoint)!r} is of {len(clocks)} and {servers}; "
                f"got {self.program.workers} and {len(self.actors.servers)}. Pass these numbers, or another folder."
            )
        if max(clocks) > self.settings.steps:
            raise AutoshardError(
                f"a training continues up to steps={self.settings.steps}, and {str(checkpoint)!r} is after {max(clocks)}. Pass more steps, "
                "or another folder."
            )
        if self.settings.mode == "synchronous" and len(set(clocks)) > 1:
            raise AutoshardError(
                f"synchronous workers continue from one step, and in {str(checkpoint)!r} they are at {clocks}. Pass mode='asynchronous', "
                "or another folder."
            )
        self.clocks, self.updates = clocks, int(saved["updates"])
        known = min(len(saved["losses"]), self.settings.steps)
        self.losses[:known] = saved["losses"][:known]

    def _is_due(self, step: int) -> bool:
        due = step % self.settings.checkpoint_every == 0 or step == self.settings.steps
        return due and self.settings.folder is not None

    def _save(self, done: list[Any]) -> None:
        """Writes a checkpoint after the updates that were asked for, of which the last ones are given."""
        self._get(done)
        assert self.settings.folder is not None
        checkpoint = checkpoints.folder_of(self.settings.folder, self.updates)
        self._get(self._ask("a checkpoint", [server.save.remote(checkpoint, self.updates) for server in self.actors.servers]))
        scheduled = {"clocks": self.clocks, "updates": self.updates, "servers": len(self.actors.servers), "losses": self.losses}
        checkpoints.write(checkpoints.scheduler_file(checkpoint), {name: np.asarray(value) for name, value in scheduled.items()})
        checkpoints.prune(self.settings.folder)

    def _result(self) -> Result:
        structure = jax.tree.structure(self.program.params)
        leaves: list[Any] = [None] * structure.num_leaves
        for part, values in zip(self.program.parts, self._get(self._pull()), strict=True):
            for position, value in zip(part.leaves, values, strict=True):
                leaves[position] = np.array(value)  # Ray's own are read-only, and keep its memory
        uses = self._get(self._ask("the use of caches", [worker.cache_use.remote() for worker in self.actors.workers]))
        return Result(structure.unflatten(leaves), self.losses, self.rollbacks, tuple(uses))


def _last_line(error: BaseException) -> str:
    """Where Ray says in its errors of many lines what happened."""
    return str(error).strip().splitlines()[-1].strip()
