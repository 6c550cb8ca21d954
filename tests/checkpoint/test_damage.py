"""Damaged and hostile checkpoints: equal arrays or one clear error, whatever was done to a file."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import checkpoint
from autoshard.checkpoint.contents import MAX_BYTES

LIMIT = 2**31  # bytes of memory, beyond what is held already, that a refusal may touch


def make_state():
    """Of arrays that Orbax stores inline, and of one that has chunks of its own."""
    noise = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    return {"b": jnp.ones(8, jnp.bfloat16), "n": jnp.int32(3), "w": jnp.asarray(noise)}


def train_step(state, x):
    return {"b": state["b"] * 2, "n": state["n"] + 1, "w": state["w"] + (x @ state["w"]).sum()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A strategy, a state, and its checkpoint."""
    x = np.ones((8, 64), np.float32)
    strategy = autoshard.search(train_step, make_state(), x, cluster="cpu:2", mesh={"data": 2}, searcher="fully_sharded")
    state, path = strategy.init(make_state), tmp_path_factory.mktemp("checkpoints") / "one"
    checkpoint.save(path, state, strategy, extra={"epoch": 3})
    return strategy, jax.tree.map(np.asarray, state), path


@pytest.fixture
def copied(saved, tmp_path):
    """A function that copies the checkpoint, does something to the copy, and tells what became of it: "equal", or the error."""

    def outcome(change, strategy=saved[0]):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(saved[2], tmp_path / "c")
        change(tmp_path / "c")
        try:
            found = checkpoint.restore(tmp_path / "c", strategy)
        except autoshard.CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000 and "Restore another checkpoint." in str(error)
            return str(error)
        jax.tree.map(np.testing.assert_array_equal, found, saved[1])
        return "equal"

    return outcome


def files(path):
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


def damages(data: bytes, seed: int, flips: int):
    """What may become of a file: it is gone, cut, of zeros, or some bit is flipped."""
    yield from (None, b"", data[: len(data) // 2], data[:-1], bytes(len(data)), data + b"more")
    for place in random.Random(seed).sample(range(len(data)), min(flips, len(data))):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def damage(copied, saved, flips):
    """The outcomes for each file, by its folder."""
    found: dict[str, set[str]] = {}
    for number, file in enumerate(files(saved[2])):
        for data in damages((saved[2] / file).read_bytes(), number, flips):
            change = (lambda path: (path / file).unlink()) if data is None else (lambda path: (path / file).write_bytes(data))  # noqa: B023
            found.setdefault("/".join(file.parts[:-1]) + "/" * (len(file.parts) > 1), set()).add(copied(change))
    return found


def test_a_damaged_file_is_refused_or_does_not_matter(copied, saved, capfd):
    """Of each file of a checkpoint: deleted, cut, zeroed, longer, a bit flipped; nothing besides the error is printed."""
    found = damage(copied, saved, 2)
    refused = {folder for folder, outcomes in found.items() if outcomes != {"equal"}}
    assert refused >= {"autoshard/", "state/", "state/d/", "state/ocdbt.process_0/d/"}
    assert any("is not the array that was saved" in text for text in found["state/ocdbt.process_0/d/"])
    assert not capfd.readouterr().err


@pytest.mark.slow(minutes=10)
def test_damage_of_many_bits(copied, saved):
    """The same with hundreds of flips a file."""
    damage(copied, saved, 300)


def test_what_is_no_checkpoint_is_refused(tmp_path, saved):
    """A folder that is not there, an empty one, Orbax's own, a file; and what is no path."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "nowhere", tmp_path / "empty", tmp_path / "file", saved[2] / "state"):
        with pytest.raises(autoshard.CheckpointError, match=r"is no checkpoint that autoshard.checkpoint saved, or an incomplete one"):
            checkpoint.restore(path)
    with pytest.raises(autoshard.CheckpointError, match="given by its path; got 3"):
        checkpoint.strategy(3)


# -- hostile ones ---------------------------------------------------------------------------------------------------------


def rewritten(change):
    """A change of a checkpoint's document, whose digest then is right again."""

    def apply(path: Path):
        file = path / "autoshard" / "metadata"
        document = json.loads(file.read_text())
        change(document)
        document.pop("digest")
        document["digest"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        file.write_text(json.dumps(document))

    return apply


def huge(document):
    document["strategy"] = document["strategy"].replace("[64, 128]", "[4611686018427387904, 128]")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document.update(autoshard_checkpoint=2), "at autoshard_checkpoint: expected a whole number from 1 to 1, got 2"),
        (lambda document: document.update(arguments=[1, 0]), "at arguments: expected one argument, or the first few"),
        (lambda document: document.update(arguments=[0, 9]), "from 0 to 2, got 9"),
        (lambda document: document.update(checksums=document["checksums"][:-1]), "at checksums: expected a list of 3, got a list of 2"),
        (lambda document: document.update(weak=[3]), "from 0 to 2, got 3"),
        (lambda document: document.update(strategy={}), "at strategy: expected a string"),
        (lambda document: document.update(strategy="{}"), "at schema: expected schema 4"),
        (lambda document: document.update(more=1), "with no other names"),
        (lambda document: document["checksums"].reverse(), "is not the array that was saved, nor are 1 more"),
    ],
)
def test_a_document_of_the_wrong_form_is_refused(copied, change, words):
    """With the place in it, although its digest is right."""
    assert words in copied(rewritten(change))


def test_a_changed_number_is_seen(copied):
    """One that would pass for another, in the strategy or in what was saved beside it."""
    for old, new in (('"epoch": 3', '"epoch": 4'), ("train_step", "train_stop")):
        file = "autoshard/metadata"
        assert "something was changed" in copied(lambda path: (path / file).write_text((path / file).read_text().replace(old, new)))  # noqa: B023


def limited(call):
    """What a function returns that may use little more memory than is in use."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + LIMIT, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_huge_shapes_allocate_nothing(copied, saved, tmp_path):
    """Neither those of the document, refused by the memory there is, nor those of Orbax's arrays, which have to be the strategy's."""
    shutil.copytree(saved[2], tmp_path / "huge")
    rewritten(huge)(tmp_path / "huge")
    with pytest.raises(autoshard.CheckpointError, match="by its shapes it takes"):
        limited(lambda: checkpoint.restore(tmp_path / "huge"))
    for metadata in ({"shape": [2**45, 128]}, {"chunks": [2**45, 128]}, {"shape": [2**31, 128], "chunks": [2**31, 128]}):
        found = limited(lambda metadata=metadata: copied(lambda path: forged(path, metadata)))
        assert "its arrays cannot be read" in found, found


def forged(path: Path, changed: dict):
    """Other metadata of an array in Orbax's database, whose own checksums are right."""
    import tensorstore

    base = {"driver": "file", "path": f"{path}/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    key = next(key for key in store.list().result() if b"w" in key and key.endswith(b".zarray"))
    store.write(key, json.dumps({**json.loads(store.read(key).result().value), **changed}).encode()).result()


def test_a_huge_document_is_not_read(copied):
    """It is refused by its size."""

    def grown(path):
        with (path / "autoshard" / "metadata").open("ab") as file:
            file.truncate(MAX_BYTES + 1)

    assert f"has {MAX_BYTES + 1} bytes, and may have {MAX_BYTES}" in limited(lambda: copied(grown))
