"""The README's Python runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_python_of_the_readme_runs(tmp_path):
    """Its blocks, one after the other in an empty folder, train on 8 virtual devices and leave a strategy file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "readme.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "data" in done.stdout
    assert (tmp_path / "strategy.json").is_file()


def test_what_the_readme_points_to_exists():
    """Every folder and file that the README names is there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:autoshard|strategies|notebooks|benchmarks)/[\w./]*)`|\]\(([\w.]+)\)", text):
        assert (ROOT / (name[0] or name[1])).exists(), name
