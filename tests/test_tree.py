"""Tests mirror the tree: each folder of autoshard has one here, and each module of the cost model and the search a file that tests it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "autoshard"
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
LOGIC = ("analysis", "compilers", "cost", "inference", "judge", "mesh_search", "memory_limit", "problem", "reductions", "search")

# Modules that no test file is named after, and that none imports: the file in which the class or function that uses them is tested.
TESTED_BY = {
    "compilers/aliases.py": "compilers/test_fusion.py",
    "compilers/base.py": "compilers/test_buffer_assignment.py",
    "compilers/cpu.py": "compilers/test_buffer_assignment.py",
    "compilers/epilogues.py": "compilers/test_fusion.py",
    "compilers/fused_program.py": "compilers/test_fusion.py",
    "compilers/gpu.py": "compilers/test_gpu_compiler.py",
    "compilers/tpu/compiler.py": "compilers/test_kernel_traffic.py",
    "cost/narrow_sums.py": "lower/test_narrow.py",
    "cost/own_collectives.py": "cost/test_collectives.py",
    "memory_limit/dual_bound.py": "memory_limit/test_memory_limits.py",
    "problem/hints.py": "search/test_hints.py",
    "problem/memory_tables.py": "memory_limit/test_memory_limits.py",
    "search/brute_force.py": "search/test_exact.py",
    "search/manual.py": "search/test_searchers.py",
    "search/overlap.py": "lower/test_windows.py",
    "search/pin_report.py": "search/test_sharding_propagation.py",
    "search/propagation.py": "search/test_sharding_propagation.py",
    "search/recursive_programming.py": "search/test_searchers.py",
}


def imported() -> set[str]:
    """The modules of autoshard that tests import, by their dotted names."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    whole = re.findall(r"from (autoshard[\w.]+) import", text)
    members = re.findall(r"from (autoshard[\w.]+) import ([\w, ]+)", text)
    return {*whole, *(f"{package}.{name}" for package, names in members for name in re.split(r", *", names))}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_its_tests(folder):
    """Under the same name."""
    assert list((TESTS / folder).glob("test_*.py"))


def test_every_module_has_its_tests():
    """A file of its name in the folder of its name, or one that imports it, or a line in the table, which has no others."""
    known, untested = imported(), set()
    for path in (path for folder in LOGIC for path in (PACKAGE / folder).rglob("*.py") if path.name != "__init__.py"):
        place = path.relative_to(PACKAGE)
        named = (TESTS / place.parts[0] / f"test_{path.stem}.py").exists()
        if not named and ".".join(("autoshard", *place.with_suffix("").parts)) not in known:
            untested.add(place.as_posix())
    assert untested == set(TESTED_BY)
    assert all((TESTS / file).exists() for file in TESTED_BY.values())


def test_names_of_test_files_are_unique():
    """pytest imports each by its name alone."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
