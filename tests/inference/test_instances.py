"""The recorded models: read from their files, solved exactly, and bounded from below."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from small_models import small_models

from autoshard.errors import SearcherError
from autoshard.inference.model import load
from benchmarks.inference import INSTANCES, frustrated_grid, measured, names


@pytest.mark.parametrize("name", names())
def test_recorded_models_are_solved(name):
    """Elimination finds the recorded optimum, reduced-cost fixing proves it, and no bound of message passing exceeds it."""
    found = measured(name)
    assert not found.wrong
    bounds = [bound for bound, _ in found.bounds]
    assert bounds == sorted(bounds)


def test_there_is_one_that_messages_alone_do_not_solve():
    """The frustrated grid keeps a gap however long messages are passed, and is what its generator makes."""
    found = measured("frustrated_grid")
    assert found.bounds[-1][0] < found.optimum - 1e-3 * abs(found.optimum)
    assert all((a == b).all() for a, b in zip(found.model.unary, frustrated_grid().unary, strict=True))


@settings(max_examples=50, deadline=None)
@given(small_models())
def test_a_saved_model_is_read_back(tmp_path_factory, model):
    """Tables come back as they were, equal ones as one array, and the file's facts with them."""
    path = tmp_path_factory.mktemp("models") / "model.json"
    model.save(path, source="a test")
    again, facts = load(path)
    assert facts["source"] == "a test"
    assert all((a == b).all() for a, b in zip(model.unary, again.unary, strict=True))
    assert model.pairs.keys() == again.pairs.keys() and all((model.pairs[pair] == again.pairs[pair]).all() for pair in model.pairs)
    tables = [*again.unary, *again.pairs.values()]
    assert len({id(table) for table in tables}) == len({(table.shape, table.tobytes()) for table in tables})


def test_a_file_of_another_schema_is_refused(tmp_path):
    """The error names both schemas and the file."""
    text = (INSTANCES / "frustrated_grid.json").read_text().replace('"schema": 1', '"schema": 7')
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(SearcherError, match=r"schema 1, and .*model\.json has 7"):
        load(tmp_path / "model.json")


def test_energies_are_sums_of_entries():
    """By hand, on the smallest of models."""
    model, _ = load(INSTANCES / "frustrated_grid.json")
    labels = np.zeros(len(model.unary), int)
    assert model.energy(labels) == pytest.approx(sum(t[0] for t in model.unary) + sum(t[0, 0] for t in model.pairs.values()))
