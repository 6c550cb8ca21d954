"""Tests over the Pythons and JAX releases that are supported, and over the oldest dependencies; ``nox -l`` lists the sessions.

Interpreters that a machine lacks are skipped (``nox --error-on-missing-interpreters`` refuses instead, as continuous integration does).
Arguments after ``--`` go to pytest: ``nox -s tests-3.13 -- tests/rules``.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RELEASES = ("0.10", "0.11", "0.12")  # of JAX
NEEDED_PYTHON = {"0.11": (3, 12), "0.12": (3, 12)}  # by release of JAX, where it is newer than ours
EXTRAS = "checkpoint,data,mcp,ray"
TOOLS = ("pytest>=8.2", "pytest-xdist>=3.6", "hypothesis>=6.100", "jsonschema>=4.20", "equinox>=0.13", "build", "hatchling")

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]


@nox.session(python=PYTHONS)
@nox.parametrize("jax", RELEASES)
def tests(session: nox.Session, jax: str) -> None:
    """The tests, with a release of JAX."""
    least = NEEDED_PYTHON.get(jax, (0,))
    if tuple(map(int, str(session.python).split("."))) < least:
        session.skip(f"JAX {jax} needs Python {'.'.join(map(str, least))}")
    session.install(f".[{EXTRAS}]", f"jax~={jax}.0", f"jaxlib~={jax}.0", *TOOLS)
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The tests with the oldest release of every dependency that `pyproject.toml` allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS.split(",") for each in project["optional-dependencies"][extra])]
    session.install(".", *(re.sub(r">=([\d.]+).*", r"==\1", each) for each in wanted), *TOOLS)
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff."""
    session.install("ruff>=0.17,<0.18")
    session.run("ruff", "check", ".")


@nox.session(python="3.11")
def types(session: nox.Session) -> None:
    """Pyright: strict for the public names, basic elsewhere."""
    session.install(f".[{EXTRAS}]", "pyright>=1.1.380")
    session.run("pyright", "--pythonpath", f"{session.bin}/python")


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """The wheel in an environment without anything else, as a user has it: it imports, finds and explains."""
    session.install("build")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", folder, str(ROOT))
    built = max(Path(folder).glob("*.whl"), key=lambda file: file.stat().st_mtime)
    session.install(str(built))
    session.chdir(folder)
    session.run("autoshard", "demo", "--only", "lenet", "--steps", "3")
