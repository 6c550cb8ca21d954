"""Options of a search go together: what is planned runs, and computes what one device does."""

import inspect
from dataclasses import fields
from pathlib import Path

import jax
import pytest

import autoshard
from autoshard.cli.commands import parser
from autoshard.errors import AutoshardError, ClusterError
from autoshard.options import OPTIONS, table
from autoshard.plan.request import Request
from benchmarks import options
from benchmarks.options import CLUSTER, REFUSED, asked, examples, pairs, tried


def searched(name, *names, **more):
    args, given = asked(examples()[name], *names)
    return autoshard.search(examples()[name].step, *args, cluster=CLUSTER, **given, **more)


@pytest.mark.slow
def test_stages_take_what_other_plans_take():
    """A start, batch axes, state on hosts and a confirmation on the devices, all at once; results are those of one device."""
    names = ("stages=2", "start", "batch_axes", "offload='optimizer'", "confirm='devices'", "donate_argnums", "microbatches=2")
    strategy = searched("scanned", *names)
    assert strategy.in_specs[1]["x"][0] == "data"
    state, _ = strategy.shard(*examples()["scanned"].args)
    moments = [x for x in jax.tree.leaves(state["optimizer"]) if x.ndim]
    assert len(strategy.offload) == 2 and {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    assert strategy.confirmation.taken.measure == "timed"
    assert not examples()["scanned"].differs(strategy)


@pytest.mark.slow
def test_stages_keep_the_shardings_that_arguments_have():
    """On a mesh of all devices they are, of whose axes each stage has a part."""
    strategy = searched("unrolled", "stages=2", "pins='arguments'")
    assert all(spec == jax.P(None, None, "model") for spec in strategy.in_specs[0]["params"].values())
    assert strategy.mesh_shape["model"] * strategy.mesh_shape["data"] == 4


@pytest.mark.slow
def test_a_mesh_of_some_devices_is_that_of_stages():
    """With plan='full' their number follows; one of all devices is that of the step without stages."""
    assert searched("scanned", "plan='full'", mesh={"data": 4}).mesh_shape == {"stage": 2, "data": 4}
    assert searched("scanned", "plan='full'", mesh={"data": 8}).mesh_shape == {"data": 8}
    with pytest.raises(ClusterError, match="has 3"):
        searched("scanned", "stages=2", mesh={"data": 3})


@pytest.mark.slow
def test_a_compiler_confirms_stages():
    """The programs of all tasks are compiled for the cluster, and what they need is recorded."""
    strategy = searched("scanned", "stages=2", "microbatches=2", confirm="compiler", mesh={"data": 4})
    found = strategy.confirmation.taken
    assert found.measure == "corrected" and found.seconds == pytest.approx(strategy.cost.makespan_seconds, rel=0.2)
    assert found.peak_bytes == pytest.approx(strategy.cost.peak_bytes, rel=0.5)
    assert found.flops > 0


def test_refusals_are_those_of_the_table():
    """Those of mathematics alone."""
    for name, refused in REFUSED.items():
        for names in refused:
            with pytest.raises(AutoshardError):
                searched(name, *names)


def test_the_page_of_options_has_them_all():
    """As the table is that the command line and Python are made from; signatures have its names and defaults."""
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text("utf-8")
    assert table() in page
    others = {*inspect.signature(autoshard.parallelize).parameters} - {*OPTIONS, "fn"}
    assert not [name for name in others if f"| `{name}`" not in page and f", `{name}` |" not in page]
    search = parser()._subparsers._group_actions[0].choices["search"]  # pyright: ignore[reportOptionalMemberAccess]
    flags = {action.option_strings[-1] for action in search._actions if action.option_strings}
    assert not [flag for flag in flags - {"--help", "--debug", "--json-schema", "--args", "--pins-from"} if flag not in page]
    for function in (autoshard.search, autoshard.parallelize):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in OPTIONS} == {name: each.default for name, each in OPTIONS.items()}
    assert {*OPTIONS} <= {*inspect.signature(autoshard.frontier).parameters}
    request = {each.name: getattr(Request.of(), each.name) for each in fields(Request)}
    assert all(request[name] == each.default for name, each in OPTIONS.items() if name in request and name != "searcher")


@pytest.mark.slow(minutes=20)
@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_every_pair_of_options_works(name):
    """On both steps, or is refused as the table says."""
    wrong = {pair: why for pair in pairs() if (why := tried(examples()[name], *pair)) and not options.is_refused(name, pair)}
    assert not wrong
