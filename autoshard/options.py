"""The options of a search: each one's name, default, values and meaning, written once.

Python's entry points, the command line and `docs/options.md` are made from this table; values that are words or numbers are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard.errors import AutoshardError, SearcherError, ShardingError


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the keyword in Python.
        help: what it decides, for the command line.
        default: its value where it is not given.
        words: the words that it may be.
        least: whole numbers from this one up may be it too; None: no numbers.
        values: its values in words, where they are neither words nor numbers.
        flag: of the command line; empty where the name is it.
        metavar: a value's name there.
        error: of a value that is none of these.
    """

    name: str
    help: str
    default: Any = None
    words: tuple[str, ...] = ()
    least: int | None = None
    values: str = ""
    flag: str = ""
    metavar: str | None = None
    error: type[AutoshardError] = ShardingError

    @property
    def command(self) -> str:
        """How it is written on the command line."""
        return f"--{self.flag or self.name.replace('_', '-')}"

    @property
    def domain(self) -> str:
        """Its values, in words.

        >>> OPTIONS["microbatches"].domain, OPTIONS["stages"].domain
        ("a number, 1 or more, 'fit', 'auto' or None", 'a number, 2 or more, or None')
        """
        numbers = [] if self.least is None else [f"a number, {self.least} or more"]
        found = [*numbers, *map(repr, self.words)]
        comma = "," if len(found) == len(numbers) else ""
        return self.values or f"{', '.join(found)}{comma} or None"

    def checked(self, value: Any) -> Any:
        """The value, if it is one of the words or numbers, or None.

        Raises:
            AutoshardError: it is none of them.
        """
        is_number = self.least is not None and isinstance(value, int) and not isinstance(value, bool) and value >= self.least
        if value is not None and not is_number and not (isinstance(value, str) and value in self.words):
            verb = "are" if self.name.endswith("s") else "is"
            use = repr(self.words[0]) if self.words and self.least is None else max(self.least or 0, 2)
            raise self.error(f"{self.name} {verb} {self.domain}, got {value!r:.100}. Use {use}, for instance.")
        return value

    def parsed(self, text: str) -> Any:
        """The value of its text on the command line.

        >>> OPTIONS["microbatches"].parsed("4"), OPTIONS["remat"].parsed("none")
        (4, None)

        Raises:
            AutoshardError: as for `checked`.
        """
        return None if text == "none" else self.checked(int(text) if text.isdecimal() else text)


SCHEDULES = ("auto", "1f1b", "gpipe", "interleaved", "zero_bubble", "one_program", "one_program_interleaved", "one_program_zero_bubble")

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        each.name: each
        for each in (
            Option(
                "cluster",
                "such as cpu:8, v5e:4x4, h100:8x4, or a .toml file; see autoshard clusters",
                values="a Cluster, its short form or a file; None: this process's devices",
                metavar="CLUSTER",
            ),
            Option(
                "searcher",
                "auto (default: the best of several), dynamic_programming (proven optimal), recursive_programming (for three mesh "
                "axes), integer_programming (memory as a constraint), data_parallel, fully_sharded, tensor_parallel; "
                "sharding_propagation (spreads pins), manual (keeps pins, replicates other arguments)",
                "auto",
                values="a name, or a searcher",
                metavar="NAME",
            ),
            Option(
                "mesh",
                "mesh axes, outermost first; searched unless given: two axes at most and a third where it pays, or as many as a number "
                "says; with stages that of each stage, or one of all devices",
                values="axis sizes by name, a jax.sharding.Mesh, a number of axes from 1 to 3, or None",
                metavar="NAME=SIZE,...",
            ),
            Option(
                "pins",
                "keep an argument's sharding; repeatable",
                values="PartitionSpecs by path or pattern, 'arguments', a tuple of both, or None",
                flag="pin",
                metavar="PATH=SPEC",
            ),
            Option(
                "batch_axes",
                "split the batch over these mesh axes and no others, such as data or data,fsdp",
                values="one mesh axis or several, or None",
                metavar="NAME,...",
            ),
            Option(
                "batch",
                "an argument that holds examples, by path, pattern or position, such as batch or 1, where it is taken for state; "
                "repeatable",
                values="paths or positions of arguments, or None",
                metavar="ARGUMENT",
            ),
            Option(
                "memory_limit_bytes",
                "memory a device may use, such as 12GB; the cluster's unless given",
                values="a number of bytes, or None",
                flag="memory-limit",
                metavar="SIZE",
            ),
            Option(
                "donate_argnums",
                "positions of arguments whose memory may be reused, as donate_argnums",
                (),
                values="positions, as for jax.jit",
                flag="donate",
                metavar="N,...",
            ),
            Option(
                "time_limit_seconds",
                "search no longer than this; what is printed and saved is then the best met so far, with its gap",
                values="seconds, or None",
                flag="time-limit",
                metavar="SECONDS",
                error=SearcherError,
            ),
            Option(
                "interruptible",
                "Ctrl-C ends the search alone: the best met so far is printed and saved, with its gap",
                False,
                values="True or False",
            ),
            Option(
                "confirm",
                "compile the three best strategies for the cluster, without its devices, and take the fastest of those that fit; "
                "devices: run them on this machine's devices instead; off: no compiler is asked, not even of a plan near the memory limit",
                words=("compiler", "devices"),
                error=SearcherError,
                values="'compiler', 'devices', a Confirm, None, or False: no compiler is asked",
            ),
            Option(
                "microbatches",
                "compute gradients of so many parts of the batch, one after the other; fit (default): of more than one where "
                "memory binds and that is fastest; auto: of 1, 2, 4 or 8, whichever is fastest",
                "fit",
                ("fit", "auto"),
                1,
                metavar="N",
            ),
            Option(
                "remat",
                "compute values of the forward pass again in the backward pass; fit (default) or auto: where memory binds and that is "
                "fastest; full: all repeated layers; replace: instead of what the program's own checkpoints do, if that is faster; "
                "none: never",
                "fit",
                ("fit", "auto", "full", "replace"),
            ),
            Option(
                "offload",
                "what is in the memory of hosts while it is not used; optimizer: moments and the like; activations: what the backward "
                "pass reads, a further choice of --remat; auto: either where nothing fits otherwise or it is faster; none (default): "
                "nothing",
                None,
                ("optimizer", "activations", "auto"),
            ),
            Option("stages", "a pipeline: divide the devices into so many parts, each of which computes a stage", least=2, metavar="N"),
            Option(
                "schedule",
                "the order of a pipeline's tasks; auto (default): the fastest that is found, in any number of chunks; one_program: scanned "
                "layers, in stages of one program",
                words=SCHEDULES,
            ),
            Option(
                "plan",
                "search pipelines too: numbers of stages and of microbatches, schedules, and the shardings of each stage",
                "sharding",
                ("sharding", "full"),
                flag="full",
                values="'sharding' or 'full'",
            ),
            Option(
                "start",
                "start from a strategy, a file that --save wrote or a name that autoshard strategies lists: carried over to this program "
                "and cluster it is one of the candidates; what has no place here is said",
                values="an earlier Strategy, or None",
                flag="like",
                metavar="FILE",
            ),
            Option(
                "kernels",
                "auto: plain attention becomes the fused kernel that JAX has for these devices, a long sequence in a ring, "
                "where that is faster; none (default): never",
                words=("auto",),
            ),
            Option(
                "slow_reduction",
                "the type in which gradients and other sums of large arrays of floats cross the network between slices or pods, rounded at "
                "random; none (default): their own",
                words=("bfloat16", "int8"),
            ),
            Option(
                "balance",
                "rows of the fullest expert over the mean (1.0) that experts without a capacity are planned for; none: they stay as "
                "written",
                1.0,
                values="a number, 1 or more, or None",
                metavar="RATIO",
            ),
            Option(
                "padding",
                "keep dimensions that no mesh axis divides at their size, and so whole on every device",
                True,
                values="True, False, or a Padding",
                flag="no-padding",
            ),
        )
    }
)
"""The options by name, in the order in which they are told."""


def table() -> str:
    """The table of all options, as `docs/options.md` has it."""
    of_each = (
        (f"`{each.name}`<br>`{each.command}`", f"{each.domain}<br>default: `{each.default!r}`", re.sub(r"--[a-z-]+", r"`\g<0>`", each.help))
        for each in OPTIONS.values()
    )
    lines = [" | ".join(row) for row in (("option", "values", "meaning"), ("---",) * 3, *of_each)]
    return "\n".join(f"| {line} |" for line in lines)


def checked(name: str, value: Any) -> Any:
    """An option's value of words and numbers.

    Raises:
        AutoshardError: it has no such value.
    """
    return OPTIONS[name].checked(value)
