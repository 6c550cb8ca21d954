"""What agents get: tools over stdin and stdout, on files of one folder, within limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autoshard.cli.limited import Limits, Refused, option_words

PROGRAM = "import jax.numpy as jnp\nargs = jnp.ones((64, 32)), jnp.ones((32, 16))\ndef step(x, w): return (x @ w).sum()\n"


@pytest.fixture
def limits(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return Limits(tmp_path, 120.0, 8e9)


@pytest.mark.parametrize("name", ["/etc/passwd", "../found.json", "a/../../x.json", "--save=x", "link/x.json"])
def test_files_outside_the_folder_are_refused(limits, tmp_path_factory, name):
    """By absolute paths, by .., by links; and what looks like an option."""
    (limits.folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
    for refusing in (limits.file, limits.source):
        with pytest.raises(Refused, match="working folder"):
            refusing(name)
    assert limits.file("runs/found.json") == "runs/found.json" and limits.source("gpt_2_v5e_4x4_auto") == "gpt_2_v5e_4x4_auto"


@pytest.mark.parametrize("name", ["os:system", "train", "train:step; import os", "shutil:rmtree", "..train:step"])
def test_programs_are_modules_of_the_folder(limits, name):
    """Functions of other libraries, which a call would run, are none."""
    with pytest.raises(Refused):
        limits.program(name)
    assert limits.program("train:step") == "train:step" and limits.program("autoshard.demo.gpt:train_step")


def test_options_are_those_of_a_search(limits):
    """Under their names in Python; files among them are checked."""
    assert option_words(limits, {"mesh": "data=8", "donate_argnums": 0, "padding": False, "interruptible": False}, {"x": "data"}) == [
        *("--mesh=data=8", "--donate=0", "--no-padding", "--pin=x=data")
    ]
    for wrong in ({"save": "/x"}, {"start": "/x.json"}):
        with pytest.raises(Refused):
            option_words(limits, wrong)


def test_calls_are_stopped_at_their_limits(tmp_path):
    """A call that takes too long, or too much memory, ends with a message that says which."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    slow = "search", "slow:step", "--args", "slow:args", "--cluster", "cpu:2"
    with pytest.raises(Refused, match=r"10\.0 ms"):
        Limits(tmp_path, 0.01, 8e9).run(*slow)
    if sys.platform == "linux":
        with pytest.raises(Refused, match="memory"):
            Limits(tmp_path, 60.0, 1e6).run(*slow)
    with pytest.raises(Refused, match="neither"):
        Limits(tmp_path, 60.0, 8e9).run("explain", "nothing.json")


def test_the_command_says_what_it_needs(run, monkeypatch, tmp_path):
    """Without the SDK, and without the folder."""
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    code, _, err = run("mcp")
    assert code == 2 and "pip install 'autoshard[mcp]'" in err
    code, _, err = run("mcp", "--folder", tmp_path / "none")
    assert code == 2 and "--folder names a folder" in err


@pytest.mark.slow
def test_an_agent_searches_and_asks_over_stdio(tmp_path):
    """The SDK's own client: all tools are there, a search is saved and explained, and a file outside is refused."""
    anyio, client = pytest.importorskip("anyio"), pytest.importorskip("mcp.client.client")
    stdio = pytest.importorskip("mcp.client.stdio")
    (tmp_path / "train.py").write_text(PROGRAM)
    source = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *sys.path[1:]]), "JAX_PLATFORMS": "cpu"}
    command = ["-m", "autoshard", "mcp", "--folder", str(tmp_path)]

    async def ask() -> None:
        server = stdio.StdioServerParameters(command=sys.executable, args=command, env=environment)
        async with client.Client(stdio.stdio_client(server)) as agent:
            tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
            assert set(tools) == {"search", "evaluate", "explain", "what_if", "compare", "verify", "sweep"}
            assert "Searches how to shard" in tools["search"].description
            program = {"program": "train:step", "arguments": "train:args"}
            found = await agent.call_tool("search", {**program, "cluster": "cpu:8", "save": "found.json"})
            assert not found.is_error and "step time" in found.content[0].text, found
            told = await agent.call_tool("explain", {"strategy": "found.json"})
            assert not told.is_error and "By layer" in told.content[0].text
            refused = await agent.call_tool("explain", {"strategy": "/etc/hosts.json"})
            assert refused.is_error and "working folder" in refused.content[0].text

    anyio.run(ask)
    assert (tmp_path / "found.json").exists()
