"""The benchmarks run, and their arithmetic is right."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponents_are_those_of_power_laws(power, monkeypatch):
    """Seconds that grow as a power of the size give that power."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.search import exponent

    sizes = [100, 250, 1000, 8000]
    assert exponent(sizes, [3e-4 * n**power for n in sizes]) == pytest.approx(power)


@pytest.mark.slow
def test_search_benchmark_runs():
    """One small case prints its seconds, its gap and its memory as JSON."""
    command = [sys.executable, "-m", "benchmarks.search", "--cases", "gpt_2", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    sample = found["samples"]["gpt_2"]
    assert sample["trace"] > 0 and sample["search"] > 0 and 1e8 < sample["nbytes"] < 4e9
    assert 0.0 <= sample["gap"] <= 0.005 and sample["mesh"] == {"data": 2, "model": 4} and found["agreed"] is None


@pytest.mark.slow
def test_calls_benchmark_runs():
    """Calls of a step and of its jitted function are timed, applied and decorated; what the step adds is less than a call."""
    command = [sys.executable, "-m", "benchmarks.calls", "calls", "--leaves", "5", "--rounds", "3", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert [(each["how"], each["donated"]) for each in found["calls"]] == [(h, d) for h in ("apply", "parallelize") for d in (False, True)]
    assert all(each["jitted"]["median"] > 0 and each["step"]["median"] > 0 for each in found["calls"]) and found["llama"] is None


@pytest.mark.slow
def test_microbatches_benchmark_runs():
    """A step that agrees in 2, 4 and 8 microbatches, and one that is refused with its line, as JSON."""
    command = [sys.executable, "-m", "benchmarks.microbatches", "--programs", "mlp", "graph_network", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert [(each["program"], each["n"]) for each in found] == [(name, n) for name in ("mlp", "graph_network") for n in (2, 4, 8)]
    assert all(each["difference"] <= 1e-6 for each in found[:3])
    assert all(each["difference"] is None and "other_models.py:55" in each["refused"] for each in found[3:])


@pytest.mark.slow
def test_one_device_is_measured_beside_its_prediction(monkeypatch, tmp_path):
    """A step runs on this machine's device with the losses of the plain one, and what was measured is predicted again."""
    monkeypatch.syspath_prepend(ROOT)
    from autoshard import Cluster
    from benchmarks import one_device

    here, faster = Cluster.parse("cpu:1"), Cluster.parse("h100:1x1")
    plain, parts = (one_device.run("tiny", how, here, str(tmp_path / "lock")) for how in ("jit", "microbatches"))
    assert plain.losses == pytest.approx(parts.losses, rel=1e-3) and plain.losses[0] > plain.losses[-1] and not parts.refused
    assert min(parts.seconds, parts.predicted_seconds, parts.compiled_bytes) > 0 and parts.predicted_seconds > plain.predicted_seconds
    again = one_device.predicted_again(parts, faster)
    assert again.seconds == parts.seconds and again.predicted_seconds < parts.predicted_seconds
    shown = str(one_device.report([plain, again, one_device.Row("tiny", "remat auto", refused="no time was left")]))
    assert "tiny, remat auto: no time was left" in shown and "of 2 rows" in shown


@pytest.mark.slow
def test_pipelines_benchmark_runs():
    """A step in two stages is equal to the same on one device, in its schedule's order, with one send each way, as JSON."""
    command = [sys.executable, "-m", "benchmarks.pipelines", "--programs", "gpt_scan", "--stages", "2", "--schedules", "1f1b", "--json"]
    (found,) = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert found["difference"] <= 1e-5 and found["in_order"] and (found["activations"], found["gradients"]) == (1, 1)


def test_published_plans_cover_their_devices(monkeypatch):
    """The stages' meshes together have as many devices as the cluster."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import plans

    for plan in plans.PLANS:
        assert plan.stages * math.prod(plan.mesh.values()) == plan.cluster.n_devices, plan.name


@pytest.mark.slow
def test_a_published_plan_is_compared(monkeypatch):
    """Of a small model: it is evaluated with the numbers that it has, and ours is predicted to be no slower."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import models, plans

    make, cluster = partial(models.gpt, 6, 64, 4, 128, 16, 32), plans.Cluster.parse("a100:4x1")
    small = plans.Published("small", "nobody", make, cluster, 2, 4, {"data": 2, "model": 1}, pins=models.language(models.GPT))
    found = plans.row(small)
    assert found[2] == "2 stages of 2x1, 4 microbatches, 1f1b"
    assert float(found[plans.COLUMNS.index(">ratio")]) <= 1.0


def test_deep_benchmark_measures_small_programs(monkeypatch):
    """With room searches find something, with no time left too; under what a refusal names nothing is found, and no baseline fits."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import deep
    from benchmarks.models import mlp

    case = deep.Case(lambda: mlp(2, 64, 256, 64), "cpu:4")
    monkeypatch.setitem(deep.CASES, "small", case)
    monkeypatch.setattr(deep, "OPTIONS", {**deep.OPTIONS, "mesh": {"data": 4}})
    monkeypatch.setattr(deep, "TRIES", 1)
    program = case.program()
    least = deep.least_peak(case, program)
    found, refused = (deep.row("small", program, times, times * least, 1e-3) for times in (10.0, 0.01))
    assert found.peak_bytes <= 10 * least and found.step_seconds <= found.limited_step_seconds
    assert refused.step_seconds is refused.limited_step_seconds is None and refused.fits == ()
    assert all(text in str(deep.report([found, refused], 1e-3)) for text in ("small", "refused", "in 0.001 s"))


def test_deep_benchmark_ends_long_searches_and_keeps_rows(monkeypatch, tmp_path):
    """A search that may take no time is ended and said to be; rows are merged into the file by program and limit."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import deep
    from benchmarks.models import mlp

    case = deep.Case(lambda: mlp(2, 64, 256, 64), "cpu:4")
    monkeypatch.setitem(deep.CASES, "small", case)
    monkeypatch.setattr(deep, "FILE", tmp_path / "deep.json")
    program = case.program()
    assert deep.least_peak(case, program, 0.0) == math.inf
    ended, found = (deep.row("small", program, 2.0, 1e9, None, most) for most in (0.0, None))
    assert ended.over and ended.step_seconds is None and "ended" in str(deep.report([ended], None)) and not found.over
    for one in (replace(ended, times=1.5), ended, found):
        deep.record(one)
    assert [*deep.recorded().values()] == [found, replace(ended, times=1.5)]


@pytest.mark.slow
def test_one_program_benchmark_compiles_what_it_finds(monkeypatch):
    """Of a small model: collectives and FLOPs are the predicted ones, and the table says what differs where they are not."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import one_program
    from benchmarks.models import gpt_scan

    case = one_program.Case(partial(gpt_scan, 4, 32, 2, 64, 16, 16, dtype="float32"), "cpu:4", (2,), stages=2, microbatches=2)
    found = one_program.row("small", case, target="cpu")
    assert found.collectives and not found.differing and found.mesh == "2 x 2" and found.compiled_bytes > 0
    assert found.flops_ratio == pytest.approx(1.0, abs=0.01)
    assert "equal" in str(one_program.report([found]))
    other = replace(found, collectives=False, differing=("another",))
    assert "another" in str(one_program.report([other]))


@pytest.mark.slow
def test_harness_benchmark_runs():
    """A group JAX can run and one it cannot run all of: every case has an outcome, and none failed."""
    command = [sys.executable, "-m", "benchmarks.harnesses", "--quick", "--groups", "neg,lu", "--random", "1", "--processes", "1", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout)
    outcomes = found["outcomes"]
    assert len(outcomes) == 6 and {outcome["status"] for outcome in outcomes} <= {"equal", "unsupported"}
    assert all(outcome["sharded"] == ["search", "random"] for outcome in outcomes if outcome["group"] == "neg")


@pytest.mark.slow
def test_rules_benchmark_runs():
    """One group prints its share, and the differences with their reasons, as JSON."""
    command = [sys.executable, "-m", "benchmarks.rules", "--groups", "igamma", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)
    group, everything = found["shares"]
    assert group["group"] == "igamma" and group["ours"] == group["equations"] == everything["equations"] > group["theirs"]
    assert found["differences"] and all(difference["reasons"] for difference in found["differences"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the TPU compiler is installed")
def test_cost_model_benchmark_says_what_it_lacks():
    """A section that needs the TPU compiler says what to install, and the exit code tells."""
    command = [sys.executable, "-m", "benchmarks.cost_model", "flops", "--quick", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "pip install 'autoshard[tpu]'" in json.loads(done.stdout)["flops"]["failed"]


@pytest.mark.slow
def test_quality_benchmark_compares_what_is_predicted():
    """Without a TPU compiler the judge compares one program's plans: those of auto, with and without a mesh, and several of experts."""
    command = [sys.executable, "-m", "benchmarks.quality", "--predicted", "--models", "mlp", "--clusters", "v5e:2x4", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plans = {plan["plan"]: plan for plan in found["plans"]}
    assert plans["auto"]["predicted_seconds"] <= min(plan["predicted_seconds"] for plan in plans.values())
    assert {"auto, mesh given", "fully sharded", "tensor parallel"} <= set(plans)
    assert all(plan["scheduled_seconds"] is None and not plan["failure"] for plan in plans.values())
    assert len(found["goals"]) == 4 and all(goal["reached"] for goal in found["goals"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the TPU compiler is installed")
@pytest.mark.parametrize(
    "command", [["quality", "--models", "mlp", "--clusters", "v5e:2x4"], ["lowering", "--programs", "mlp"]], ids=" ".join
)
def test_benchmarks_of_schedules_say_what_they_lack(command):
    """Where schedules are asked for without the TPU compiler, the answer is what to install."""
    module, *options = command
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options], cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 1 and "pip install 'autoshard[tpu]'" in done.stderr


def test_sharding_experts_state_takes_the_largest_dimension_that_is_left(monkeypatch):
    """State is split over the data axis where its own specs leave the most; small arrays and what does not divide stay."""
    monkeypatch.syspath_prepend(ROOT)
    from jax.sharding import PartitionSpec as P

    from benchmarks.models import leaf
    from benchmarks.quality import _fully_sharded

    state = {"up": leaf(256, 1024), "norm": leaf(64), "odd": leaf(257, 128)}
    specs = {"batch*": P("data"), "state*['up']": P(None, "model")}
    found = _fully_sharded((state,), {"data": 4, "model": 2}, specs)
    assert found == {"batch*": P("data"), "state['up']": P("data", "model"), "state['norm']": P(None), "state['odd']": P(None, "data")}


LARGE = ("gpt_untied", "gpt_scan_remat", "llama", "t5", "vit", "resnet", "unet")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt", "moe_scan", "dlrm", "lstm", *[pytest.param(name, marks=pytest.mark.slow) for name in LARGE]])
def test_benchmark_models_and_their_tensor_parallelism_fit(name, monkeypatch):
    """Every model traces abstractly, and its hand-written specs name leaves it has, in sizes that divide."""
    monkeypatch.syspath_prepend(ROOT)
    import autoshard
    from benchmarks.models import MODELS

    function, args = MODELS[name].make()
    found = autoshard.evaluate(function, *args, cluster="v5e:2x4", mesh={"data": 2, "model": 4}, in_specs=MODELS[name].tensor_parallel)
    assert found.cost.peak_bytes > 1e9 and found.cost.flops > 5e10


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["gpt", "gpt_scan", "llama_scan", "moe", "t5", "vit", "mlp", "dlrm", "unet", "lstm"])
def test_benchmark_models_are_of_mixed_precision(name, monkeypatch):
    """Parameters, optimizer state and the loss are float32, and every product is of bfloat16, whose gradients come back as float32."""
    monkeypatch.syspath_prepend(ROOT)
    import jax
    import jax.numpy as jnp
    from jax.extend.core import jaxprs_in_params

    from benchmarks.models import MODELS

    def products(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("dot_general", "conv_general_dilated"):
                yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from products(inner)

    function, args = MODELS[name].make()
    traced = jax.make_jaxpr(function)(*args)
    floats = {leaf.dtype for leaf in jax.tree.leaves(args[0]) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {jnp.dtype(jnp.float32)} and traced.out_avals[-1].dtype == jnp.float32
    found = {operand.aval.dtype for product in products(traced.jaxpr) for operand in product.invars}
    assert found == {jnp.dtype(jnp.bfloat16)}


def test_models_of_a_single_dtype_cast_nothing(monkeypatch):
    """With parameters of the activations' dtype the state is bfloat16, as the cost model's documented figures have it."""
    monkeypatch.syspath_prepend(ROOT)
    import jax
    import jax.numpy as jnp

    from benchmarks import single_dtype

    for make, dtype in ((single_dtype.gpt_scan, jnp.bfloat16), (single_dtype.dlrm, jnp.float32)):
        assert {leaf.dtype for leaf in jax.tree.leaves(make()[1][0]["params"])} == {jnp.dtype(dtype)}


def test_budgets_are_read_and_replaced_in_a_context_alone(monkeypatch):
    """What searches read is recorded, whole numbers stay so at half, and constants change wherever they are imported."""
    monkeypatch.syspath_prepend(ROOT)
    from autoshard.budgets import BUDGETS
    from autoshard.microbatch import batch, plan
    from benchmarks import budgets

    usual, share = BUDGETS.least_gain, plan.LEAST_SHARE
    with budgets.recorded() as read, budgets.replaced([(BUDGETS, "least_gain")], 0.5):
        assert BUDGETS.least_gain == 0.5
    assert "least_gain" in read and "far_bound" not in read and BUDGETS.least_gain == usual
    found = {name: (places, value) for name, places, value in budgets.constants("microbatch")}
    places, value = found["plan.LEAST_SHARE"]
    assert value == share and {(plan, "LEAST_SHARE"), (batch, "LEAST_SHARE")} <= set(places)
    with budgets.replaced(places, 1.0):
        assert batch.LEAST_SHARE == plan.LEAST_SHARE == 1.0
    assert share == batch.LEAST_SHARE and budgets.scaled(3, 0.5) == 2 and budgets.scaled(1, 0.5) == 1
    tried: list[str] = []
    known = {"one": budgets.Found(1.0, 1.0), "two": budgets.Found(1.0, 1.0)}
    monkeypatch.setattr(budgets, "searched", lambda search: budgets.Found(search(), 1.0))
    searches = {"one": lambda: tried.append("one") or 1.0 + (BUDGETS.least_gain == 2 * usual), "two": lambda: tried.append("two") or 1.0}
    found = budgets.effect("least_gain", [(BUDGETS, "least_gain")], usual, searches, known)
    assert found.shows and (found.programs, found.steps, tried) == (("one",), (1.0, 2.0), ["one", "one"])
    shown = budgets.Effect("some", 1.0, ("gpt",), (1.0, 1.0), (1.1, 0.4))
    assert shown.shows and not budgets.Effect("none", 1.0, ("gpt",), (1.0, 1.0), (1.1, 0.9)).shows
