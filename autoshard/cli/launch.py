"""``autoshard launch``: one script in several processes of this machine, which `autoshard.distributed.initialize` joins.

With ``--write`` it prints the file with which a scheduler starts them on a cluster's machines instead.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from autoshard.cli import rank
from autoshard.cli.options import command, positive
from autoshard.errors import AutoshardError

GRACE_SECONDS = 5.0  # until a process that does not end by itself is killed; JAX takes SIGTERM for a preemption and goes on
LAST_LINES = 20
SAME_MOMENT_SECONDS = 1.0  # within which the ends of processes may be told in another order than they came
STARTING = "autoshard launch: starting "
WAIT_SECONDS = 10.0  # that a process may wait at its end, where `jax.distributed.shutdown` does, before a word is said
RESUMED = 3  # times, where --resume stands alone
FORMATS = ("slurm", "jobset", "ray", "sky")
VALUED = ("-n", "--processes", "--devices-per-process", "--log-dir", "--min-processes", "--write", "--strategy", "--cluster")
CHUNK = 2**16

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(BaseException):
    """The launcher was sent a signal to end."""

    def __init__(self, number: int, *_: Any):
        super().__init__(f"signal {number}")
        self.number = number


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "run a script in several processes of this machine, or write the file that starts it on others"
    example = "autoshard launch -n 4 --devices-per-process 2 train.py --steps 100"
    parser = command(commands, "launch", run, what, example, reports=False)
    parser.usage = (
        "autoshard launch -n N [--devices-per-process K] [--log-dir DIR] [--resume [TIMES] [--min-processes M]] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]\n"
        "       autoshard launch --write FORMAT (--strategy FILE | --cluster CLUSTER) (SCRIPT | -m MODULE) [ARGUMENT ...]"
    )
    parser.add_argument("-n", "--processes", metavar="N", type=positive, help="how many processes")
    _add_written(parser)
    parser.add_argument(
        "--devices-per-process", metavar="K", type=positive, default=1, help="devices of each: GPUs in their order, or virtual CPU devices"
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path, default=Path("logs"), help="where each process has its rank-0.log, ... (default: logs)"
    )
    parser.add_argument(
        "--resume",
        metavar="TIMES",
        type=positive,
        default=0,
        help=f"start all again when one fails, at most so many times ({RESUMED}); the script goes on from its newest checkpoint",
    )
    parser.add_argument(
        "--min-processes",
        metavar="M",
        type=positive,
        help="with --resume: go on without a process, and its devices, that failed twice in a row, as long as M are left",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="calls autoshard.distributed.initialize() first")


def _add_written(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write",
        metavar="FORMAT",
        choices=FORMATS,
        help="print what starts the script on a cluster, and run nothing: slurm (a batch script), jobset (a manifest for Kubernetes), "
        "ray (a script of Ray Train), sky (a task of SkyPilot)",
    )
    parser.add_argument("--strategy", metavar="FILE", help="with --write: a strategy, for whose cluster it is written")
    parser.add_argument("--cluster", metavar="CLUSTER", help="with --write: the cluster, where there is no strategy")


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments after ``launch``, with the number of ``--resume`` spelt out; the script's own options are left alone.

    >>> with_defaults(["-n", "2", "--resume", "train.py", "--resume"])
    ['-n', '2', '--resume=3', 'train.py', '--resume']
    """
    found, at = list(arguments), 0
    while at < len(found) and found[at].startswith("-") and found[at] != "-m":
        if found[at] == "--resume" and not "".join(found[at + 1 : at + 2]).isdecimal():
            found[at] = f"--resume={RESUMED}"
        at += 2 if found[at] in (*VALUED, "--resume") else 1
    return found


def run(options: argparse.Namespace) -> int:
    """Runs the processes to their end; the exit code of the first that fails, 128 and more where a signal ended it, or 0."""
    program = _program(options.script, options.module)
    if options.write:
        return _write(program, options)
    if options.processes is None or options.strategy or options.cluster:
        raise AutoshardError(
            "a script runs in -n processes of this machine, or --write prints what starts it on the machines of --strategy or --cluster. "
            "Give one of these."
        )
    if options.min_processes is not None and (not options.resume or options.min_processes > options.processes):
        raise AutoshardError(
            f"--min-processes is how many processes --resume may go on with, 1 to {options.processes}; got {options.min_processes}"
            f"{'' if options.resume else ' without --resume'}. Add --resume, or leave it out."
        )
    logs = _logs(options.log_dir, options.processes)
    places = list(range(options.processes))  # of the processes that run, among all devices
    before = None  # the place that failed last
    with _stopping():
        for restart in range(options.resume + 1):
            try:
                index, code = _attempt(program, places, options, logs)
            except Stopped as stop:
                print(f"\nautoshard launch: ended by {signal.Signals(stop.number).name}, and all processes with it.", file=sys.stderr)
                return 128 + stop.number
            if code:
                print(_failure(index, code, logs[index]), file=sys.stderr)
            if not code or restart == options.resume:
                break
            again = before == places[index] and len(places) > (options.min_processes or options.processes)
            before = places.pop(index) if again else places[index]
            left_out = f" without the last rank {index}, which failed twice in a row" if again else ""
            _announce(restart + 1, options.resume, left_out, logs[: len(places)])
    return code if code >= 0 else 128 - code


def _write(program: Sequence[str], options: argparse.Namespace) -> int:
    """Prints the file that starts the program on a cluster."""
    from autoshard.cli.found import record_of
    from autoshard.cli.job_files import WRITERS, Job
    from autoshard.cluster import Cluster
    from autoshard.cluster.hosts import hosts_of

    if options.processes is not None or (options.strategy is None) == (options.cluster is None):
        raise AutoshardError(
            f"--write {options.write} takes the processes and their devices from --strategy or --cluster, one of them and no -n. "
            "Name a strategy's file, or a cluster such as those that autoshard clusters lists."
        )
    cluster = Cluster.of(options.cluster) if options.strategy is None else Cluster.from_dict(record_of(options.strategy).cluster)
    print(WRITERS[options.write](Job(hosts_of(cluster), cluster.name, program)), end="")
    return 0


def _attempt(program: Sequence[str], places: Sequence[int], options: argparse.Namespace, logs: Sequence[Path]) -> tuple[int, int]:
    """Index and exit code of the first process that fails, after which all are ended; ``(0, 0)`` if none does."""
    address = f"127.0.0.1:{_free_port()}"
    with Job() as job:
        try:
            for index, place in enumerate(places):
                environment = _environment(address, len(places), index, place, options.devices_per_process)
                job.start(index, program, environment, logs[index])
            failure = job.first_failure()
            job.end(signal.SIGTERM)
            return failure
        except Stopped as stop:
            with suppress(Stopped):  # a second one kills
                job.end(stop.number)
            raise


def _announce(restart: int, times: int, left_out: str, logs: Sequence[Path]) -> None:
    """Says on stderr and in the logs that the processes are started again."""
    n = f"{len(logs)} process{'es' * (len(logs) > 1)}"
    line = f"{STARTING}{n} again{left_out}, {restart} of at most {times} times."
    print(line, file=sys.stderr, flush=True)
    for log in logs:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def _program(script: Sequence[str], module: Sequence[str] | None) -> list[str]:
    """What runs in every process, as `rank` takes it: ``["script", path, *arguments]`` or ``["module", name, *arguments]``."""
    found = module if module is not None else script
    if not found:
        raise AutoshardError("a script or -m and a module are run in the processes, got neither. Name one after the options.")
    if module is None and not os.path.isfile(found[0]):
        raise AutoshardError(f"what is run in the processes is a Python file, and {found[0]!r} is none. Check its path.")
    return ["script" if module is None else "module", *found]


def _logs(folder: Path, n: int) -> list[Path]:
    """One file a process; those of an earlier run go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*.log"):
            old.unlink()
    except OSError as error:
        raise AutoshardError(
            f"processes write to files in a folder, and '{folder}' cannot be used: {error.strerror}. Name another."
        ) from None
    return [folder / f"rank-{index}.log" for index in range(n)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _environment(address: str, n: int, index: int, place: int, n_devices: int) -> dict[str, str]:
    """A process's environment: ours with what JAX, and `autoshard.distributed.initialize`, read of it; its devices are by its place."""
    from autoshard.distributed import COORDINATOR, COUNT, INDEX

    return {
        **os.environ,
        COORDINATOR: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # by default JAX would let the whole network in
        COUNT: str(n),
        INDEX: str(index),
        "JAX_NUM_CPU_DEVICES": str(n_devices),
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(place * n_devices + device) for device in range(n_devices)),  # of GPUs
        "PYTHONUNBUFFERED": "1",
    }


def _failure(index: int, code: int, log: Path) -> str:
    """What is said of a process that failed: how, and its last lines."""
    how = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    begun = max((number for number, line in enumerate(lines, 1) if line.startswith(STARTING)), default=0)  # those before are other runs'
    shown = "".join(f"\n  {line}" for line in lines[begun:][-LAST_LINES:])
    last = f"The last lines of {log}:{shown}" if shown else f"It wrote nothing to {log}."
    return f"autoshard launch: rank {index} {how}, and so all processes were ended. {last}"


@contextmanager
def _stopping() -> Iterator[None]:
    """A context in which a signal to end raises `Stopped`."""

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores that of a terminal closed
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Job:
    """Processes, each the leader of a group with those that it starts; none outlives the context, or this process."""

    def __init__(self):
        self._running: dict[int, int] = {}  # their indices, by process number
        self._ended: queue.Queue[tuple[int, int, int]] = queue.Queue()
        self._read, self._write = os.pipe()  # closed at this end, whoever does it, it ends all that watch the other
        self._at_end: set[int] = set()  # the indices of those that have run the script to its end
        notices, self._notify = os.pipe()
        _thread(self._tell, notices)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)
        os.close(self._write)
        os.close(self._read)
        os.close(self._notify)

    def start(self, index: int, program: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Starts a process, which writes to its log, and the first to our own output as well."""
        with log.open("ab", buffering=0) as file:
            process = subprocess.Popen(
                [sys.executable, rank.__file__, str(self._read), str(self._notify), *program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if index == 0 else file,
                stderr=subprocess.STDOUT,
                pass_fds=(self._read, self._notify),
                start_new_session=True,
            )
        self._running[process.pid] = index
        copy = None if process.stdout is None else _thread(_copy, process.stdout, log, sys.stdout)
        _thread(self._wait, index, process, copy)

    def first_failure(self) -> tuple[int, int]:
        """Index and exit code of the first process that fails, minus the signal where one ended it; ``(0, 0)`` if none does.

        A process that a signal ends closes its connections before it can be waited for, so that another may fail of that and end first:
        of those that end within a moment, one that a signal ended is the first.
        """
        first = 0, 0
        with suppress(queue.Empty):
            while self._running:
                index, code = self._next(SAME_MOMENT_SECONDS if first[1] else None)
                first = first if first[1] else (index, code)
                if code < 0:
                    return index, code
        return first

    def end(self, number: int) -> None:
        """Sends a signal to all that run, and kills those that go on; returns when none is left."""
        try:
            self._signal(number)
            deadline = time.monotonic() + GRACE_SECONDS
            with suppress(queue.Empty):
                while self._running:
                    self._next(max(0.0, deadline - time.monotonic()))
        finally:
            self._signal(signal.SIGKILL)
            while self._running:
                self._next()

    def _next(self, seconds: float | None = None) -> tuple[int, int]:
        index, number, code = self._ended.get(timeout=seconds)
        del self._running[number]
        return index, code

    def _signal(self, number: int) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process, number)

    def _tell(self, notices: int) -> None:
        """Says once that a process is at its end and waits for others, which may wait for it."""
        with open(notices, encoding="ascii") as lines:
            for line in lines:
                self._at_end.add(int(line))
                if len(self._at_end) == 1:
                    timer = threading.Timer(WAIT_SECONDS, self._tell_of, (int(line),))
                    timer.daemon = True
                    timer.start()

    def _tell_of(self, index: int) -> None:
        still = set(self._running.copy().values())
        others = sorted(still - self._at_end)
        if index in still and others:
            named = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            print(
                f"autoshard launch: rank {index} has run the script to its end and waits for {named}. If that takes more than five "
                "minutes, JAX ends all with an error. All processes have to make the same calls: look for a break or an exit in one alone.",
                file=sys.stderr,
                flush=True,
            )

    def _wait(self, index: int, process: subprocess.Popen[bytes], copy: threading.Thread | None) -> None:
        """Reports a process's end, once what it had started has ended and what it wrote is shown."""
        code = process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if copy is not None:
            copy.join(GRACE_SECONDS)
        self._ended.put((index, process.pid, code))


def _thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _copy(source: IO[bytes], log: Path, screen: Any) -> None:
    """Copies a process's output, as it comes, to its log and to a stream of ours, as long as somebody reads that."""
    with log.open("ab", buffering=0) as file:
        for chunk in iter(partial(os.read, source.fileno(), CHUNK), b""):
            file.write(chunk)
            with suppress(BrokenPipeError):
                screen.buffer.write(chunk)
                screen.flush()
