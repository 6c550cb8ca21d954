"""The checkpoints of a loop: the newest few, complete whenever the program is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import autoshard
from autoshard.checkpoint import Checkpoints
from autoshard.checkpoint.files import writing

sys.path.insert(0, os.path.dirname(__file__))
import saving_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(saving_program.__file__)
X = np.ones((8, 8), np.float32)


@pytest.fixture(scope="module")
def strategy():
    return autoshard.search(saving_program.train_step, saving_program.make_state(), X, cluster="cpu:2", mesh={"data": 2})


def state_at(step, strategy):
    """The state after some steps."""
    state = {"step": np.int32(step), "w": np.full((64, 1024), step, np.float32), "v": np.full(1024, 2.0 * step, np.float32)}
    return strategy.shard(state)[0]


def check(found, step):
    jax.tree.map(np.testing.assert_array_equal, found, {"step": step, "w": np.full((64, 1024), step), "v": np.full(1024, 2.0 * step)})


def test_the_newest_are_kept(tmp_path, strategy):
    """Of the steps that are asked for, with what was saved beside them; a reader sees them as well, and changes nothing."""
    folder = tmp_path / "run"
    with Checkpoints(folder, keep=2, every=10) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.restore(strategy) is None
        assert checkpoints.strategy() is None and checkpoints.extra() is None and not folder.exists()
        written = [checkpoints.save(step, state_at(step, strategy), strategy, extra={"rows": 8 * step}) for step in range(0, 35, 5)]
        assert written == [True, False] * 3 + [True]
        assert not checkpoints.save(31, state_at(31, strategy), strategy)
        assert checkpoints.save(32, state_at(32, strategy), strategy, always=True)
        assert checkpoints.latest() == 32 and checkpoints.extra() is None and checkpoints.extra(30) == {"rows": 240}
        assert sorted(os.listdir(folder)) == ["30", "32"]
    reader = Checkpoints(folder)
    (folder / "31.orbax-checkpoint-tmp").mkdir()
    (folder / "notes").mkdir()
    step, state = reader.restore(strategy)
    assert step == 32 == reader.latest() and reader.strategy() == strategy
    check(state, 32)
    check(reader.restore(step=30)[1], 30)
    with pytest.raises(autoshard.CheckpointError, match="is no checkpoint"):
        reader.restore(step=31)
    assert sorted(os.listdir(folder)) == ["30", "31.orbax-checkpoint-tmp", "32", "notes"]
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(33, state_at(33, strategy), strategy)
    assert sorted(os.listdir(folder)) == ["32", "33", "notes"]


def test_saving_does_not_wait_for_files(tmp_path, strategy, monkeypatch):
    """The call returns while the files are held up, and reading waits for them."""
    released, opened = threading.Event(), Path.write_text
    from etils import epath

    write = epath.Path.write_text
    kind = type(epath.Path(tmp_path))

    def late(self, *args, **options):
        if self.name == "metadata":
            assert released.wait(20)
        return write(self, *args, **options)

    monkeypatch.setattr(kind, "write_text", late, raising=False)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state_at(1, strategy), strategy)
        assert not (tmp_path / "run/1").exists()
        threading.Timer(0.2, released.set).start()
        assert checkpoints.latest() == 1
    assert opened is Path.write_text


def test_what_fails_while_it_is_written_is_said(tmp_path, strategy):
    """By the next call; and a step that is not newer, or no number, at once."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(5, state_at(5, strategy), strategy)
        for step, words in ((5, r"step 5 already, got 5\. Restore"), (4, "step 5 already, got 4"), (-1, "got -1"), (2.0, "got 2.0")):
            with pytest.raises(autoshard.CheckpointError, match=words):
                checkpoints.save(step, state_at(5, strategy), strategy)
    late = Checkpoints(tmp_path / "file")
    (tmp_path / "file").write_text("")
    with pytest.raises(autoshard.CheckpointError, match=r"was not written: .*Check the folder, and the space"):
        late.save(1, state_at(1, strategy), strategy)
    for path in (tmp_path / "file", tmp_path / "file/run"):  # before the steps until the first save
        with pytest.raises(autoshard.CheckpointError, match=r"in a folder of their own, .*file' is a file\. Name another"):
            Checkpoints(path)
    with pytest.raises(autoshard.CheckpointError, match=r"closed by peer\. Another process has ended.*its output says"), writing("run/1"):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    for options in ({"keep": 0}, {"every": True}):
        with pytest.raises(autoshard.CheckpointError, match="is a whole number from 1 up"):
            Checkpoints(tmp_path, **options)


def test_without_a_context_each_save_is_written_at_once(tmp_path, strategy):
    """As after its end: nothing waits for the last one, which a program that ends would cut."""
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, state_at(1, strategy), strategy)
    assert os.listdir(tmp_path / "run") == ["1"]
    with checkpoints:
        checkpoints.save(2, state_at(2, strategy), strategy)
    checkpoints.save(3, state_at(3, strategy), strategy)
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "2", "3"]


def test_mixed_up_arguments_are_refused_in_a_line(tmp_path, strategy):
    """Without the numbers of a state."""
    state = state_at(1, strategy)
    calls = (
        lambda: Checkpoints(tmp_path / "run").save(state, 1, strategy),
        lambda: autoshard.checkpoint.save(state, strategy, tmp_path / "one"),
    )
    for call in calls:
        with pytest.raises(autoshard.CheckpointError) as caught:
            call()
        assert len(str(caught.value)) < 200 and "got {'step'" in str(caught.value) and "Pass" in str(caught.value)


@pytest.fixture
def killed():
    """A function that starts the program in a folder and kills it some time after its first step: the last step that it began to save."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def call(folder: Path, seconds: float) -> int:
            program.stdin.write(f"{folder}\n")
            program.stdin.flush()
            number = step = 0
            for line in program.stdout:  # what was being printed is cut short
                if found := re.match(r"child (\d+)\n", line):
                    number = int(found[1])
                elif found := re.match(r"saving (\d+)\n", line):
                    if not step:
                        threading.Timer(seconds, os.kill, (number, signal.SIGKILL)).start()
                    step = int(found[1])
                if line.endswith("ended\n"):
                    break
            return step

        yield call
        program.stdin.close()


def kills(killed, folder, strategy, n, seed):
    """Kills a program again and again; after each kill its newest checkpoint is whole, and newer than before."""
    draw, newest = random.Random(seed), 0
    for _ in range(n):
        last = killed(folder, draw.uniform(0.0, 0.3))
        reader = Checkpoints(folder)
        if reader.latest() is None:
            assert last <= 2  # the first was still being written
            continue
        step, state = reader.restore(strategy)
        assert max(newest, last - 2) <= step <= last + 1  # one is being written, and waited for before the next
        check(state, step)
        assert reader.extra() == {"step": step}
        newest = step
    assert newest
    Checkpoints(folder, keep=2).save(newest + 5, state_at(newest + 5, strategy), strategy)


def test_a_killed_program_leaves_its_last_complete_checkpoint(killed, tmp_path, strategy):
    """After each of two kills at random moments of programs that save all the time."""
    kills(killed, tmp_path / "run", strategy, 2, 0)


@pytest.mark.slow(minutes=10)
def test_a_hundred_kills(killed, tmp_path, strategy):
    """The same a hundred times."""
    kills(killed, tmp_path / "run", strategy, 100, 1)
