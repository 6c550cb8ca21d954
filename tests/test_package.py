"""What an installed autoshard is: quick to import, whole, and with its strategies inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autoshard

ROOT = Path(__file__).resolve().parents[1]


def test_importing_autoshard_starts_no_backend_and_loads_no_model_library():
    """With a JAX platform that does not exist the import works, so nothing starts JAX; Flax and Optax are not loaded."""
    code = "import sys, autoshard; print([name for name in ('flax', 'optax', 'sklearn', 'matplotlib') if name in sys.modules])"
    environment = {**os.environ, "JAX_PLATFORMS": "nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_wheel_holds_the_package_and_the_strategies(tmp_path):
    """A wheel has all source files, the report's page, each strategy under ``autoshard/_strategies``, the command, the licence, no more."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("autoshard-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "autoshard = autoshard.cli:main" in archive.read(info["entry_points.txt"]).decode()
    sources = {f"autoshard/{file.relative_to(ROOT / 'autoshard').as_posix()}" for file in (ROOT / "autoshard").rglob("*.py")}
    strategies = {
        f"autoshard/_strategies/{file.relative_to(ROOT / 'strategies').as_posix()}" for file in (ROOT / "strategies").rglob("*.*")
    }
    report = (ROOT / "autoshard" / "report").rglob("*")
    page = {f"autoshard/{file.relative_to(ROOT / 'autoshard').as_posix()}" for file in report if file.parent.name in ("assets", "vendor")}
    schemas = {f"autoshard/cli/schemas/{file.name}" for file in (ROOT / "autoshard" / "cli" / "schemas").glob("*.json")}
    assert page and schemas and held == sources | page | schemas | strategies | {"autoshard/py.typed"}
    assert wheel.name == f"autoshard-{autoshard.__version__}-py3-none-any.whl"
    assert "licenses/LICENSE" in info


def test_the_changelog_has_this_version_in_short():
    """Its newest section but [Unreleased] is of the package's version, and each says what users notice, in less than 6 kB."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = [part for part in text.split("\n## ")[1:] if not part.startswith("[Unreleased]")]
    assert released[0].startswith(f"[{autoshard.__version__}]")
    assert all(len(part.encode()) < 6000 for part in released)


def test_a_tag_is_of_this_version():
    """Where the commit is tagged, as a release is, the tag is the version's."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {*done.stdout.split()} <= {f"v{autoshard.__version__}"}
