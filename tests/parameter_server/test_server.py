"""Servers and their files, without Ray: what is restored, and what is refused."""

from __future__ import annotations

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import AutoshardError
from autoshard.parameter_server import checkpoints
from autoshard.parameter_server.partition import partition
from autoshard.parameter_server.server import Program, Pushed, Server, ServerLost
from autoshard.parameter_server.sparse import Table
from autoshard.parameter_server.worker import Worker


def init():
    return {"w": jnp.ones((4, 2), jnp.bfloat16), "b": jnp.arange(3.0)}


def program(optimizer=None, tables=True, make=init, ids=lambda batch: batch["ids"]):
    optimizer = optimizer or optax.adam(0.1)
    table = Table(10, 2, lambda ids: np.ones((len(ids), 2)), ids, optax.adagrad(0.1), 5)
    params = jax.eval_shape(make)
    return Program(
        None, params, make, optimizer, None, {"t": table} if tables else {}, partition(optimizer, params, 1), workers=1, max_staleness=0
    )


def pushed(step):
    leaves = [np.full((3,), step, np.float32), np.full((4, 2), step, jnp.bfloat16)]
    return Pushed(leaves, {"t": (np.array([1, 4]), np.full((2, 2), step, np.float32))})


def started(checkpoint=None, updates=0, **change):
    server = Server(program(**change), 0)
    server.start(checkpoint, updates, None)
    return server


def test_a_restored_server_goes_on_as_if_nothing_had_been(tmp_path):
    """Bit for bit, with bfloat16 parameters, the optimizer's state, and tables with state and versions."""
    server = started()
    for step in range(3):
        server.push(step, pushed(step))
    server.save(tmp_path / "c", 3)
    again = started(tmp_path / "c", 3)
    for each in (server, again):
        each.push(3, pushed(3))
    wanted, got = server._arrays(), again._arrays()
    assert wanted.keys() == got.keys() and len(got) == 2 + 5 + 3
    for name in wanted:
        assert np.asarray(got[name]).dtype == np.asarray(wanted[name]).dtype
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(wanted[name]), err_msg=name)
    assert again.rows(4, "t", np.array([1, 2]), np.array([3, 0]))[0].tolist() == [0]


def test_a_server_without_its_state_says_so():
    """One that was restarted, or that has had other updates than it is asked about, answers nothing."""
    server = Server(program(), 0)
    with pytest.raises(ServerLost):
        server.pull(0)
    server.start(None, 0, None)
    server.push(0, pushed(1))
    for call in (lambda: server.pull(0), lambda: server.push(0, pushed(1)), lambda: server.rows(0, "t", np.array([1]), np.array([0]))):
        with pytest.raises(ServerLost):
            call()
    assert len(server.pull(1)) == 2 and server.rows(None, "t", np.array([1]), np.array([0]))[0].tolist() == [0]


def damage(path, how):
    data = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "text":
            path.write_text("not an archive")
        case "pickle":
            path.write_bytes(pickle.dumps({"a": 1}))
        case "objects":
            np.savez(path, **{"table/t": np.array([{"a": 1}], object)}, allow_pickle=True)
        case "flipped":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes(255 - byte for byte in data[middle : middle + 64]) + data[middle + 64 :])


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "text", "pickle", "objects", "flipped"])
def test_a_damaged_file_is_refused(tmp_path, how):
    """In one paragraph that says what to do, whatever is wrong with it, and nothing in it is run."""
    started().save(tmp_path / "c", 0)
    damage(checkpoints.server_file(tmp_path / "c", 0), how)
    with pytest.raises(AutoshardError, match=r"^training continues from the files of a checkpoint.*Remove 'c'") as error:
        started(tmp_path / "c", 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"optimizer": optax.sgd(0.1)}, "state/0"),
        ({"tables": False}, "table/t"),
        ({"make": lambda: {**init(), "b": jnp.zeros(4)}}, "parameter['b']"),
        ({"make": lambda: {**init(), "b": jnp.zeros(3, jnp.int32)}}, "parameter['b']"),
    ],
)
def test_the_file_of_another_program_is_refused(tmp_path, change, differs):
    """With the first names that differ."""
    started().save(tmp_path / "c", 0)
    with pytest.raises(AutoshardError, match="continues the training that wrote it.*differs in .*" + re.escape(differs)):
        started(tmp_path / "c", 0, **change)


def test_complete_checkpoints_are_those_whose_last_file_is_there(tmp_path):
    """Others are not seen, and all but the last two complete ones are removed."""
    for updates in (3, 20, 100, 7):
        started().save(checkpoints.folder_of(tmp_path, updates), 0)
        if updates != 100:
            checkpoints.write(checkpoints.scheduler_file(checkpoints.folder_of(tmp_path, updates)), {"servers": np.array(1)})
    assert [path.name[-3:] for path in checkpoints.complete(tmp_path)] == ["003", "007", "020"]
    checkpoints.prune(tmp_path)
    assert sorted(path.name[-3:] for path in tmp_path.iterdir()) == ["007", "020", "100"]
    assert checkpoints.rows(tmp_path, "t", np.array([[1, 2], [9, 0]])).shape == (2, 2, 2)
    with pytest.raises(AutoshardError, match=r"it has no 'x'\. Its tables: t"):
        checkpoints.rows(tmp_path, "x", np.array([1]))
    for wrong in (10, -1):
        with pytest.raises(AutoshardError, match="ids count the rows"):
            checkpoints.rows(tmp_path, "t", np.array([0, wrong]))
    checkpoints.write(checkpoints.scheduler_file(checkpoints.folder_of(tmp_path, 20)), {"other": np.array(1)})
    with pytest.raises(AutoshardError, match=r"cannot be read: .*servers"):
        checkpoints.rows(tmp_path, "t", np.array([0]))
    with pytest.raises(AutoshardError, match="has none"):
        checkpoints.rows(tmp_path / "nowhere", "t", np.array([0]))


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """A process that ends while it writes leaves only a partial file under another name."""
    path = tmp_path / "server-0.npz"
    checkpoints.write(path, {"a": np.ones(3)})

    def half(file, **_):
        file.write(b"PK")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.write(path, {"a": np.zeros(3)})
    assert checkpoints.read(path)["a"].tolist() == [1, 1, 1]


# -- the worker's checks ---------------------------------------------------------------------------------------------------


def worker(gradients_fn, **change):
    whole = dataclasses.replace(program(tables=False), gradients_fn=gradients_fn, batches=lambda worker, workers, step: np.float32(step))
    return Worker(dataclasses.replace(whole, **change), 0, [])


def test_a_worker_returns_its_loss_and_what_each_server_gets():
    """Leaves in the order of the server's part."""
    loss, push = worker(lambda params, batch: (batch * 2, params)).gradients(3, 0, started(tables=False).pull(0), None)
    assert loss == 6 and push.leaves[0].tolist() == [0, 1, 2] and push.leaves[1].shape == (4, 2) and push.rows == {}


@pytest.mark.parametrize(
    ("gradients_fn", "match"),
    [
        (lambda params, batch: (batch, params["b"]), "structured as what they are for"),
        (lambda params, batch: (batch, {**params, "b": params["b"][:2]}), r"at \['b'\] float32\[3\] was wanted, and got float32\[2\]"),
        (lambda params, batch: (batch, {**params, "w": params["w"].astype("float32")}), r"at \['w'\] bfloat16"),
        (lambda params, batch: (params["b"], params), r"a scalar loss first, and it has shape \(3,\)"),
    ],
)
def test_gradients_of_another_form_are_refused(gradients_fn, match):
    """With the place, and what was wanted."""
    with pytest.raises(AutoshardError, match=match):
        worker(gradients_fn).gradients(0, 0, started(tables=False).pull(0))


@pytest.mark.parametrize(("ids", "match"), [([1.5], "got float64"), ([3, 10], "from 0 to 9; got int64 from 3 to 10"), ([-1], "from -1")])
def test_ids_out_of_range_are_refused(ids, match):
    """They would be those of other rows."""
    tables = program(ids=lambda batch: np.array(ids)).tables
    with pytest.raises(AutoshardError, match=match):
        worker(lambda params, rows, batch: batch, tables=tables).gradients(0, 0)
