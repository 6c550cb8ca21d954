"""The README's Python runs as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_python_of_the_readme_runs(tmp_path):
    """Its blocks, one after the other in an empty folder, train on 8 virtual devices without a warning, and leave a strategy file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::UserWarning", "readme.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "data" in done.stdout
    assert (tmp_path / "strategy.json").is_file()


def test_what_the_readme_points_to_exists():
    """Every folder and file that the README, CONTRIBUTING and the documents name is there."""
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:autoshard|strategies|notebooks|benchmarks|tests|docs)/[\w./]*)`|\]\(([\w./]+)\)", text):
            assert (ROOT / name[0] if name[0] else document.parent / name[1]).exists(), f"{document.name}: {name}"


def test_the_glossary_points_into_the_package():
    """Each word's last column is files and folders of the package."""
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        for name in re.findall(r"`([\w./]+)`", row.split("|")[3]):
            assert (ROOT / "autoshard" / name).exists(), row


def test_the_readme_is_short():
    """What a user needs to begin: the rest is in the documents."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_picture_of_the_folders_is_drawn_from_their_imports():
    """`python docs/architecture_picture.py` draws it anew."""
    location = importlib.util.spec_from_file_location("architecture_picture", ROOT / "docs" / "architecture_picture.py")
    assert location is not None and location.loader is not None
    picture = importlib.util.module_from_spec(location)
    location.loader.exec_module(picture)
    graph = picture.imports()
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn(graph, picture.places(graph))
