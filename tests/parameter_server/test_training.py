"""Trainings on Ray: equal to one process, also when servers and workers are killed; errors that end them; nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_server_program import (
    OPTIMIZER,
    STEPS,
    TABLE_ROWS,
    WIDTH,
    batches,
    init_params,
    init_rows,
    loss,
    one_process,
    sparse_batches,
    sparse_init,
    sparse_loss,
)

import autoshard
from autoshard.demo import parameter_server as lenet
from autoshard.errors import AutoshardError
from autoshard.parameter_server import Table, rows, train

GRADIENTS = jax.value_and_grad(loss)
TABLE = Table(10, 2, lambda ids: np.zeros((len(ids), 2)), lambda batch: batch, optax.sgd(0.1), cache_rows=5)


def kill(ray, name):
    """Ends the process of an actor as the kernel would when memory runs out."""
    os.kill(ray.get(ray.get_actor(name).process.remote()), signal.SIGKILL)


def kills(ray, at):
    """A function for `on_step` that kills actors, ``{(worker, step): name}``, each once."""
    left = dict(at)

    def on_step(worker, step, _):
        if (worker, step) in left:
            kill(ray, left.pop((worker, step)))

    on_step.left = left
    return on_step


def assert_as_one_process(result, reference):
    params, losses = reference
    np.testing.assert_allclose(result.losses.mean(axis=1), losses, rtol=2e-5)
    for got, wanted in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-6)


@pytest.fixture(scope="module")
def reference():
    return one_process(loss, init_params(), OPTIMIZER, batches, STEPS)


def test_synchronous_training_is_that_of_one_process_when_a_server_and_a_worker_are_killed(ray, reference, tmp_path):
    """A killed server takes all back to the last checkpoint, a killed worker repeats its step: losses and parameters are the same."""
    on_step = kills(ray, {(0, 8): "sync/server-1", (1, 13): "sync/worker-0"})
    result = train(
        GRADIENTS, init_params, OPTIMIZER, batches, steps=STEPS, on_step=on_step, name="sync",
        checkpoint_folder=tmp_path, checkpoint_every=6,
    )  # fmt: skip
    assert not on_step.left and result.rollbacks == 1 and result.authenticated
    assert_as_one_process(result, reference)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2 and not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_a_later_call_continues_from_the_folder(ray, reference, tmp_path):
    """With the losses until then, and without repeated steps; another program is refused."""
    options = {"checkpoint_folder": tmp_path, "checkpoint_every": 6}
    train(GRADIENTS, init_params, OPTIMIZER, batches, steps=STEPS - 4, **options)
    seen = []
    result = train(GRADIENTS, init_params, OPTIMIZER, batches, steps=STEPS, on_step=lambda *step: seen.append(step[:2]), **options)
    assert seen == [(worker, step) for step in range(STEPS - 4, STEPS) for worker in range(2)]
    assert_as_one_process(result, reference)
    with pytest.raises(AutoshardError, match=r"as many workers and servers.*2 and 2; got 1 and 2"):
        train(GRADIENTS, init_params, OPTIMIZER, batches, steps=STEPS, workers=1, **options)
    with pytest.raises(AutoshardError, match=r"continues up to steps=3, and .* is after 24"):
        train(GRADIENTS, init_params, OPTIMIZER, batches, steps=3, **options)
    with pytest.raises(AutoshardError, match=r"continues the training that wrote it.*differs in 'state/"):
        train(GRADIENTS, init_params, optax.sgd(1e-2), batches, steps=STEPS, **options)


@pytest.mark.slow
def test_without_checkpoints_a_killed_server_starts_all_over(ray, reference):
    """Given parameters, one worker and one server: the same losses as ever."""
    on_step = kills(ray, {(0, 5): "over/server-0"})
    result = train(GRADIENTS, init_params(), OPTIMIZER, batches, steps=STEPS, workers=1, servers=1, on_step=on_step, name="over")
    assert result.rollbacks == 1 and not on_step.left
    assert_as_one_process(result, reference)


class Clocks:
    """How far workers are, as `on_step` is told, and the most that one was ahead of another when it ended a step."""

    def __init__(self, workers):
        self.done, self.most = [0] * workers, 0

    def __call__(self, worker, step, _):
        if step < self.done[worker]:  # all went back to a checkpoint, in which the others are not further than the bound allows
            self.done = [min(done, step + 3) for done in self.done]
        self.done[worker] = step + 1
        self.most = max(self.most, max(self.done) - min(self.done))


@pytest.mark.slow
def test_lenet_reaches_the_accuracy_of_one_process_asynchronously(ray):
    """Also where one worker is slow: the other stays within the bound. Flax NNX's trees, and functions that workers import by name."""

    def slow(worker, workers, step):
        time.sleep(0.05 * worker)
        return lenet.batches(worker, workers, step)

    clocks = Clocks(2)
    result = train(
        jax.value_and_grad(lenet.loss), lenet.init_params, lenet.OPTIMIZER, slow, steps=60, servers=1, mode="asynchronous",
        max_staleness=2, on_step=clocks,
    )  # fmt: skip
    assert clocks.done == [60, 60] and clocks.most == 3  # two ahead at most when a step starts
    assert lenet.accuracy(result.params) > max(0.8, lenet.accuracy(lenet.one_process(60)[0]) - 0.05)


@pytest.mark.slow
def test_lenet_reaches_the_accuracy_of_one_process_synchronously(ray):
    """And has its losses."""
    params, losses = lenet.one_process()
    result = train(jax.value_and_grad(lenet.loss), lenet.init_params, lenet.OPTIMIZER, lenet.batches, steps=lenet.STEPS)
    np.testing.assert_allclose(result.losses.mean(axis=1)[:20], losses[:20], rtol=1e-2)
    assert abs(lenet.accuracy(result.params) - lenet.accuracy(params)) < 0.02


@pytest.mark.slow
def test_asynchronous_workers_stay_within_the_bound_when_processes_are_killed(ray, reference, tmp_path):
    """All steps of all workers are in the parameters in the end."""
    clocks, killing = Clocks(2), kills(ray, {(0, 9): "async/server-0", (1, 15): "async/worker-1"})

    def slow(worker, workers, step):
        time.sleep(0.05 * worker)
        return batches(worker, workers, step)

    def on_step(*told):
        clocks(*told)
        killing(*told)

    result = train(
        GRADIENTS, init_params, OPTIMIZER, slow, steps=STEPS, mode="asynchronous", max_staleness=2, on_step=on_step, name="async",
        checkpoint_folder=tmp_path, checkpoint_every=4,
    )  # fmt: skip
    assert result.rollbacks == 1 and not killing.left
    assert clocks.done == [STEPS, STEPS] and clocks.most == 3 and np.isfinite(result.losses).all()
    assert result.losses[-4:].mean() < reference[1][:4].mean() / 2
    saved = np.load(max(tmp_path.glob("checkpoint-*")) / "scheduler.npz")
    assert saved["clocks"].tolist() == [STEPS, STEPS] and saved["updates"] == 2 * STEPS


def train_table(tmp_path, peaks, **options):
    """The result of a training whose workers write the peaks of their memory, in KiB, to files in a folder."""
    peaks.mkdir()

    def measured(worker, workers, step):
        with (peaks / f"{os.getpid()}").open("a") as file:
            file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")
        return sparse_batches(worker, workers, step)

    table = Table(TABLE_ROWS, WIDTH, init_rows, lambda batch: batch["ids"], optax.adagrad(0.05), cache_rows=1000)
    return train(
        jax.value_and_grad(sparse_loss, argnums=(0, 1)), sparse_init, optax.sgd(1e-3), measured, steps=STEPS, tables={"words": table},
        checkpoint_folder=tmp_path / "checkpoints", checkpoint_every=5, **options,
    )  # fmt: skip


def assert_no_worker_held_the_table(peaks, processes):
    grown = [int(lines[-1]) - int(lines[1]) for lines in (file.read_text().split() for file in peaks.iterdir())]
    assert len(grown) == processes and max(grown) * 1024 < TABLE_ROWS * WIDTH * 4 / 2


def assert_trained_as_a_whole(result, tmp_path):
    """Equal to training of the whole table in one process."""

    def dense(params, batch):
        return sparse_loss(params["dense"], {"words": params["words"][batch["ids"]]}, batch)

    optimizers = {"dense": optax.sgd(1e-3), "words": optax.adagrad(0.05)}
    first = init_rows(np.arange(TABLE_ROWS))
    optimizer = optax.multi_transform(optimizers, {"dense": "dense", "words": "words"})
    params, losses = one_process(dense, {"dense": sparse_init(), "words": jnp.asarray(first)}, optimizer, sparse_batches, STEPS)
    np.testing.assert_allclose(result.losses.mean(axis=1), losses, rtol=1e-3)
    np.testing.assert_allclose(result.params["w"], params["dense"]["w"], rtol=1e-3, atol=1e-5)
    trained = rows(tmp_path / "checkpoints", "words", np.arange(TABLE_ROWS).reshape(-1, 10)).reshape(TABLE_ROWS, WIDTH)
    np.testing.assert_allclose(trained, params["words"], rtol=1e-3, atol=1e-4)
    assert np.abs(trained - first).max() > 0.05


@pytest.mark.slow
def test_a_table_larger_than_a_workers_memory(ray, tmp_path):
    """Rows are pulled by id into a cache of 1,000 of 100,000 rows: training is that of the whole table in one process, and no worker's
    memory grows by half the table."""
    result = train_table(tmp_path, tmp_path / "peaks", workers=1)
    assert_trained_as_a_whole(result, tmp_path)
    use = result.caches[0]["words"]
    assert use.hits > STEPS and use.evictions > 0 and use.most_rows == 1000 and use.misses > 400 * STEPS
    assert_no_worker_held_the_table(tmp_path / "peaks", processes=1)


@pytest.mark.slow
def test_a_table_when_a_server_and_a_worker_are_killed(ray, tmp_path):
    """Training is still that of the whole table."""
    on_step = kills(ray, {(0, 7): "table/server-1", (0, 14): "table/worker-1"})
    result = train_table(tmp_path, tmp_path / "peaks", on_step=on_step, name="table")
    assert result.rollbacks == 1 and not on_step.left
    assert_trained_as_a_whole(result, tmp_path)
    assert_no_worker_held_the_table(tmp_path / "peaks", processes=3)


@pytest.mark.slow
def test_asynchronous_caches_answer_within_the_bound(ray, tmp_path):
    """Rows that come again are read from the cache for `max_staleness` steps."""
    result = train_table(tmp_path, tmp_path / "peaks", mode="asynchronous", max_staleness=3)
    assert all(use["words"].hits > 8 * STEPS for use in result.caches)
    assert result.losses[-3:].mean() < result.losses[:3].mean() / 2


# -- trainings that end with an error --------------------------------------------------------------------------------------


def raises(worker, workers, step):
    if worker == 1 and step == 3:
        raise ValueError("no such file")
    return batches(worker, workers, step)


def hangs(worker, workers, step):
    if worker == 1 and step == 2:
        threading.Event().wait(60)
    return batches(worker, workers, step)


def dies(worker, workers, step):
    if step == 2:
        os._exit(1)
    return batches(worker, workers, step)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batches": raises}, r"and step 3 of worker 1 ended with ValueError: no such file"),
        pytest.param({"batches": hangs, "timeout_seconds": 20}, r"timeout_seconds=20.*not: .*step 2 of worker 1", marks=pytest.mark.slow),
        pytest.param({"batches": dies, "max_restarts": 0}, r"max_restarts=0 times, and worker \d is lost for good", marks=pytest.mark.slow),
        pytest.param({"gradients_fn": lambda p, b: (loss(p, b), p["a"])}, r"structured as what they are for", marks=pytest.mark.slow),
    ],
    ids=["raises", "hangs", "dies", "structure"],
)
def test_a_training_that_cannot_go_on_ends_with_one_error(ray, change, match):
    """It names what failed, and nothing hangs."""
    given = {"gradients_fn": GRADIENTS, "init_params": init_params, "optimizer": OPTIMIZER, "batches": batches, "servers": 1} | change
    with pytest.raises(AutoshardError, match=match):
        train(**given, steps=STEPS)


@pytest.mark.slow
def test_a_server_that_dies_for_good_ends_the_training(ray):
    """With no restarts left there is one error, not a hang."""
    on_step = kills(ray, {(0, 3): "gone/server-1"})
    with pytest.raises(AutoshardError, match=r"server 1 is lost for good"):
        train(GRADIENTS, init_params, OPTIMIZER, batches, steps=STEPS, workers=1, max_restarts=0, name="gone", on_step=on_step)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "eventual"}, "mode is one of 'synchronous', 'asynchronous'; got 'eventual'"),
        ({"max_staleness": 1}, "max_staleness, at least 0, is for mode='asynchronous'"),
        ({"mode": "asynchronous", "max_staleness": -1}, "at least 0"),
        ({"workers": 0}, "workers is a whole number and at least 1; got 0"),
        ({"servers": 1.5}, "servers is a whole number and at least 1; got 1.5"),
        ({"tables": {"t": TABLE}}, "no checkpoint_folder"),
        ({"tables": {"t": 3}, "checkpoint_folder": "t"}, r"tables are by name, each .*Table; got \{'t': 3\}"),
        ({"tables": [TABLE]}, "tables are by name"),
        ({"gradients_fn": 3}, "gradients_fn is a function; got 3"),
        ({"batches": [1]}, r"batches is a function; got \[1\]"),
        ({"on_step": 3}, "on_step is a function; got 3"),
        ({"optimizer": 3}, r"optimizer is one of Optax.*got 3"),
    ],
)
def test_options_out_of_range(options, match):
    """Each is refused before Ray starts."""
    with pytest.raises(AutoshardError, match=match):
        train(**{"gradients_fn": GRADIENTS, "init_params": init_params, "optimizer": OPTIMIZER, "batches": batches, "steps": 1} | options)


def test_options_that_ray_refuses(ray):
    """Ray's own words come as the one error of a training."""
    with pytest.raises(AutoshardError, match=r"worker_options are those of ray\.remote.*nope"):
        train(GRADIENTS, init_params, OPTIMIZER, batches, steps=1, worker_options={"nope": 1})


def test_what_cannot_be_sent_is_named(ray):
    """A lock in a closure is the reason that Ray gives."""
    lock = threading.Lock()

    def locked(worker, workers, step):
        with lock:
            return batches(worker, workers, step)

    with pytest.raises(AutoshardError, match=r"servers and workers are sent gradients_fn.*lock"):
        train(GRADIENTS, init_params, OPTIMIZER, locked, steps=1)


def test_without_ray_the_error_says_how_to_get_it(monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AutoshardError, match=r"pip install 'autoshard\[ray\]'"):
        train(GRADIENTS, init_params, OPTIMIZER, batches, steps=1)


@pytest.mark.slow
def test_the_script_of_the_document(tmp_path):
    """Functions of the script itself are sent by value, Ray starts and ends with each call, sends no statistics, and leaves no process."""
    document = Path(autoshard.__file__).parents[1] / "docs" / "parameter_server.md"
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    checks = "import os\nassert os.environ['RAY_USAGE_STATS_ENABLED'] == '0'\n"
    (tmp_path / "script.py").write_text("\n".join([*blocks, checks]), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_USAGE_STATS_ENABLED"}
    environment |= {"PYTHONPATH": str(document.parents[1]), "AUTOSHARD_TEST": str(tmp_path)}
    run = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    fit, table, shape = run.stdout.splitlines()[-3:]
    assert float(fit.split()[0]) < 0.5 and float(table.split()[0]) < 0.3 and shape == "(3, 64)"
    assert "os.fork" not in run.stderr
    time.sleep(1)
    started = f"AUTOSHARD_TEST={tmp_path}".encode()
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if is_readable(path) and started in path.read_bytes()]


def is_readable(path):
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
