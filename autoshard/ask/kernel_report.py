"""What is read of a function's kernels: their rules and their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.ir.kernel import Kernel
from autoshard.render import Paragraph, Report, Table, format_bytes, format_flops
from autoshard.rules import rules_of
from autoshard.trace import trace


@dataclass(frozen=True, slots=True)
class Kernels(Report):
    """The kernels of a function; prints as a table.

    Attributes:
        rules: the sharding rule of each kernel by source line, in Shardy's notation.
        work: what each computes and moves, by source line.
    """

    rules: tuple[tuple[str, str], ...]
    work: tuple[tuple[str, Kernel], ...]


def kernels(fn: Callable[..., Any], *args: Any) -> Kernels:
    """The kernels of a function, each with its source line, its sharding rule, its FLOPs and bytes, and why what stays whole does.

    Kernels are those of Pallas and cuDNN, functions that partition themselves, and what has a rule by `autoshard.kernel_rule`.

    Args:
        fn, args: as for `autoshard.search`; nothing is run.

    Raises:
        TraceError: JAX cannot trace the function.
        RuleError: arrays contradict a rule that is declared.

    >>> import jax, jax.numpy as jnp
    >>> from autoshard import kernel_rule
    >>> [rule for _, rule in kernels(kernel_rule(jnp.tanh, "([i, j])->([i, j])"), jax.ShapeDtypeStruct((8, 4), "float32")).rules]
    ['([i, j])->([i, j]) {i=8, j=4}']
    """
    graph = trace(fn, *args).graph
    every = zip(graph.walk(), rules_of(graph), strict=True)
    found = [(str(op.origin), op.kernel, "without a rule" if rule is None else str(rule)) for op, rule in every if op.kernel is not None]
    parts = tuple(_parts(found)) if found else (Paragraph("There are none."),)
    rules, work = tuple((place, rule) for place, _, rule in found), tuple((place, kernel) for place, kernel, _ in found)
    return Kernels(f"Kernels of {graph.name}", parts, rules, work)


def _parts(found: list[tuple[str, Kernel, str]]) -> Iterator[Paragraph | Table]:
    rows = []
    for place, kernel, rule in found:
        work = f"{format_flops(kernel.flops)}\n{format_bytes(kernel.nbytes)}"
        rows.append((place, work, "\n".join((rule, *kernel.whole, *kernel.guessed))))
    yield Table(("kernel", ">work", "rule, and what stays whole"), tuple(rows))
