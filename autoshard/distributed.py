"""Several processes as one program: each runs the same script, and JAX's devices are those of all of them."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.errors import AutoshardError

# `autoshard launch` sets these, and so may whatever else starts processes. JAX itself reads the first, and further ones of its own.
COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"

# How many processes there are, by launchers whose coordinator JAX 0.10 does not find: Open MPI 5, MPICH and Intel MPI, torchrun.
UNDETECTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Processes:
    """Which process this is, from 0 up, and how many there are.

    >>> Processes(index=0, count=2)
    Processes(index=0, count=2)
    """

    index: int
    count: int


_joined: Processes | None = None  # by `initialize`, once in a process


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None, **options: Any
) -> Processes:
    """Which process this is and how many there are, once all have joined; ``(0, 1)`` where nothing started it as one of several.

    To be called in every process before JAX is used. Without arguments the processes are those of `autoshard launch`, or of Slurm, Open
    MPI, a TPU pod or Kubernetes, which JAX detects. Another call returns the same. A process that an exception ends exits at once: JAX
    would wait minutes for the others, which wait for it.

    Args:
        coordinator_address: host and port at which process 0 is reached by the others, as in ``"10.0.0.1:1234"``.
        num_processes: how many there are.
        process_id: which one this is, from 0 up.
        options: further ones of `jax.distributed.initialize`.

    Raises:
        AutoshardError: JAX has started its devices already, or it is not known which processes there are.
    """
    global _joined
    if _joined is None:
        _joined = _join(coordinator_address, num_processes, process_id, options)
    return _joined


def _join(address: str | None, count: int | None, index: int | None, options: dict[str, Any]) -> Processes:
    if jax.distributed.is_initialized():
        return Processes(jax.process_index(), jax.process_count())
    is_told = (address, count, index) != (None, None, None) or "cluster_detection_method" in options
    if not is_told and COUNT in os.environ:
        address, count, index, is_told = os.environ.get(COORDINATOR), _number(COUNT), _number(INDEX), True
        options = {**options, "cluster_detection_method": "deactivate"}  # those started inside a job of Slurm are not that job's
    if index == 0 and "coordinator_bind_address" not in options and BIND not in os.environ:
        if bind := _own_address(address or os.environ.get(COORDINATOR)):  # JAX would listen on all networks, and asks nobody who they are
            options = {**options, "coordinator_bind_address": bind}
    if jax.config.values["jax_cpu_collectives_implementation"] is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(address, count, index, **options)
    except ValueError as error:  # raised before anything has started
        if not is_told and str(error).startswith("coordinator_address"):
            return _alone()
        raise AutoshardError(
            f"processes find each other by the coordinator's address, their number and each one's index, and JAX says: {error} "
            f"Pass coordinator_address=, num_processes= and process_id=, or set {COORDINATOR}, {COUNT} and {INDEX}."
        ) from None
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise AutoshardError(
            f"processes are joined before JAX starts its devices, and it is already running with {jax.device_count()} of "
            f"{jax.default_backend()}. Call autoshard.distributed.initialize() right after the imports: jax.devices(), arrays and jitted "
            "calls start them."
        ) from None
    _leave_at_once_when_failed()
    return Processes(jax.process_index(), jax.process_count())


def _own_address(address: str | None) -> str | None:
    """The address at which a coordinator is reached, as host and port of this machine; None where it is another's, or may be several.

    A name that leads to the loopback on this machine may lead to another address on others.

    >>> _own_address("localhost:1234"), _own_address("192.0.2.1:1234"), _own_address(None)
    ('127.0.0.1:1234', None, None)
    """
    host, _, port = (address or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ((family, ip),) = {(family, place[0]) for family, *_, place in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
        with socket.socket(family) as tried:
            tried.bind((ip, 0))
    except (OSError, ValueError):  # an unknown name, several addresses, none of this machine
        return None
    if ipaddress.ip_address(ip).is_loopback and host != ip:
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _alone() -> Processes:
    """One process, unless it was started as one of several."""
    found = next((name for name in UNDETECTED if os.environ.get(name, "1") != "1"), None)
    if found is not None:
        raise AutoshardError(
            f"this is one of {os.environ[found]} processes by {found}, and JAX detects no coordinator for them. Pass "
            "coordinator_address=, num_processes= and process_id=, or under MPI cluster_detection_method='mpi4py'."
        )
    return Processes(0, 1)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise AutoshardError(f"{COUNT} and {INDEX} are whole numbers, set in every process; got {text!r} as {name}. Set both, or none.")
    return int(text)


def _leave_at_once_when_failed() -> None:
    """Has a process that an uncaught exception ends exit without `jax.distributed.shutdown`.

    That waits five minutes for all processes, and these wait in a collective for the one that failed (JAX 0.10.2).
    """
    failures: list[type[BaseException]] = []
    shown = sys.excepthook

    def noted(kind: type[BaseException], *rest: Any) -> None:
        failures.append(kind)
        shown(kind, *rest)

    def leave() -> None:
        if failures:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(1)

    sys.excepthook = noted
    atexit.register(leave)  # after JAX's own, which then comes later
