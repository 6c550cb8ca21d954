"""Corrections are kept in a folder of the user's: complete files, of one version each, whatever several processes do."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

import autoshard
from autoshard.compilers.corrections import Corrections
from autoshard.plan import kept_corrections as module
from autoshard.plan.kept_corrections import VARIABLE, keep_corrections, kept_corrections

CLUSTER = autoshard.Cluster.parse("v5e:2x4")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of corrections for a compiler of version 1."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "there")
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_was_learned_is_known_in_the_next_search(folder):
    """The latest of equal kernels holds; another device and another version of the compiler have files of their own."""
    assert keep_corrections(CLUSTER, Corrections({"a": 1.0, "b": 2.0})) == keep_corrections(CLUSTER, Corrections({"b": 3.0})) == ()
    found, notes = kept_corrections(CLUSTER)
    assert dict(found.seconds) == {"a": 1.0, "b": 3.0} and not notes
    assert not kept_corrections(autoshard.Cluster.parse("v5p:2x2x2"))[0]


def test_another_version_of_the_compiler_knows_nothing_of_it(folder, monkeypatch):
    """Its kernels are others."""
    keep_corrections(CLUSTER, Corrections({"a": 1.0}))
    monkeypatch.setattr(metadata, "version", lambda name: "2")
    assert not kept_corrections(CLUSTER)[0]


OTHERS = (99, ""), (1, '"a": "b"'), (1, '"a": NaN')


@pytest.mark.parametrize("text", ["", "[]", *(f'{{"schema": {schema}, "seconds": {{{each}}}}}' for schema, each in OTHERS)])
def test_files_that_cannot_be_read_are_left_aside(folder, text):
    """A note says which; the next that is written takes its place, and it is kept beside."""
    keep_corrections(CLUSTER, Corrections({"a": 1.0}))
    (path,) = folder.glob("*.json")
    path.write_text(text)
    found, (note,) = kept_corrections(CLUSTER)
    assert not found and "left aside" in note and str(path) in note
    assert keep_corrections(CLUSTER, Corrections({"b": 2.0})) == ()
    assert dict(kept_corrections(CLUSTER)[0].seconds) == {"b": 2.0} and path.with_suffix(".unread").read_text() == text


def test_the_oldest_go_where_there_are_too_many(folder, monkeypatch):
    """What was confirmed again counts as new."""
    monkeypatch.setattr(module, "MOST", 2)
    for key in ("a", "b", "a", "c"):
        keep_corrections(CLUSTER, Corrections({key: 1.0}))
    assert [*kept_corrections(CLUSTER)[0].seconds] == ["a", "c"]


@pytest.mark.slow
def test_several_processes_lose_nothing(folder):
    """Each adds its own, again and again, and all are there in the end."""
    code = (
        "import sys, autoshard; from autoshard.compilers.corrections import Corrections; from autoshard.plan import kept_corrections as k\n"
        "from importlib import metadata; metadata.version = lambda name: '1'\n"
        "for n in range(20): k.keep_corrections(autoshard.Cluster.parse('v5e:2x4'), Corrections({f'{sys.argv[1]} {n}': 1.0}))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(kept_corrections(CLUSTER)[0].seconds) == 60 and not [*folder.glob("*.unread")]


def test_it_is_switched_off_by_a_variable(folder, monkeypatch):
    """Nothing is read or written; nor is it where the folder cannot be made, of which a note speaks."""
    keep_corrections(CLUSTER, Corrections({"a": 1.0}))
    before = [*folder.iterdir()]
    monkeypatch.setenv(VARIABLE, "off")
    assert not kept_corrections(CLUSTER)[0] and keep_corrections(CLUSTER, Corrections({"b": 1.0})) == () and [*folder.iterdir()] == before
    monkeypatch.setenv(VARIABLE, str(before[0] / "inside"))
    assert "not kept" in keep_corrections(CLUSTER, Corrections({"b": 1.0}))[0]


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    """XDG_CACHE_HOME is obeyed."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "there")
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_corrections(CLUSTER, Corrections({"a": 1.0}))
    (path,) = (tmp_path / "autoshard").glob("*.json")
    assert json.loads(path.read_text()) == {"schema": 2, "seconds": {"a": 1.0}} and "v5e" in path.name and "libtpu-1" in path.name
    assert not kept_corrections(autoshard.Cluster.parse("cpu:8"))[0]
