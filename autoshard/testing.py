"""Assertions for tests of shardings: the collectives of a step, and golden files of strategies.

They take no part in anything else. A golden file is written anew where the environment variable ``AUTOSHARD_UPDATE_GOLDENS`` is set. This
module is a plug-in of pytest, too, with an option that sets it: ``--update-goldens``, where ``conftest.py`` has
``pytest_plugins = ["autoshard.testing"]``; see docs/testing.md.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from autoshard.ask.kernel_checks import check_kernel_rule as check_kernel_rule
from autoshard.ask.kernel_report import kernels as kernels
from autoshard.ask.pipeline_verification import PipelineVerification
from autoshard.ask.search import evaluate
from autoshard.ask.strategy import Strategy
from autoshard.ask.verification import verify
from autoshard.cluster import Cluster
from autoshard.errors import StrategyError
from autoshard.explanation.breakdown import collective_groups
from autoshard.explanation.groups import by_pattern
from autoshard.ir.collective import KINDS
from autoshard.ir.words import array_type
from autoshard.render import format_bytes

UPDATE = "AUTOSHARD_UPDATE_GOLDENS"
OPTION = "--update-goldens"

_HOW = f"{OPTION} (pytest, where conftest.py has pytest_plugins = ['autoshard.testing']) or {UPDATE}=1"

Expected = Mapping[str | tuple[str, ...], int]
"""Executions in a step by kind, ``"all_reduce"``, or by kind and mesh axes, ``("all_gather", "data")``."""


def assert_collectives(
    fn: Callable[..., Any],
    *args: Any,
    expected: Expected,
    strategy: Strategy | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    in_specs: Any = "arguments",
    target: str | None = None,
) -> None:
    """Asserts that a step has exactly the expected collectives, in all its stages, and no others; loops count each of their trips.

    Args:
        fn, args: the step; arguments may be `jax.ShapeDtypeStruct`.
        expected: how many there are in a step, by kind, or by kind and mesh axes. A kind that is not named must not be there.
        strategy: how the step is sharded. None: as ``cluster``, ``mesh`` and ``in_specs`` say to `autoshard.evaluate`.
        target: None counts the planned collectives; ``"shardy"``, ``"cpu"``, ``"tpu"`` and ``"gpu"`` those that `autoshard.verify` finds in
            the program for that target.

    Raises:
        AssertionError: they are others; lists them with their source lines.
        StrategyError: ``expected`` names no collective.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> assert_collectives(
    ...     lambda w, x: jnp.sum(x @ w), jnp.ones((64, 64)), jnp.ones((512, 64)), expected={("all_reduce", "data"): 1},
    ...     cluster="cpu:8", mesh={"data": 8}, in_specs=(jax.P(), jax.P("data")))
    """
    wanted = {((key,) if isinstance(key, str) else tuple(key)): count for key, count in expected.items()}
    for kind, *_ in wanted:
        if kind not in KINDS:
            raise StrategyError(f"expected names collectives, one of {', '.join(KINDS)}; got {kind!r}. Use ('all_gather', 'data'), say.")
    if strategy is None:
        strategy = evaluate(fn, *args, cluster=cluster, mesh=mesh, in_specs=in_specs)
    found = Counter[tuple[str, ...]]()
    if target is None:
        for part in _parts(strategy):
            for each in part.cost.collectives:
                found[each.kind, *each.mesh_axes] += each.count
    else:
        verified = verify(strategy, fn, *args, target=target)
        for part in verified.stages if isinstance(verified, PipelineVerification) else [verified]:
            for row in part.rows:
                found[row.kind, *row.mesh_axes] += row.actual_count
    left = +found
    wrong = []
    for key, count in sorted(wanted.items(), key=lambda item: -len(item[0])):  # those with axes before all of their kind
        there = sum(left.pop(one) for one in [one for one in left if one[: len(key)] == key and (len(key) == 1 or one == key)])
        if there != count:
            wrong.append(f"{' over '.join((key[0], ', '.join(key[1:])) if key[1:] else key)}: expected {count}, got {there}")
    wrong += [f"{key[0]} over {', '.join(key[1:])}: expected none, got {count}" for key, count in left.items() if count]
    if wrong:
        raise AssertionError(
            "\n".join([f"{strategy.record.program.name} has other collectives than expected.", *wrong, *_listed(strategy)])
        )


def _parts(strategy: Strategy) -> Sequence[Strategy]:
    """The stages, or the step where it has none."""
    return strategy.stages or (strategy,)


def _listed(strategy: Strategy) -> Iterable[str]:
    """The planned collectives with their source lines."""
    yield "Planned:"
    for group in chain.from_iterable(collective_groups(part.record, None) for part in _parts(strategy)):
        each = f"{group.count} x {group.kind} over {', '.join(group.axes)} of {format_bytes(group.bytes)}"
        yield f"  {each}: {group.tensor}, for {group.source}"


def assert_matches_golden(strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Asserts that a strategy shards as a golden file says: mesh, argument specs by group, and collectives; no predicted seconds.

    With ``pytest --update-goldens``, or where the environment variable ``AUTOSHARD_UPDATE_GOLDENS`` is set, the file is written instead.

    Raises:
        AssertionError: it differs, with the lines that do; or there is no such file.
    """
    path, text = Path(path), golden_text(strategy)
    if os.environ.get(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no golden file {path}. Run the test once with {_HOW}, and read what it writes.")
    golden = path.read_text(encoding="utf-8")
    if golden != text:
        lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), str(path), "the strategy", lineterm="", n=1)
        told = "\n".join(lines)
        raise AssertionError(f"{strategy!r} shards otherwise than its golden file. If it should, run the test with {_HOW}.\n{told}")


def golden_text(strategy: Strategy) -> str:
    """The text of a golden file: JSON, a line for each group of arguments and each kind of collective."""
    record = strategy.record
    collectives = Counter[tuple]()
    for each in record.cost.collectives:
        collectives[each.kind, each.mesh_axes, each.bytes] += each.count
    arguments = [
        f"{name}: {array_type(group[0].dtype, group[0].shape)} x {len(group)} as {group[0].spec}"
        for name, group in by_pattern(record.arguments)
    ]
    lines = [f"{kind} over {', '.join(axes)}: {count} x {nbytes:.0f} bytes" for (kind, axes, nbytes), count in sorted(collectives.items())]
    found = {"program": record.program.name, "mesh": dict(record.mesh.shape), "arguments": arguments, "collectives": lines}
    return json.dumps(found, indent=1) + "\n"


# -- the plug-in of pytest -----------------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    """Adds the option; another plug-in's of that name serves as well."""
    with suppress(ValueError):
        parser.addoption(OPTION, action="store_true", default=False, help="write golden files of strategies rather than compare with them")


def pytest_configure(config: Any) -> None:
    """Has golden files written for this run, where the option says so."""
    if config.getoption(OPTION) and UPDATE not in os.environ:
        os.environ[UPDATE] = "1"
        config.add_cleanup(lambda: os.environ.pop(UPDATE, None))
