"""The Ray on which a training or searches run: one that is there, or one that is started for them and reached from this machine alone.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

from autoshard.errors import AutoshardError

LOOPBACK = "127.0.0.1"


Result = TypeVar("Result")
RETRIES = 3  # of a task whose machine is lost


def ray_of(what: str) -> Any:
    """Ray's module.

    Args:
        what: needs it, in words.

    Raises:
        AutoshardError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise AutoshardError(f"{what} on Ray, and Ray is not installed. Install it with: pip install 'autoshard[ray]'.") from None
    return ray


def worker_environment(on_cpu: bool) -> dict[str, str]:
    """The environment of a worker that imports what this process can import."""
    own = [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    return {"PYTHONPATH": os.pathsep.join(own)} | ({"JAX_PLATFORMS": "cpu"} if on_cpu else {})


def results_on_ray(tasks: Sequence[Callable[[], Result]], on: str = "ray") -> Iterator[tuple[int, Result]]:
    """The number and the result of each task, in the order in which they end; those that are left are ended with the iterator.

    Args:
        tasks: that can be pickled with what they need.
        on: the address of a Ray cluster, as `ray.init` takes it, or ``"ray"``: as for `cluster`.
    """
    ray = ray_of("these searches run")
    with cluster(ray, None if on == "ray" else on, log_to_driver=False):
        run = ray.remote(num_cpus=1, max_retries=RETRIES, runtime_env={"env_vars": worker_environment(on_cpu=True)})(_run)
        left = {run.remote(task): number for number, task in enumerate(tasks)}
        try:
            while left:
                (done,), _ = ray.wait([*left], num_returns=1)
                yield left.pop(done), ray.get(done)
        finally:
            for each in left:
                ray.cancel(each, force=True)


def _run(task: Callable[[], Result]) -> Result:
    return task()


@contextmanager
def cluster(ray: Any, address: str | None = None, **options: Any) -> Iterator[bool]:
    """A context in which Ray runs; its value is whether that has token authentication.

    A Ray that this process has joined is left as it is; else that of an address, of ``RAY_ADDRESS``, or of ``ray start`` on this machine,
    is joined, as by `ray.init`; else one is started, and ended with the context.

    Args:
        address: of the cluster to join; None: as above.
        options: of `ray.init`, for one that is started.

    Raises:
        AutoshardError: one that was started listens on a network.
    """
    if ray.is_initialized():
        yield _joined(ray)
        return
    address = address or sys.modules["ray._private.services"].canonicalize_bootstrap_address(None)
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
