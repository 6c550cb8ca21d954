"""Which strategies are in the library? Writes those of `benchmarks.models.published` that have no file in ``strategies/`` yet.

Each model is sharded over each of its clusters twice: by ``auto``, and as is usual in the field. Each model's first cluster comes first; an
interrupted run goes on where it was. `autoshard strategies refresh` makes files anew by the commands in them.

    python -m benchmarks.strategies [MODEL...]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.models.published import PUBLISHED

FOLDER = "strategies"
MODULE = "benchmarks.models.published"


def commands(models: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name of each strategy, and the command that writes it."""
    pairs = [(place, model, cluster) for model in models for place, cluster in enumerate(PUBLISHED[model].clusters)]
    for _, model, cluster in sorted(pairs, key=lambda pair: pair[0]):
        for searcher in ("auto", PUBLISHED[model].expert):
            pins = "" if searcher == "auto" else "".join(f" --pin {shlex.quote(pin)}" for pin in PUBLISHED[model].pins)
            name = f"{model}_{cluster.replace(':', '_')}_{searcher}"
            program = f"{MODULE}:{model}.step --args {MODULE}:{model}.arguments --cluster {cluster} --donate 0{pins}"
            yield name, f"autoshard search {program} --searcher {searcher} --name {name} --save {FOLDER}/{name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="*", default=list(PUBLISHED), help="; ".join(PUBLISHED))
    parser.add_argument("--seconds", type=float, default=600.0, help="that a search may take")
    options = parser.parse_args()
    for name, command in commands(options.models):
        if not Path(FOLDER, f"{name}.json").exists():
            print(name, flush=True)
            try:
                arguments = [sys.executable, "-m", *shlex.split(command)]
                found = subprocess.run(arguments, timeout=options.seconds, capture_output=True, text=True)
                print("" if found.returncode == 0 else f"  {found.stderr.strip().splitlines()[-1]}", flush=True)
            except subprocess.TimeoutExpired:
                print(f"  took more than {options.seconds:g} s", flush=True)


if __name__ == "__main__":
    main()
