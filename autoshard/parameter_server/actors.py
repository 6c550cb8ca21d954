"""The actors: a process of Ray for each server and worker, which Ray starts again when it dies."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.parameter_server.server import Program, Server
from autoshard.parameter_server.worker import Worker
from autoshard.ray_cluster import worker_environment


class Actors:
    """The handles of all servers and workers; Ray restarts each when its process dies, and repeats a worker's task then."""

    def __init__(self, ray: Any, name: str, max_restarts: int):
        self.ray, self.name, self.max_restarts = ray, name, max_restarts
        self.servers: list[Any] = []
        self.workers: list[Any] = []

    def start(self, program: Program, server_options: Mapping[str, Any], worker_options: Mapping[str, Any]) -> None:
        """Starts all; each worker knows the names of the servers."""
        on_cpu = not any(option in worker_options for option in ("num_gpus", "resources"))
        names = [f"{self.name}/server-{index}" for index in range(len(program.parts))]
        server, worker = (self.ray.remote(_with_program(role, program)) for role in (Server, Worker))
        for index, name in enumerate(names):
            options = {"scheduling_strategy": "SPREAD", **self._options(server_options, name, on_cpu=True)}
            self.servers.append(_started(server, options, index))
        for index in range(program.workers):
            options = {"max_task_retries": -1, **self._options(worker_options, f"{self.name}/worker-{index}", on_cpu)}
            self.workers.append(_started(worker, options, index, names))

    def _options(self, given: Mapping[str, Any], name: str, on_cpu: bool) -> dict[str, Any]:
        """Ray's options of one actor, which imports what this process can import."""
        environment = dict(given.get("runtime_env") or {})
        environment["env_vars"] = worker_environment(on_cpu) | dict(environment.get("env_vars") or {})
        return {"max_restarts": self.max_restarts, "name": name, **given, "runtime_env": environment}

    def stop(self) -> None:
        for actor in (*self.workers, *self.servers):
            self.ray.kill(actor)

    def role(self, actor: Any) -> str:
        place = self.servers.index(actor) if actor in self.servers else self.workers.index(actor)
        return f"{'server' if actor in self.servers else 'worker'} {place}"


def _started(actor: Any, options: Mapping[str, Any], *arguments: Any) -> Any:
    try:
        actor = actor.options(**options)
    except (TypeError, ValueError) as error:
        raise AutoshardError(
            f"server_options and worker_options are those of ray.remote for an actor; Ray says: {error} Correct them."
        ) from error
    try:
        return actor.remote(*arguments)
    except (TypeError, ValueError, pickle.PicklingError) as error:
        raise AutoshardError(
            "servers and workers are sent gradients_fn, batches, the optimizer and other functions with all that they refer to, and are "
            f"started under names that are free; Ray says: {error.__cause__ or error}. Make or load inside the functions what cannot be "
            "sent, or pass another name."
        ) from error


def _with_program(role: type, program: Program) -> type:
    """The class of a role's actors, which has the program in it: Ray keeps classes for restarts, and no arguments of constructors."""

    class Actor(role):
        def __init__(self, *rest: Any):
            super().__init__(program, *rest)

    return type(role.__name__, (Actor,), {})
