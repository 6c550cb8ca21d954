"""What an import and a command load before they need it."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import library
from autoshard.ir.remat import Kept, Remat
from autoshard.ir.rewrites import (
    KINDS,
    FusedAttention,
    Microbatches,
    Offload,
    OneProgram,
    PackedExperts,
    Padded,
    PaddedDim,
    Recompute,
    to_json,
)

OPTIONAL = ("etils.epath", "flax", "grain", "matplotlib", "networkx", "optax", "orbax", "ray", "rich", "scipy", "sklearn")


def loaded(statement: str) -> set[str]:
    """The modules that a statement loads in a Python of its own, beyond those of Python's own library and of `import jax`."""
    script = f"import sys, jax; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return {name for name in out.split() if name.split(".")[0] not in sys.stdlib_module_names}


def test_an_import_loads_the_package_alone():
    """`import autoshard` takes no longer than `import jax`: names are loaded where they are used."""
    assert loaded("import autoshard") == {"autoshard", "autoshard.version"}


@pytest.mark.parametrize(("name", "home"), [("search", "ask.search"), ("Cluster", "cluster"), ("load", "ask.strategy")])
def test_optional_libraries_are_loaded_where_they_are_used(name, home):
    """The first use of a public name loads none of them."""
    found = loaded(f"import autoshard; autoshard.{name}")
    assert f"autoshard.{home}" in found
    assert not [module for module in found if module.startswith(OPTIONAL)]


@pytest.mark.parametrize("words", [["--help"], ["search", "--help"], ["search", "--frobnicate"], ["--version"], []])
def test_help_and_wrong_options_load_no_jax(words):
    """Help, and errors in options, take a tenth of a second: JAX, numpy and optional libraries are not loaded."""
    script = f"import sys; from autoshard.cli import main; main({words}); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert not [name for name in out.split() if name.startswith(("jax", "numpy", *OPTIONAL))]


NAME, OTHER = "llama_3_70b_h100_8x8_auto", "llama_3_70b_h100_8x8_fully_sharded"
REWRITES = (
    FusedAttention("splash attention", ("model.py:1",)),
    PackedExperts(1.0, ((8, 64),)),
    Padded((PaddedDim(0, 0, ((50257, 50264),), "the vocabulary", 8, 0.01),)),
    Recompute(Remat("auto", (), Kept(1, (), ((0, 0),)), (), 1e9, 2e9, 1e-3)),
    Microbatches(4),
    OneProgram(2, 4),
    Offload((0,)),
)


@pytest.fixture
def files(tmp_path):
    """The folder of a file as a search saves it, `found.json`, and of one with each kind of rewrite, by its name."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    autoshard.search(step, jnp.ones((64, 64)), jnp.ones((4096, 64)), cluster="cpu:8", mesh={"x": 8}).save(tmp_path / "found.json")
    assert {rewrite.kind for rewrite in REWRITES} == {*KINDS}
    for rewrite in REWRITES:
        document = json.loads(library.path(NAME).read_text(encoding="utf-8"))
        document["program"]["rewrites"] = to_json((rewrite,))
        (tmp_path / f"{rewrite.kind}.json").write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def test_questions_about_files_load_no_jax(files):
    """What a strategy's file answers by itself takes no longer than to load numpy and rich."""
    commands = [
        *(["explain", f"{kind}.json"] for kind in KINDS),
        *([*words, "found.json"] for words in (["explain", "--html=r.html", "--trace=t.json"], ["what-if", "--batch=8192"])),
        *(["what-if", "found.json", "--cluster", "cpu:16"], ["explain", NAME, "--html", "r.html"]),
        *(["compare", NAME, OTHER], ["compare", "padding.json", "offload.json"]),
        *(["strategies", NAME], ["clusters"]),
    ]
    script = f"import sys\nfrom autoshard.cli import main\nfor words in {commands}:\n    print(main(words), *sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=files)
    found = [line.split() for line in out.stdout.splitlines() if " builtins " in line]
    assert len(found) == len(commands), out.stderr
    for words, (code, *names) in zip(commands, found, strict=True):
        assert code == "0", (words, out.stderr)
        assert not [name for name in names if name.startswith(("jax", *OPTIONAL)) and not name.startswith("rich")], words


def test_public_names_are_those_that_type_checkers_see():
    """`__all__`, `dir`, and the imports for type checkers have the same names, each of which is there."""
    tree = ast.parse(Path(autoshard.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = [(str(node.module), alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(name for _, name in imported) == sorted({*autoshard.__all__} - {"__version__"})
    assert {*autoshard.__all__} <= {*dir(autoshard)}
    for module, name in imported:
        found = getattr(autoshard, name)
        assert found is (sys.modules[f"autoshard.{name}"] if module == "autoshard" else getattr(sys.modules[module], name))
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        autoshard.serach  # pyright: ignore[reportAttributeAccessIssue]


def test_folders_do_not_hide_functions_of_their_names():
    """`autoshard.search` and `autoshard.verify` are functions, whichever of their modules was imported first."""
    script = "import autoshard.search, autoshard.verify, autoshard; print(autoshard.search.__name__, autoshard.verify.__name__)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["search", "verify"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent to a process")
@pytest.mark.parametrize("module, command", [("autoshard.cli.commands", "clusters"), ("autoshard.cluster", "clusters"), ("jax", "demo")])
def test_interrupted_while_it_imports(module, command, tmp_path):
    """Ctrl-C while a command loads modules ends it with one line and exit code 130, without a traceback."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a runner in the background has ignored
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from autoshard.cli import main\n"
        f"sys.exit(main([{command!r}]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stdout is not None and child.stdout.readline() == "importing\n"
        time.sleep(0.1)  # until it sleeps
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.strip().startswith("autoshard: interrupted") and len(err.strip().splitlines()) == 1
