"""``autoshard mcp``: searches and questions as tools of an agent, over the Model Context Protocol on standard input and output."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from autoshard.cli.limited import Limits, option_words
from autoshard.cli.options import command, seconds, size
from autoshard.errors import AutoshardError

SECONDS, MEMORY = 600.0, "16GB"

INSTRUCTIONS = """autoshard finds how to shard a JAX step over many devices, and predicts step time and memory; no devices are needed.
A program is module:function of a Python file in the working folder, and its arguments module:name of a tuple of arrays or
jax.ShapeDtypeStructs, or of a function that returns it. A strategy is a file that search or evaluate saved. Answers are reports; with
json=true they are JSON, as docs/reference/json.md describes it."""

Options = dict[str, str | int | float | bool]


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "offer search, evaluate, explain, what-if, compare, verify and sweep to an agent, over stdin and stdout"
    parser = command(commands, "mcp", run, what, "autoshard mcp --folder . --seconds 300", reports=False)
    parser.add_argument("--folder", metavar="FOLDER", default=".", help="of the programs and files that calls may name (default: this one)")
    parser.add_argument(
        "--seconds", metavar="N", type=seconds, default=SECONDS, help=f"how long a call may take at most (default {SECONDS:.0f})"
    )
    parser.add_argument("--memory", metavar="SIZE", type=size, default=size(MEMORY), help=f"that a call may take (default {MEMORY}; Linux)")


def run(options: argparse.Namespace) -> int:
    """Serves until the input ends."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise AutoshardError(f"--folder names a folder, got {options.folder!r}. Make it first, or name another.")
    server(Limits(folder.resolve(), options.seconds, options.memory)).run("stdio")
    return 0


def server(limits: Limits) -> Any:
    """The server of the tools.

    Raises:
        AutoshardError: the SDK is not installed.
    """
    try:
        from anyio import CapacityLimiter, to_thread  # pyright: ignore[reportMissingImports]
        from mcp.server import MCPServer  # pyright: ignore[reportMissingImports]
        from mcp.server.mcpserver.exceptions import ToolError  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise AutoshardError(
            "autoshard mcp needs the Python SDK of the Model Context Protocol, version 2 or newer, which is not installed. Install it: "
            "pip install 'autoshard[mcp]'."
        ) from None
    one = CapacityLimiter(1)  # calls run one after the other: each may take all the memory

    async def called(*words: str) -> str:
        return await to_thread.run_sync(partial(limits.run, *words), limiter=one)

    found = MCPServer("autoshard", instructions=INSTRUCTIONS)
    tools = Tools(limits, called)
    for tool in (tools.search, tools.evaluate, tools.explain, tools.what_if, tools.compare, tools.verify, tools.sweep):
        found.tool(structured_output=False)(_telling(tool, ToolError))
    return found


def _telling(tool: Callable[..., Awaitable[str]], error: type[Exception]) -> Callable[..., Awaitable[str]]:
    """The tool, raising what the SDK tells the agent in place of our errors, which it would hide."""

    @wraps(tool)
    async def told(*args: Any, **kwargs: Any) -> str:
        try:
            return await tool(*args, **kwargs)
        except AutoshardError as refused:
            raise error(str(refused)) from None

    return told


class Tools:
    """The tools, whose docstrings and types are what an agent reads.

    Attributes:
        limits: of their calls.
    """

    def __init__(self, limits: Limits, called: Callable[..., Awaitable[str]]):
        self.limits = limits
        self._called = called

    def _of(self, program: str | None, arguments: str | None) -> list[str]:
        """The program and its arguments, as a command line has them."""
        words = [] if program is None else [self.limits.program(program)]
        return words if arguments is None else [*words, f"--args={self.limits.program(arguments)}"]

    async def search(
        self,
        program: str,
        arguments: str,
        cluster: str,
        save: str,
        options: Options | None = None,
        pins: dict[str, str] | None = None,
        json: bool = False,
    ) -> str:
        """Searches how to shard a program over a cluster, and saves the strategy.

        Args:
            program: module:function in the working folder, such as train:train_step.
            arguments: module:name of its arguments: a tuple, or a function that returns it.
            cluster: such as v5e:4x4 (TPU slice), h100:8x4 (GPUs a host x hosts), cpu:8, or a .toml file.
            save: the JSON file to write, in the working folder; what explain, compare, what_if and verify take.
            options: of autoshard.search by name, as docs/options.md lists them: donate_argnums "0", mesh "data=4,model=4", microbatches.
            pins: shardings to keep, by path of an argument, such as {"batch*": "data"}.
            json: the strategy as JSON instead of a report.
        """
        where = f"--cluster={self.limits.source(cluster)}", f"--save={self.limits.file(save)}"
        more = option_words(self.limits, options, pins)
        return await self._called("search", *self._of(program, arguments), *where, *more, *_shown(json))

    async def evaluate(
        self, program: str, arguments: str, cluster: str, mesh: str, specs: dict[str, str], save: str | None = None, json: bool = False
    ) -> str:
        """Predicts what a given sharding costs.

        Args:
            program, arguments, cluster, json: as for search.
            mesh: axes and sizes, outermost first, such as "data=4,model=2".
            specs: by path of an argument, or a pattern, its spec: {"batch*": "data", "*up*": "None,model"}; others are replicated.
            save: the JSON file to write.
        """
        where = [f"--cluster={self.limits.source(cluster)}", f"--mesh={mesh}"]
        given = [f"--in-spec={path}={spec}" for path, spec in specs.items()]
        given += [] if save is None else [f"--save={self.limits.file(save)}"]
        return await self._called("evaluate", *self._of(program, arguments), *where, *given, *_shown(json))

    async def explain(
        self,
        strategy: str,
        tensor: str | None = None,
        program: str | None = None,
        arguments: str | None = None,
        html: str | None = None,
        json: bool = False,
    ) -> str:
        """Says what a saved strategy does, where time and memory go; of a tensor, why it is sharded so.

        Args:
            strategy: a file that search saved, or a name of the library.
            tensor: the path of an argument, or the end of one; needs program and arguments.
            html: write the report as a page to this file instead.
        """
        words = self._of(program, arguments)
        words += [] if tensor is None else [f"--tensor={tensor}"]
        words += [] if html is None else [f"--html={self.limits.file(html)}"]
        return await self._called("explain", self.limits.source(strategy), *words, *_shown(json)) or f"saved to {html}"

    async def what_if(
        self,
        strategy: str,
        program: str | None = None,
        arguments: str | None = None,
        cluster: str | None = None,
        batch: int | None = None,
        options: Options | None = None,
        json: bool = False,
    ) -> str:
        """Says what other devices, meshes or batches would change about a saved strategy: searched again with its program, else estimated.

        Args:
            strategy, program, arguments, json: as for explain.
            cluster: other devices, such as v5e:8x8.
            batch: examples of the whole batch.
            options: mesh, microbatches or memory_limit_bytes, with the program.
        """
        words = self._of(program, arguments)
        words += [] if cluster is None else [f"--cluster={self.limits.source(cluster)}"]
        words += [] if batch is None else [f"--batch={batch}"]
        return await self._called("what-if", self.limits.source(strategy), *words, *option_words(self.limits, options), *_shown(json))

    async def compare(self, strategies: list[str], json: bool = False) -> str:
        """Puts saved strategies side by side; of two, says what differs and what that costs."""
        return await self._called("compare", *map(self.limits.source, strategies), *_shown(json))

    async def verify(self, program: str, arguments: str, strategy: str, target: str = "shardy", json: bool = False) -> str:
        """Holds a strategy's predicted collectives against those of the partitioner or a compiler, without devices.

        Args:
            target: shardy (the partitioner), cpu, tpu or gpu (compiled ahead of time).
        """
        words = [f"--strategy={self.limits.source(strategy)}", f"--target={target}"]
        return await self._called("verify", *self._of(program, arguments), *words, *_shown(json))

    async def sweep(
        self,
        program: str,
        arguments: str,
        clusters: list[str],
        batches: list[int] | None = None,
        options: Options | None = None,
        json: bool = False,
    ) -> str:
        """Compares clusters and batch sizes by predicted time and cost.

        Args:
            arguments: module:name of the arguments; with batches of a function of the batch size that returns them.
            clusters: such as ["v5e:4x4", "h100:8x4"].
            batches: batch sizes to compare.
        """
        words = [f"--clusters={','.join(map(self.limits.source, clusters))}"]
        words += [f"--batch={','.join(map(str, batches))}"] if batches else []
        return await self._called("sweep", *self._of(program, arguments), *words, *option_words(self.limits, options), *_shown(json))


def _shown(json: bool) -> list[str]:
    return ["--json"] if json else []
