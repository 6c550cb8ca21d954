"""The Ray on which a training runs: one that is there, or one that is started for it and reached from this machine alone.

Ray's processes run what they are sent, so whoever reaches them can run anything. A Ray that is started here listens on the loopback, and
asks for a token that is in a file of this user's.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from autoshard.errors import AutoshardError

LOOPBACK = "127.0.0.1"


@contextmanager
def cluster(ray: Any, **options: Any) -> Iterator[bool]:
    """A context in which Ray runs; its value is whether that has token authentication.

    A Ray that this process has joined is left as it is; else that of ``RAY_ADDRESS``, or of ``ray start`` on this machine, is joined, as by
    `ray.init`; else one is started, and ended with the context.

    Args:
        options: of `ray.init`, for one that is started.

    Raises:
        AutoshardError: one that was started listens on a network.
    """
    if ray.is_initialized():
        yield _joined(ray)
        return
    address = sys.modules["ray._private.services"].canonicalize_bootstrap_address(None)
    own = address is None
    with _environment(_variables()) if own else nullcontext():
        try:
            _start(ray, options) if own else ray.init(address=address)
            yield own or _joined(ray)
        finally:
            ray.shutdown()


def _start(ray: Any, options: Mapping[str, Any]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # none are sent unless the user says so
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's; what Ray forks runs another program at once
        started = ray.init(address="local", include_dashboard=False, **options)
    address = started.address_info["node_ip_address"]
    if address != LOOPBACK:
        raise AutoshardError(
            f"A Ray that a training starts is reached from this machine alone, and Ray {ray.__version__} listens on {address}. Start one "
            "with ray.init before the training, as it is to be reached, or install Ray 2.60."
        )


def _joined(ray: Any) -> bool:
    """Whether a cluster has token authentication, with a warning where it has not."""

    def asks() -> bool:
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"

    found = ray.get(ray.remote(num_cpus=0)(asks).remote())
    if not found:
        warnings.warn(
            "The training joins a Ray cluster without token authentication: whoever reaches its ports can run code as its user. Start it "
            "with RAY_AUTH_MODE=token (docs.ray.io has more on it), or on a network that nobody else is on.",
            stacklevel=5,
        )
    return found


# -- the environment, from which alone Ray takes these settings, in this process and in those that it starts -------------------------------


def _variables() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": _token_file(),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine's: then Ray listens on the loopback, on Linux as on these systems
    }


@cache
def _token_file() -> str:
    """The path of a file that this user alone can read, with a new token; gone when this process ends."""
    folder = tempfile.mkdtemp(prefix="autoshard-")  # readable for its owner alone
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "token")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context with environment variables of Ray set, which has read some of them before."""
    before = {name: os.environ.get(name) for name in variables}
    constants: Any = sys.modules["ray._private.ray_constants"]
    over_machines = constants.ENABLE_RAY_CLUSTER  # a variable's value at import
    os.environ.update(variables)
    constants.ENABLE_RAY_CLUSTER = False
    _read_again()
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = over_machines
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _read_again()


def _read_again() -> None:
    """Has Ray forget the mode of authentication and the token, each of which it reads once in a process."""
    raylet: Any = sys.modules["ray._raylet"]
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
