"""The entry: a training with servers and workers on Ray."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from autoshard.errors import AutoshardError
from autoshard.parameter_server.actors import Actors
from autoshard.parameter_server.partition import partition
from autoshard.parameter_server.scheduler import Result, Scheduler, Settings
from autoshard.parameter_server.server import Program
from autoshard.parameter_server.sparse import Table
from autoshard.ray_cluster import cluster, ray_of

if TYPE_CHECKING:
    import optax  # loaded only for programs that use it

MODES: tuple[Literal["synchronous"], Literal["asynchronous"]] = ("synchronous", "asynchronous")


def train(
    gradients_fn: Callable[..., Any],
    init_params: Any,
    optimizer: optax.GradientTransformation,
    batches: Callable[[int, int, int], Any],
    *,
    steps: int,
    workers: int = 2,
    servers: int = 2,
    mode: Literal["synchronous", "asynchronous"] = "synchronous",
    max_staleness: int | None = None,
    tables: Mapping[str, Table] | None = None,
    checkpoint_folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    max_restarts: int = 3,
    timeout_seconds: float = 600.0,
    worker_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    name: str | None = None,
) -> Result:
    """The parameters after a training in which workers pull them from servers and push gradients to these, all of them actors of Ray.

    Synchronous: in each step one update by the mean of all workers' gradients, so with parts of equal size that of the whole batch.
    Asynchronous: each worker's gradients are an update as they come.

    A worker that is killed is started again by Ray and repeats its step. When a server is killed, all servers go back to the last
    checkpoint, or to the start where there is none, and the steps since then are repeated; nothing else differs, since a batch depends on
    its step alone. A later call with the same folder continues from the last checkpoint.

    Without a Ray that runs, one is started on this machine, which is reached from it alone, and with a token. A cluster that is joined
    keeps its own ways; one without token authentication is warned of.

    Args:
        gradients_fn: ``(params, batch) -> (loss, gradients)`` such as `jax.value_and_grad(loss)`, jitted in the worker. With tables
            ``(params, rows, batch) -> (loss, (gradients, gradients of rows))``, with ``argnums=(0, 1)``; ``rows`` has for each table an
            array ``(*ids.shape, width)``.
        init_params: a pytree, or a function that makes it, of which each server makes its own part.
        optimizer: of the parameters. One whose update of an array reads others keeps all parameters on one server, with a warning.
        batches: ``(worker, workers, step) -> batch``, called in the worker; the same batch for the same step whenever it is called.
        steps: of each worker.
        max_staleness: asynchronous only: how many steps the slowest worker may be behind when another one starts a step, and for how many
            steps a row of a table is read from the cache without asking whether it has changed; default 1.
        tables: by name, for embeddings larger than a worker's memory; they need a `checkpoint_folder`, in which they end.
        checkpoint_folder: one that all servers' machines share.
        checkpoint_every: in steps of all workers; the last step is saved in any case.
        max_restarts: of each server and each worker, after which the training fails.
        timeout_seconds: in which at least one worker ends a step; compilation counts.
        worker_options: of `ray.remote` for a worker, such as ``{"num_gpus": 1}``. Without GPUs or other resources JAX runs on CPU.
        server_options: of `ray.remote` for a server, which runs on CPU.
        on_step: called here as ``(worker, step, loss)``, in the order of updates; repeated steps are told again.
        name: of this training's actors, ``{name}/server-0`` to `ray.get_actor`; a random one by default.

    Raises:
        AutoshardError: an option is out of range, Ray is not installed, one of the functions fails, or the training cannot go on.
    """
    _check_kinds(gradients_fn, optimizer, batches, tables, on_step)
    _check(steps, workers, servers, mode, max_staleness, checkpoint_every, tables, checkpoint_folder)
    ray = ray_of("a parameter server's servers and workers are actors")
    is_function = callable(init_params) and jax.tree_util.treedef_is_leaf(jax.tree.structure(init_params))  # modules are callable trees
    params = jax.eval_shape(init_params if is_function else lambda: init_params)
    parts = partition(optimizer, params, servers)
    make = init_params if is_function else None
    staleness = 0 if mode == "synchronous" else 1 if max_staleness is None else max_staleness
    program = Program(gradients_fn, params, make, optimizer, batches, dict(tables or {}), parts, workers, staleness)
    folder = None if checkpoint_folder is None else Path(checkpoint_folder).absolute()
    settings = Settings(steps, mode, folder, checkpoint_every, max_restarts, timeout_seconds, on_step)
    leaves = None if is_function else [np.asarray(leaf) for leaf in jax.tree.leaves(init_params)]
    with cluster(ray) as authenticated:
        actors = Actors(ray, name or f"parameter_server-{uuid.uuid4().hex[:8]}", max_restarts)
        try:
            actors.start(program, server_options or {}, worker_options or {})
            return replace(Scheduler(ray, actors, program, settings, leaves).run(), authenticated=authenticated)
        finally:
            actors.stop()


def _check(
    steps: int, workers: int, servers: int, mode: str, staleness: int | None, every: int, tables: Mapping | None, folder: Any
) -> None:
    counts = {"steps": steps, "workers": workers, "servers": servers, "checkpoint_every": every}
    for option, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise AutoshardError(f"{option} is a whole number and at least 1; got {value!r}. Pass another.")
    if mode not in MODES:
        raise AutoshardError(f"mode is one of {', '.join(map(repr, MODES))}; got {mode!r}. Pass one of these.")
    if staleness is not None and (mode == "synchronous" or staleness < 0):
        raise AutoshardError(
            f"max_staleness, at least 0, is for mode='asynchronous': synchronous workers take every step together. Got {staleness} with "
            f"mode={mode!r}. Leave it out, or change the mode."
        )
    if tables and folder is None:
        raise AutoshardError("tables end in checkpoints, since they may be larger than memory; got no checkpoint_folder. Pass one.")


def _check_kinds(gradients_fn: Any, optimizer: Any, batches: Any, tables: Any, on_step: Any) -> None:
    """Raises where an argument is of another kind, which processes of Ray would else find out one after the other."""
    functions = {"gradients_fn": gradients_fn, "batches": batches} | ({} if on_step is None else {"on_step": on_step})
    for option, value in functions.items():
        if not callable(value):
            raise AutoshardError(f"{option} is a function; got {value!r:.100}. The docstring of train says what it is called with.")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise AutoshardError(
            f"the optimizer is one of Optax, with init and update; got {optimizer!r:.100}. Pass optax.adam(1e-3), for one."
        )
    is_mapping = isinstance(tables, Mapping | None)
    if not is_mapping or not all(isinstance(table, Table) for table in (tables or {}).values()):
        raise AutoshardError(f"tables are by name, each an autoshard.parameter_server.Table; got {tables!r:.100}. Pass a dict of them.")
