"""The layer map: a file of autoshard imports only from what is upstream of its folder, and JAX only where JAX belongs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import networkx
import pytest

from autoshard.cluster import CATALOGUE
from autoshard.cluster.device import KINDS
from autoshard.compilers import PLATFORMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autoshard"

# From upstream to downstream. A folder (or module) imports from the rows above it and from itself, never from its neighbours.
LAYERS = (
    ("errors", "render", "primitives", "budgets", "progress", "version", "concurrency"),
    ("inference", "options", "reader"),  # arrays alone; the words of users
    ("ir",),
    ("cluster",),  # places the axes of an `ir.Mesh` on its links
    ("rules", "cost"),
    ("analysis",),
    ("compilers",),
    ("judge",),
    ("trace", "problem"),
    ("reductions",),
    ("memory_limit",),
    ("search",),
    ("mesh_search",),
    ("lower",),
    ("microbatch", "recompute"),  # runs ops on parts of their operands as `lower` does on shards; runs them again
    ("rewrite",),  # before all these, and by their analyses of a program
    ("pipeline",),  # cuts the program of one microbatch into stages
    ("strategy",),  # the saved form
    ("library",),
    ("explanation",),  # of a judged program
    ("report",),  # shows what an explanation says
    ("verify", "probe", "distributed", "data"),  # hands Shardy the program as `lower` rebuilds it; measures on meshes as `lower` makes them
    ("ray_cluster",),
    ("run",),  # what devices run
    ("plan",),  # of which finalists are run and compiled
    ("ask",),
    ("collectives", "parameter_server"),
    ("checkpoint", "serving", "testing"),
    ("__init__",),  # the public names
    ("demo",),
    ("cli",),
    ("__main__",),
)

LEVEL = {name: row for row, names in enumerate(LAYERS) for name in names}

# The only folders in which JAX and what stands on it may be imported.
JAX = ("jax", "jaxlib", "flax", "optax")
KNOWS_JAX = (
    *("rules", "trace", "lower", "microbatch", "recompute", "rewrite", "pipeline", "verify", "probe", "distributed", "data"),
    *("run", "plan", "ask", "collectives", "parameter_server", "checkpoint", "serving", "demo", "cli"),
)

# The only rooms that know one compiler or device from another.
KNOWS_TARGETS = ("compilers/", "verify/", "cluster/catalogue.py", "cluster/accelerators.py", "cluster/hosts.py")
NAMES_A_TARGET = {
    "cluster/device.py": "the kinds of devices there are",
    "cli/commands.py": "JAX's platform where Linux shows no accelerator",
    "cli/verify.py": "choices of an option, before anything is loaded",
    "demo/devices.py": "virtual devices are of JAX's CPU platform",
    "demo/run.py": "the demo's own cluster",
    "lower/opaque.py": "a platform to lower for where none is asked for",
    "probe/programs.py": "a program's work and traffic before it is known what measures it",
    "ray_cluster.py": "JAX's platform of servers and searches, and of workers without accelerators",
    "rules/shardy.py": "a platform to lower for: any will do",
}

# Imports inside a function: (file, module, why it is not at the top of the file).
DELAYED = (
    ("cluster/cluster.py", "jax", "Cluster.local is its only use; describing a cluster must not need or start JAX"),
    ("trace/modules.py", "flax", "functions without NNX modules must not pay for loading Flax"),
    ("*", "scipy*", "takes a quarter of a second to load, and few searches need it"),
    ("*", "networkx", "takes a fifth of a second to load, and only exported and drawn graphs need it"),
    ("*", "rich*", "reports in a terminal alone need it"),
    ("render/__init__.py", "autoshard.render.terminal", "draws with rich"),
    ("rewrite/attention_kernels.py", "jax.experimental.pallas*", "takes a third of a second to load, and only replaced attention needs it"),
    ("run/diloco.py", "optax", "steps without an outer optimizer must not pay for loading it"),
    ("run/outer_step.py", "optax", "as above"),
    ("data/sources.py", "grain", "the `data` extra"),
    ("data/sources.py", "absl", "comes with Grain"),
    ("demo/gpt.py", "pydoc_data.topics", "takes a while to load, and only training reads it"),
    ("ray_cluster.py", "ray", "Ray is the `ray` extra"),
    ("parameter_server/worker.py", "ray", "Ray is the `ray` extra"),
    ("checkpoint/files.py", "orbax.checkpoint", "Orbax is the `checkpoint` extra"),
    ("checkpoint/*.py", "etils", "comes with Orbax: paths as it takes them"),
    ("cli/*.py", "*", "virtual devices are asked for, and bad options are refused, before a subcommand loads what it works with"),
)


@dataclass(frozen=True)
class Import:
    """One imported module: who imports it, on which line, how many dots it starts with, and whether inside a function."""

    file: str
    line: int
    module: str
    dots: int = 0
    delayed: bool = False

    def __str__(self) -> str:
        return f"autoshard/{self.file}:{self.line} imports {'.' * self.dots}{self.module}"


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source text."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imports(file: str, source: str) -> list[Import]:
    """Every import of a source text, wherever it stands; ``from autoshard import name`` counts as ``autoshard.name``."""
    found = []
    functions = [node for node in nodes(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def is_inside(line: int) -> bool:
        return any(function.lineno < line <= (function.end_lineno or 0) for function in functions)

    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(file, node.lineno, alias.name, 0, is_inside(node.lineno)))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"autoshard.{a.name}" if is_room(a.name) else module for a in node.names] if module == "autoshard" else [module]
            for name in names:
                found.append(Import(file, node.lineno, name, node.level, is_inside(node.lineno)))
    return found


def is_room(name: str) -> bool:
    """Whether a name of the package is a folder or module of it."""
    return name in LEVEL


def room(file: str) -> str:
    """The folder or module of a file: ``search`` of ``search/auto.py``."""
    return file.removesuffix(".py").split("/")[0]


def violations(found: Import) -> Iterator[str]:
    """What is wrong with an import, in words."""
    here = room(found.file)
    top, _, rest = found.module.partition(".")
    if found.dots:
        yield f"{found}: imports are absolute."
    if top == "autoshard":
        there = rest.split(".")[0] or "__init__"
        if there not in LEVEL:
            yield f"{found}: LAYERS has no {there!r}."
        elif there != here and LEVEL[there] >= LEVEL[here]:
            yield f"{found}: {there!r} is not upstream of {here!r}."
    if found.module.startswith("jax._src"):
        yield f"{found}: JAX's internals change without notice."
    excused = any(fnmatch(found.file, file) and fnmatch(found.module, module) for file, module, _ in DELAYED)
    if found.delayed and not excused:
        yield f"{found} inside a function: move it to the top, or say why in DELAYED."
    if top in JAX and here not in KNOWS_JAX and not (found.delayed and excused):
        yield f"{found}: only {', '.join(KNOWS_JAX)} know JAX."


@cache
def sources() -> dict[str, str]:
    return {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_import_goes_upstream():
    """No file imports from its own layer's neighbours or from downstream, by relative paths, JAX's internals, or late without a reason."""
    wrong = [text for file, source in sources().items() for found in imports(file, source) for text in violations(found)]
    assert not wrong, "\n" + "\n".join(wrong)


def names_targets(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a source text, docstrings aside, that names a kind of device, a platform or a catalogued device."""
    names = {*KINDS, *PLATFORMS, *CATALOGUE}
    documents = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            if node.value in names or (node.value.split(":")[0] in names and re.fullmatch(r"[a-z0-9-]+:[\dx]+", node.value)):
                yield node.lineno, node.value


def test_only_compilers_and_the_catalogue_tell_targets_apart():
    """What differs from one device's compiler to another's is a fact of `compilers`, not a branch elsewhere."""
    found = {file: list(names_targets(source)) for file, source in sources().items() if not file.startswith(KNOWS_TARGETS)}
    assert {file: texts for file, texts in found.items() if texts and file not in NAMES_A_TARGET} == {}
    assert all(found[file] for file in NAMES_A_TARGET), "an excuse that nothing needs any more"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('if device.kind == "tpu": pass', ["tpu"]),
        ('TABLE = {"v5e": 1, "other": 2}', ["v5e"]),
        ('cluster = "h100:8x4"', ["h100:8x4"]),
        ('def f():\n    """Of a tpu."""\n    return "of a tpu"', []),
    ],
)
def test_a_target_by_name_is_seen(source, found):
    """Comparisons, tables and clusters are; what words say is not."""
    assert [text for _, text in names_targets(source)] == found


def test_the_map_names_every_folder_and_no_other():
    """A new folder gets its place in the map, and a folder that goes leaves it."""
    here = {room(file) for file in sources()}
    listed = {name for row in LAYERS for name in row}
    assert here == listed


def test_every_delayed_import_that_is_excused_exists():
    """The list of excuses has no leftovers."""
    late = [found for file, source in sources().items() for found in imports(file, source) if found.delayed]
    for file, module, _ in DELAYED:
        assert any(fnmatch(found.file, file) and fnmatch(found.module, module) for found in late), (
            f"nothing in {file} imports {module} late"
        )


def test_every_third_party_import_is_a_declared_dependency():
    """What is imported at the top of a file is installed with autoshard; extras are imported late."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in project["dependencies"]}
    known = declared | set(sys.stdlib_module_names) | {"autoshard"}
    wrong = [
        str(found)
        for file, source in sources().items()
        for found in imports(file, source)
        if not found.delayed and not found.dots and found.module.split(".")[0] not in known
    ]
    assert not wrong, "\n" + "\n".join(wrong)


MOST_LINES = 400  # of a file
LONGEST = 40  # lines of a function
TOO_LONG = {  # of both; nothing may be added
    "mesh_search/refinement.py:refined",
    "mesh_search/search.py:search_meshes",
}
MEASURED = ("cli", "explanation", "mesh_search", "microbatch", "pipeline", "probe", "recompute", "render", "report", "rewrite", "verify")


def too_long(file: str, source: str) -> Iterator[str]:
    """The file, if it has too many lines, and its functions that have."""
    if source.count("\n") > MOST_LINES:
        yield file
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST:
            yield f"{file}:{node.name}"


def test_files_and_functions_are_short():
    """A file is read in one sitting and a function on one screen, but for those listed."""
    assert {name for file, source in sources().items() if room(file) in MEASURED for name in too_long(file, source)} == TOO_LONG


def test_a_long_file_and_a_long_function_are_seen():
    """Each by itself, and methods as functions."""
    body = "\n".join(["        pass"] * LONGEST)
    assert [*too_long("x.py", f"class A:\n    def f(self):\n{body}\n")] == ["x.py:f"]
    assert [*too_long("x.py", "\n" * (MOST_LINES + 1))] == ["x.py"] and not [*too_long("x.py", "\n" * MOST_LINES)]


@pytest.mark.parametrize(
    ("file", "source", "words"),
    [
        ("ir/graph.py", "from autoshard.cost import model", "'cost' is not upstream of 'ir'"),
        ("cost/model.py", "from autoshard.rules import rule", "'rules' is not upstream of 'cost'"),
        ("search/x.py", "def f():\n    from autoshard.ask.search import search", "'ask' is not upstream"),
        ("search/x.py", "from autoshard import strategy", "'strategy' is not upstream"),
        ("search/x.py", "import autoshard", "'__init__' is not upstream"),
        ("search/x.py", "from autoshard.nowhere import x", "LAYERS has no 'nowhere'"),
        ("search/x.py", "from . import y", "imports are absolute"),
        ("search/x.py", "from ..ir import Mesh", "imports are absolute"),
        ("search/x.py", "def f():\n    import json", "inside a function"),
        ("search/x.py", "if True:\n    import jax.numpy as jnp", "know JAX"),
        ("problem/x.py", "from flax import nnx", "know JAX"),
        ("lower/x.py", "from jax._src import core", "internals"),
        ("lower/x.py", "import jax._src.core", "internals"),
    ],
)
def test_a_wrong_import_is_seen(file, source, words):
    """Each kind of import that the map forbids is found in a file that has it."""
    assert any(words in text for found in imports(file, source) for text in violations(found))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("search/x.py", "from autoshard.search.y import z\nfrom autoshard.ir import Mesh\nimport numpy as np"),
        ("cli/x.py", "def run():\n    import autoshard\n    from autoshard import library, search"),
        ("lower/x.py", "from jax.extend.core import Jaxpr"),
    ],
)
def test_a_right_import_passes(file, source):
    """Imports from upstream, from the same folder, and of JAX where it belongs are fine."""
    assert not [text for found in imports(file, source) for text in violations(found)]


def test_no_modules_import_each_other_in_a_circle():
    """Each module can be read, and tested, after those that it imports."""
    known = {"autoshard." + file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for file in sources()}
    graph = networkx.DiGraph()
    for file, source in sources().items():
        here = "autoshard." + file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                graph.add_edges_from((here, there) for a in node.names if (there := f"{node.module}.{a.name}") in known)
                if node.module in known and not all(f"{node.module}.{a.name}" in known for a in node.names):
                    graph.add_edge(here, node.module)
    circles = {frozenset(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1}
    assert not circles
