"""The recipes for users of other libraries: each runs on 8 devices, and its sharded step is the plain one."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "recipes"
NEEDS = {
    "flax_nnx": "flax",
    "linen_logical_axes": "flax",
    "equinox_step": "equinox",
    "haiku_step": "haiku",
    "keras_3": "keras",
    "hugging_face_flax": "transformers",
    "haliax_levanter": "haliax",
    "brax_ppo": "brax",
    "diffrax_ode": "diffrax",
    "numpyro_svi": "numpyro",
}


def test_every_recipe_is_short_and_fits_its_box():
    """At most 80 lines of at most 80 columns; its first lines say what changes for a user."""
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS}
    for path in FOLDER.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 80 and max(map(len, lines)) <= 80, path.name
        assert any(line.startswith("What changes for you: ") for line in lines[:5]), path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_recipe_runs(name, monkeypatch):
    """Its own steps run, and one from the same start returns what the plain step does."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    try:
        importlib.import_module(NEEDS[name])
    except ImportError as error:
        pytest.skip(f"{NEEDS[name]}, of the `recipes` extra, does not import: {error}")
    recipe = runpy.run_path(str(FOLDER / f"{name}.py"))
    found, wanted = recipe["sharded"](*recipe["make"]()), recipe["step"](*recipe["make"]())
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(other, jax.Array) and not jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    assert recipe["sharded"].strategy.record.mesh.size == 8
