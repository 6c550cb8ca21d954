"""Several processes: launched, joined, ended together, and running one strategy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import distributed_program
import jax
import numpy as np
import pytest

from autoshard import distributed
from autoshard.cli import launch, main
from autoshard.errors import AutoshardError

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(distributed_program.__file__)

WAITS = "import os, time\nprint('started', os.getpid())\n"
PROMPTLY = 5.0  # of a launcher whose processes end when they are sent a signal


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """A function that launches a script of some lines in a folder of its own, and returns ``(exit code, stdout, stderr)``."""
    monkeypatch.chdir(tmp_path)

    def call(script, *arguments, n=2):
        (tmp_path / "script.py").write_text(script, encoding="utf-8")
        code = main(["launch", "-n", str(n), "script.py", *arguments])
        return code, *capfd.readouterr()

    return call


def log(index, folder="logs"):
    return Path(folder, f"rank-{index}.log").read_text(encoding="utf-8")


def is_running(number):
    """Whether there is such a process, one that has ended and was not waited for aside."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


# -- launching: scripts without JAX ----------------------------------------------------------------------------------------


def test_each_process_has_its_place_and_its_log(run):
    """Every process is told its index, the others and its devices; the first one's output shows, and all have theirs in a file."""
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_ADDRESS")
    script = f"import os, sys\nprint(*map(os.environ.get, {names}), sys.argv, __name__)\nprint('aside', file=sys.stderr)"
    Path("logs").mkdir()
    Path("logs/rank-7.log").touch()
    code, out, err = run(script, "-n", "5", "--confirm", "a:b", n=3)
    assert code == 0 and out == log(0) and not err and out.endswith("aside\n")
    told = [log(index).split() for index in range(3)]
    assert [each[:4] for each in told] == [["3", str(index), "1", str(index)] for index in range(3)]
    assert {each[4] for each in told} == {told[0][4]}
    assert all("['script.py', '-n', '5', '--confirm', 'a:b'] __main__" in log(index) for index in range(3))
    assert sorted(os.listdir("logs")) == ["rank-0.log", "rank-1.log", "rank-2.log"]


def test_devices_and_logs_as_asked_for(run):
    """``--devices-per-process`` numbers devices process by process, ``--log-dir`` names the folder, ``-m`` runs a module found here."""
    Path("package").mkdir()
    Path("package/__main__.py").write_text("import os, sys\nprint(os.environ['JAX_LOCAL_DEVICE_IDS'], sys.argv[1:])", encoding="utf-8")
    assert main(["launch", "-n", "2", "--devices-per-process", "2", "--log-dir", "there/logs", "-m", "package", "--x", "1"]) == 0
    assert [log(index, "there/logs") for index in range(2)] == ["0,1 ['--x', '1']\n", "2,3 ['--x', '1']\n"]


@pytest.mark.parametrize(
    ("failing", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 failed with exit code 3"),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('no data')", 1, 'script.py", line 7, in <module>'),
        ("os.kill(os.getpid(), 9)", 128 + 9, "rank 1 was ended by SIGKILL"),
    ],
)
def test_a_process_that_fails_ends_all(run, failing, code, words):
    """The command exits as the process that failed did, at once, with its last lines and none of the launcher's own code."""
    both = "while not os.path.getsize('logs/rank-0.log'):\n        time.sleep(0.01)"
    script = f"{WAITS}import sys\nif os.environ['JAX_PROCESS_ID'] == '1':\n    {both}\n    {failing}\ntime.sleep(1000)"
    started = time.monotonic()
    found, _, err = run(script)
    assert found == code and time.monotonic() - started < 2 * PROMPTLY
    assert words in err and "logs/rank-1.log" in err and "  started" in err and "runpy" not in err
    assert not any(is_running(log(index).split()[1]) for index in range(2))


def test_of_two_that_fail_at_once_the_killed_one_is_named(run):
    """A process fails where another's connection closes, which may be told before the kill that closed it."""
    script = "import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '0':\n    sys.exit(1)\ntime.sleep(0.5)\nos.kill(os.getpid(), 9)"
    code, _, err = run(script)
    assert code == 128 + 9 and "rank 1 was ended by SIGKILL" in err and "rank 0" not in err


@pytest.mark.parametrize("others_end", [False, True])
def test_a_process_that_waits_at_its_end_is_named(run, monkeypatch, others_end):
    """Where others still run the script, since they may wait for it; not where all are at their end, or nothing waits."""
    monkeypatch.setattr(launch, "WAIT_SECONDS", 1.0)
    rest = "pass" if others_end else "time.sleep(4)"
    script = f"import atexit, os, time\natexit.register(time.sleep, 2)\nif os.environ['JAX_PROCESS_ID'] == '0':\n    {rest}"
    code, _, err = run(script)
    assert code == 0 and ("rank 1 has run the script to its end and waits for rank 0. If" in err) is not others_end


def test_nothing_outlives_the_launcher(run, monkeypatch):
    """A process that takes no notice of a signal, and one that was started by a process which has ended, are killed."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    deaf = "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script = f"{deaf}{WAITS}if os.environ['JAX_PROCESS_ID'] == '0':\n    time.sleep(1000)\n"
    script += "print(subprocess.Popen(['sleep', '1000']).pid)\ntime.sleep(1)\nsys.exit(2)"
    assert run(script)[0] == 2
    assert len(log(1).split()) == 3 and not any(is_running(number) for number in (log(0).split()[1], *log(1).split()[1:]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all(run, number, request):
    """Ctrl-C, and a scheduler's signal, end every process, and the exit code is the shell's."""
    before = signal.signal(number, lambda *_: None)  # a shell's background jobs ignore Ctrl-C, and so would the launcher
    request.addfinalizer(lambda: signal.signal(number, before))
    threading.Thread(target=lambda: eventually(_all_started) and os.kill(os.getpid(), number), daemon=True).start()
    started = time.monotonic()
    code, _, err = run(f"{WAITS}time.sleep(1000)")
    assert code == 128 + number and number.name in err and time.monotonic() - started < 2 * PROMPTLY
    assert not any(is_running(log(index).split()[1]) for index in range(2))


def _all_started(folder="logs"):
    return all(Path(folder, f"rank-{index}.log").exists() and len(log(index, folder).split()) > 1 for index in range(2))


def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    """Where the launcher itself is killed, and can end nothing, its processes are gone soon after."""
    (tmp_path / "script.py").write_text(f"{WAITS}time.sleep(1000)", encoding="utf-8")
    command = [sys.executable, "-m", "autoshard", "launch", "-n", "2", "script.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    assert eventually(lambda: _all_started(tmp_path / "logs"), 60.0)
    launcher.kill()
    launcher.wait()
    assert eventually(lambda: not any(is_running(log(index, tmp_path / "logs").split()[1]) for index in range(2)))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("-n", "0", "script.py"), "from 1 up"),
        (("-n", "2"), "got neither"),
        (("-n", "2", "-m"), "got neither"),
        (("-n", "2", "nowhere.py"), "nowhere.py"),
        (("script.py", "-n", "2"), "-n"),
        (("-n", "2", "--log-dir", "script.py", "script.py"), "cannot be used"),
    ],
)
def test_what_cannot_be_launched_is_refused(monkeypatch, tmp_path, capsys, argv, words):
    """No processes, no script, one that is not there, and a folder that cannot be one exit with 2 and say so."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    assert main(["launch", *argv]) == 2 and words in capsys.readouterr().err


# -- joining ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """A process in which nothing has been joined, and whose JAX has not started; what would be handed to JAX is returned."""
    given = []
    monkeypatch.setattr(distributed, "_joined", None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(distributed, "_leave_at_once_when_failed", lambda: None)
    for name in (distributed.COORDINATOR, distributed.COUNT, distributed.INDEX, *distributed.UNDETECTED):
        monkeypatch.delenv(name, raising=False)
    return given


def test_what_a_launcher_set_is_what_joins(fresh, monkeypatch):
    """The variables are passed on, and no cluster is looked for besides; a second call does nothing."""
    for name, value in ((distributed.COORDINATOR, "there:1234"), (distributed.COUNT, "4"), (distributed.INDEX, "3")):
        monkeypatch.setenv(name, value)
    found = distributed.initialize(initialization_timeout=9)
    assert fresh == [(("there:1234", 4, 3), {"initialization_timeout": 9, "cluster_detection_method": "deactivate"})]
    assert distributed.initialize() is found and len(fresh) == 1


def test_arguments_go_before_variables(fresh, monkeypatch):
    """What is passed is what JAX gets."""
    monkeypatch.setenv(distributed.COUNT, "4")
    distributed.initialize("here:1", 2, 0)
    assert fresh == [(("here:1", 2, 0), {})]


def test_a_process_on_its_own_is_one(fresh, monkeypatch):
    """Where JAX detects nothing a script runs alone, unless a launcher says that there are more."""

    def nothing(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing)
    assert distributed.initialize() == distributed.Processes(0, 1)
    monkeypatch.setattr(distributed, "_joined", None)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(AutoshardError, match="one of 4 processes by PMI_SIZE"):
        distributed.initialize()
    with pytest.raises(AutoshardError, match="coordinator_address="):
        distributed.initialize(num_processes=2)
    monkeypatch.setenv(distributed.COUNT, "two")
    with pytest.raises(AutoshardError, match="'two' as JAX_NUM_PROCESSES"):
        distributed.initialize()


def test_joining_comes_before_jax_starts(monkeypatch):
    """After JAX has its devices, which are this process's alone, joining is refused with what to do."""
    jax.devices()
    monkeypatch.setattr(distributed, "_joined", None)
    with pytest.raises(AutoshardError, match=r"already running with 8 of cpu.*right after the imports"):
        distributed.initialize()


def test_a_process_that_an_exception_ends_does_not_wait_for_others(tmp_path):
    """It leaves before what was to be done at exit when it joined, as JAX's own wait for the other processes."""
    lines = "import atexit, time\natexit.register(time.sleep, 1000)\nfrom autoshard import distributed\n"
    script = f"{lines}distributed._leave_at_once_when_failed()\nprint('here', end='')\nraise ValueError('no data')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "here") and done.stderr.endswith("ValueError: no data\n")


# -- running: processes with JAX ------------------------------------------------------------------------------------------------


def trained(tmp_path, n, n_devices, code):
    """What each process of the program found, and what was said on stderr."""
    each = ["--devices-per-process", str(n_devices // n), "--log-dir", str(tmp_path)]
    command = [sys.executable, "-m", "autoshard", "launch", "-n", str(n), *each, str(PROGRAM), str(n_devices), str(code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    lines = [next(line for line in log(index, tmp_path).splitlines() if line.startswith("found ")) for index in range(n)]
    assert lines[0] in done.stdout and lines[1] not in done.stdout
    return [json.loads(line.removeprefix("found ")) for line in lines], done.stderr


def check(found, n_devices):
    """Each process has the losses of one process, process 0's strategy, and errors in place of waiting for another."""
    n = len(found)
    assert [each["processes"] for each in found] == [[index, n] for index in range(n)] and all(each["again"] for each in found)
    expected, verified = distributed_program.losses(n_devices), json.loads(json.dumps(distributed_program.verified(n_devices)))
    for each in found:
        np.testing.assert_allclose(each["losses"], expected, rtol=1e-6)
        assert each["agreed"] == found[0]["agreed"] and each["agreed"][0] == {"data": n_devices}
        assert each["verified"] == verified and verified[0]["rows"]
        assert each["timed"] == found[0]["timed"] and not each["timed"][1]
        assert each["out of time"] == found[0]["out of time"] and "the time was over" in each["out of time"][2]
        assert "process 1 traced another than process 0" in each["another program"]
    assert "process 1 failed to" in found[0]["failed in one"] and "cpu:none" in found[1]["failed in one"]


def test_two_processes_train_as_one(tmp_path):
    """Losses and strategies are one process's, and the process that fails afterwards ends the other, whatever it waits for."""
    found, err = trained(tmp_path, 2, 4, 3)
    check(found, 4)
    assert "rank 1 failed with exit code 3" in err


@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path):
    """The same with four processes of two devices, which all end by themselves."""
    found, _ = trained(tmp_path, 4, 8, 0)
    check(found, 8)


LISTENING = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from sockets import descendants, listening
from autoshard import distributed
"""


def test_what_launch_starts_is_reached_from_this_machine_alone(run):
    """The launcher and its processes, one of which is the coordinator, listen on the loopback and on no network."""
    told = "if distributed.initialize().index == 0:\n    print(*listening([os.getppid(), *descendants(os.getppid())]))"
    code, out, err = run(LISTENING + told)
    assert (code, out.split()) == (0, ["127.0.0.1"]), err


def test_a_coordinator_listens_where_it_is_reached():
    """A coordinator listens on the address that its processes were given, rather than on all networks, as JAX has it by default."""
    script = f"{LISTENING}distributed.initialize('localhost:{launch._free_port()}', 1, 0)\nprint(*listening([os.getpid()]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["127.0.0.1"]


def test_a_coordinator_s_name_decides_nothing_where_others_may_read_it_otherwise(monkeypatch):
    """A name of the loopback, a name of several addresses, an unknown one, and an address of another machine leave all networks."""
    known = {"me": ["127.0.0.1"], "two": ["127.0.0.1", "127.0.0.2"], "far": ["192.0.2.1"], "own": ["127.0.0.3"]}

    def addresses(host, port, **_):
        if host not in known:
            raise OSError(host)
        return [(distributed.socket.AF_INET, 1, 6, "", (ip, port)) for ip in known[host]]

    monkeypatch.setattr(distributed.socket, "getaddrinfo", addresses)
    assert [distributed._own_address(f"{host}:1") for host in (*known, "unknown")] == [None] * 5
    monkeypatch.setattr(distributed.ipaddress, "ip_address", lambda ip: distributed.ipaddress.IPv4Address("10.0.0.1"))
    assert distributed._own_address("own:1") == "127.0.0.3:1"
