"""Training that is started again: with as many processes and devices, with fewer of both, and with more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import resuming_program

from autoshard.checkpoint import Checkpoints
from autoshard.cli import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def truth():
    """The losses of twelve steps, and the last state, without autoshard."""
    step, state, losses = jax.jit(resuming_program.train_step), resuming_program.make_state(jax.random.key(0)), []
    for number in range(12):
        state, loss = step(state, resuming_program.batch_of(number))
        losses.append(float(loss))
    return losses, state


def check_state(folder, truth):
    """The newest checkpoint, restored in this process, is the last state."""
    step, state = Checkpoints(folder).restore(like=jax.eval_shape(resuming_program.make_state, jax.random.key(0)))
    assert step == 12 == int(state["step"])
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(truth[1]["key"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state["params"], truth[1]["params"])


@pytest.mark.slow
def test_fewer_devices_go_on_with_a_strategy_of_their_own(tmp_path, truth):
    """8, then 6, then 4 devices: each a search that starts from the strategy before, and the losses of one device."""
    losses = []
    for n, until in ((8, 4), (6, 8), (4, 12)):
        begun, found, strategy = resuming_program.train(tmp_path / "run", n, until)
        assert begun == len(losses) and np.prod(list(strategy.mesh_shape.values())) == n
        losses += found
    np.testing.assert_allclose(losses, truth[0], rtol=1e-4)
    check_state(tmp_path / "run", truth)


def launched(tmp_path, *options, kills=()):
    """The exit code, what was said, and what each rank that came to the end found."""
    script = [str(ROOT / "tests/resuming_program.py"), str(tmp_path / "run"), "12", json.dumps(kills)]
    log = ["--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "autoshard", "launch", *log, *options, *script]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=500)
    logs = [log.read_text() for log in sorted((tmp_path / "logs").glob("rank-*.log"))]
    lines = [line for log in logs for line in log.splitlines() if line.startswith("found ")]
    return done.returncode, done.stderr, [json.loads(line.removeprefix("found ")) for line in lines]


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path, truth):
    """Two processes go on from one process's checkpoint; one is killed, and both from their own; then one process from theirs."""
    assert resuming_program.train(tmp_path / "run", 2, 4)[0] == 0
    code, said, found = launched(tmp_path, "-n", "2", "--resume", kills=[(2, 1, 7, 1)])
    assert code == 0 and "rank 1 was ended by SIGKILL" in said and "starting 2 processes again, 1 of at most 3 times." in said
    assert [each["begun"] for each in found] == [6, 6] and [each["newest"] for each in found] == [12, 12]
    for each in found:
        np.testing.assert_allclose(each["losses"], truth[0][6:], rtol=1e-4)
    check_state(tmp_path / "run", truth)
    assert Checkpoints(tmp_path / "run").extra() == {"rows": 288}


@pytest.mark.slow(minutes=2)
def test_ranks_that_fail_again_and_again_are_left_out(tmp_path, truth):
    """Of four processes with two devices each, first one is, then another: 8, 6 and 4 devices train to the same losses."""
    code, said, found = launched(
        tmp_path, "-n", "4", "--devices-per-process", "2", "--resume", "9", "--min-processes", "2", kills=[(4, 3, 3, 2), (3, 2, 7, 2)]
    )
    assert code == 0 and "starting 3 processes again without the last rank 3, which failed twice in a row, 2 of at most 9 times." in said
    assert "starting 2 processes again without the last rank 2" in said
    assert [np.prod(list(each["mesh"].values())) for each in found] == [4, 4]
    np.testing.assert_allclose(found[0]["losses"], truth[0][found[0]["begun"] :], rtol=1e-4)
    check_state(tmp_path / "run", truth)


# -- the launcher, with scripts without JAX -----------------------------------------------------------------------------------

COUNTS = """
import os, sys, time
rank, place = os.environ["JAX_PROCESS_ID"], os.environ["JAX_LOCAL_DEVICE_IDS"]
with open(f"runs-{rank}", "a") as file:
    print(os.environ["JAX_NUM_PROCESSES"], place, file=file)
n = len(open(f"runs-{rank}").readlines())
print("run", n, sys.argv[1:])
"""


@pytest.fixture
def launch(monkeypatch, tmp_path, capfd):
    """A function that launches a script that counts its runs and goes on with some lines: ``(exit code, stderr)``."""
    monkeypatch.chdir(tmp_path)

    def call(lines, *options):
        Path("script.py").write_text(COUNTS + lines, encoding="utf-8")
        return main(["launch", *options, "script.py", "--resume"]), capfd.readouterr().err

    return call


def test_processes_are_started_again_so_many_times(launch):
    """The exit code is the last run's; logs go on; the script's own options are left alone."""
    code, said = launch("if rank == '1' and n < 3: sys.exit(7)", "-n", "2", "--resume", "2")
    assert code == 0 and "1 of at most 2 times" in said and "2 of at most 2 times" in said and "rank 1 failed with exit code 7" in said
    text = Path("logs/rank-1.log").read_text()
    assert [line for line in text.splitlines() if line.startswith("run")] == [f"run {n} ['--resume']" for n in (1, 2, 3)]
    assert text.count("autoshard launch: starting 2 processes again") == 2
    code, said = launch("sys.exit(7)", "-n", "1", "--resume", "1")
    assert code == 7 and said.count("failed with exit code 7") == 2 and said.count("\nautoshard launch: starting") == 1
    assert launch("sys.exit(7)", "-n", "1")[1].count("failed") == 1
    lines = "if not os.path.exists('first'):\n    open('first', 'w').close()\n    sys.exit('early')\nos.kill(os.getpid(), 9)"
    _, said = launch(lines, "-n", "1", "--resume", "1")
    assert said.count("early") == 1 and said.index("early") < said.index("again")  # the last lines are of the run that failed


def test_a_place_that_fails_twice_in_a_row_is_left_out(launch):
    """With its devices, down to the least number of processes; a failure elsewhere in between starts the count anew."""
    code, _ = launch("if place == '1': sys.exit(7)\ntime.sleep(3)", "-n", "3", "--resume", "--min-processes", "2")
    assert code == 0 and Path("runs-1").read_text().split("\n")[:3] == ["3 1", "3 1", "2 2"]
    Path("runs-0").unlink(), Path("runs-1").unlink()
    lines = "while not all(os.path.exists(f'runs-{k}') and len(open(f'runs-{k}').readlines()) >= n for k in '01'): time.sleep(0.01)\n"
    lines += "if rank == str(n % 2): sys.exit(7)\ntime.sleep(9)"
    assert launch(lines, "-n", "2", "--resume", "2", "--min-processes", "1")[0] == 7
    assert Path("runs-1").read_text().split("\n")[:3] == ["2 1"] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--resume", "0"), "from 1 up"),
        (("--min-processes", "1"), "without --resume"),
        (("--resume", "--min-processes", "3"), "1 to 2; got 3"),
    ],
)
def test_what_cannot_be_resumed_is_refused(launch, options, words):
    """No times, and a least number of processes without restarts or above their number."""
    code, said = launch("", "-n", "2", *options)
    assert code == 2 and words in said
