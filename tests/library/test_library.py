"""The library finds its strategies wherever autoshard is, and each of them is in canonical form with its origin."""

from __future__ import annotations

import pytest
from strategy_records import EXAMPLE

from autoshard import library
from autoshard.errors import StrategyError
from autoshard.ir import as_compiled
from autoshard.strategy import save_record, to_json


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed package with two strategies of its own."""
    package = tmp_path / "autoshard"
    (package / "_strategies" / "team").mkdir(parents=True)
    save_record(EXAMPLE, package / "_strategies" / "mlp-cpu8-data_parallel.json")
    save_record(EXAMPLE, package / "_strategies" / "team" / "gpt.json")
    monkeypatch.setattr(library, "_PACKAGE", package)
    return package


def test_a_source_checkout_uses_the_folder_next_to_the_package(tmp_path, monkeypatch):
    """Without strategies inside the package those of the checkout are found."""
    (tmp_path / "strategies").mkdir()
    save_record(EXAMPLE, tmp_path / "strategies" / "s.json")
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "autoshard")
    assert library.names() == ("s",)


def test_an_installed_package_uses_its_own_folder(wheel):
    """Strategies inside the package are found by name, folders included, whatever lies next to it."""
    (wheel.parent / "strategies").mkdir()
    save_record(EXAMPLE, wheel.parent / "strategies" / "other.json")
    assert library.names() == ("mlp-cpu8-data_parallel", "team/gpt")
    assert library.path("team/gpt") == wheel / "_strategies" / "team" / "gpt.json"
    assert library.load("team/gpt") == EXAMPLE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlp-cpu8-dataparallel", "Near ones: mlp-cpu8-data_parallel."),
        ("../mlp-cpu8-data_parallel", "Near ones: mlp-cpu8-data_parallel."),
        ("/etc/hosts", "There are mlp-cpu8-data_parallel, team/gpt."),
        ("", "There are mlp-cpu8-data_parallel, team/gpt."),
    ],
)
def test_an_unknown_name_lists_near_ones(wheel, name, words):
    """A name that is none of the library's is refused with near names, or if none is near with all; it is never taken for a path."""
    with pytest.raises(StrategyError, match=f"one of 2 names, got .*{words}") as caught:
        library.path(name)
    assert repr(name) in str(caught.value)


def test_an_empty_library_says_so(tmp_path, monkeypatch):
    """A missing folder is an empty library."""
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "autoshard")
    assert library.names() == ()
    with pytest.raises(StrategyError, match="has none"):
        library.load("x")


@pytest.fixture(scope="module")
def records():
    """All of the library's, by name."""
    return {name: library.load(name) for name in library.names()}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", library.names())
def test_every_strategy_is_canonical(name):
    """Each checked-in file is the bytes that its record gives."""
    assert library.path(name).read_text(encoding="utf-8") == to_json(library.load(name)), f"{name} is not in canonical form"


def test_every_strategy_says_where_it_comes_from(records):
    """Each is named as its file, and has a command and no date."""
    for name, record in records.items():
        assert record.name == name.split("/")[-1]
        assert record.provenance.command.startswith("autoshard "), f"{name} does not say how it was made"
        assert record.provenance.date is None


def test_found_strategies_are_no_slower_than_experts(records):
    """Each model on each cluster has both, and what `auto` found is predicted to take no longer than what experts do."""
    ratios = library.against_expert(records)
    found = {name: ratios[name] for name, record in records.items() if record.searcher.name == "auto"}
    assert len(found) >= 34
    assert all(ratio is not None and ratio <= 1 for ratio in found.values()), found


def test_what_takes_the_reserve_of_memory_says_so(records):
    """A peak of more than 98 % of what a program may have is noted, as where nothing else fits."""
    for name, record in records.items():
        share = record.cost.peak_bytes / record.cluster["memory_limit_bytes"]
        assert share <= 0.98 or any("ask the compiler" in note for note in record.assumptions), (name, share)


def test_confirmations_are_of_the_strategies_in_their_files(records):
    """Most have been compiled: on their meshes, with the predicted FLOPs within 5 %, nearly all with the predicted bytes within 7 %."""
    confirmed = {name: record for name, record in records.items() if record.confirmation is not None}
    assert len(confirmed) >= 0.8 * len(records), sorted(set(records) - set(confirmed))
    far = []
    for name, record in confirmed.items():
        [taken] = record.confirmation.finalists
        assert taken.mesh.axes == record.mesh.axes and taken.predicted_seconds == record.cost.makespan_seconds, name
        assert taken.needed_bytes <= record.cluster["memory_limit_bytes"], name
        assert abs(taken.flops / record.cost.flops - 1) < 0.05, name
        sent = sum(each.bytes * each.count for each in as_compiled(record.cost.collectives))
        far += [name] if abs(taken.collective_bytes / sent - 1) > 0.07 else []
    assert len(far) <= 0.03 * len(confirmed), far


def test_files_are_small(records):
    """Repeated layers are written once: with their reports models of up to 96 layers take about 30 kB, those of unequal stages more."""
    sizes = sorted(library.path(name).stat().st_size for name in records)
    assert sizes[len(sizes) // 2] < 40_000 and sizes[-1] < 100_000, sizes
