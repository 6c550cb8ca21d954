from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from problems import eager_cluster
from programs import concrete, mlp
from strategy_records import EXAMPLE

import autoshard
from autoshard.ask.verification import expected
from autoshard.errors import StrategyError
from autoshard.ir import Collective, Mesh
from autoshard.run.step import platform_options
from autoshard.verify import Ahead, Row
from autoshard.verify.aot import COMPILERS
from tests.requirements import needs_tpu_compiler

MESH = {"x": 2, "y": 4}


@pytest.fixture(scope="module")
def program():
    fn, args = mlp()
    return fn, args, autoshard.search(fn, *args, cluster=eager_cluster(), mesh=MESH)


@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_a_strategy_does_what_it_says(program, target):
    """Of the partitioner's and of the compiler's collectives, none is missing, none is new, and all have the predicted size."""
    fn, args, strategy = program
    told = []
    found = autoshard.verify(strategy, fn, *args, target=target, progress=lambda *what: told.append(what))
    assert told == ([("compiling train_step for this machine's devices", 0.0)] if target == "cpu" else [])
    assert found.exact and found.bytes_ratio == 1.0
    assert sum(row.actual_count for row in found.rows) == sum(c.count for c in strategy.cost.collectives) > 0
    assert (found.actual_peak_bytes or 0) > 0 or target == "shardy"


def test_arrays_do_for_types(program):
    """Real arguments, wherever they lie, give the same answer as abstract ones."""
    fn, args, strategy = program
    assert autoshard.verify(strategy, fn, *concrete(args)) == autoshard.verify(strategy, fn, *args)


def test_a_mesh_needs_no_devices():
    """A strategy for more devices than there are is held against the partitioner all the same."""
    fn, args = mlp(layers=1)
    strategy = autoshard.search(fn, *args, cluster=eager_cluster("v5e:4x8"), mesh={"x": 4, "y": 8})
    assert autoshard.verify(strategy, fn, *args).exact
    with pytest.raises(autoshard.ClusterError, match=r"32, got 8"):
        autoshard.verify(strategy, fn, *args, target="cpu")


def test_a_difference_shows(program):
    """Where the prediction lacks a collective, the report marks its row and the ratio is not one."""
    fn, args, strategy = program
    cost = strategy.cost
    fewer = replace(strategy.record, cost=replace(cost, collectives=cost.collectives[1:]))
    found = autoshard.verify(autoshard.Strategy(fewer), fn, *args)
    assert not found.exact and found.bytes_ratio > 1.0
    assert str(found).count("differs") == 1 and "differs" in found._repr_html_()


def test_a_small_difference_is_named(program):
    """Where both sides read alike, as rounded, the row says by how much they differ."""
    fn, args, strategy = program
    found = autoshard.verify(strategy, fn, *args)
    rows = (Row("all_gather", ("data",), 13, 13, 853e6, 853e6 + 400), Row("all_reduce", ("data",), 2, 2, 4e6, 8e6))
    shown = str(replace(found, rows=rows))
    assert shown.count("differs") == 2 and shown.count("differs by 400 B") == 1


def test_json_says_it_all(program):
    """A verification is plain JSON, round numbers and all."""
    fn, args, strategy = program
    found = json.loads(json.dumps(autoshard.verify(strategy, fn, *args).to_json()))
    assert found["exact"] is True and found["mesh"] == MESH
    assert found["rows"][0].keys() == Row.__dataclass_fields__.keys()


def test_a_loaded_strategy_is_verified(program, tmp_path):
    """What was saved can be held against the partitioner in another process."""
    fn, args, strategy = program
    strategy.save(tmp_path / "s.json")
    assert autoshard.verify(autoshard.load(tmp_path / "s.json"), fn, *args).exact


def test_wrong_input_is_refused(program):
    """An unknown target and another program are named for what they are."""
    fn, args, strategy = program
    with pytest.raises(StrategyError, match=r"one of \['cpu', 'gpu', 'shardy', 'tpu'\], got 'abacus'"):
        autoshard.verify(strategy, fn, *args, target="abacus")
    with pytest.raises(StrategyError):
        autoshard.verify(strategy, lambda *a: jax.tree.map(jnp.sin, a), *args)
    with pytest.raises(StrategyError, match=r"got <function .* first\. Call verify\(strategy, fn, \*args\)"):
        autoshard.verify(fn, strategy, *args)


def test_no_collectives_is_a_ratio_of_one():
    """A program without communication on either side agrees."""
    strategy = autoshard.search(lambda x: x + 1.0, jax.ShapeDtypeStruct((8, 8), np.float32), cluster="cpu:8", mesh={"data": 8})
    found = autoshard.verify(strategy, lambda x: x + 1.0, jax.ShapeDtypeStruct((8, 8), np.float32))
    assert found.exact and found.bytes_ratio == 1.0 and found.mesh == Mesh.of({"data": 8})


def test_flops_of_the_compiled_program_are_the_predicted_ones(program):
    """Without any rewriting the compiler multiplies what the cost model counts; the report has it in its one table."""
    fn, args, strategy = program
    found = autoshard.verify(strategy, fn, *args, target="cpu")
    assert found.actual_flops == found.predicted_flops == strategy.cost.flops and found.near
    assert "FLOPs" in str(found) and "peak memory" in str(found)


def test_targets_say_what_is_missing(program):
    """A TPU or GPU compile of a strategy for something else, and cycles of what has none."""
    fn, args, strategy = program
    with pytest.raises(autoshard.ClusterError, match=r"this strategy is for 'v5e:2x4'.*h100:8x1"):
        autoshard.verify(strategy, fn, *args, target="gpu")
    with pytest.raises(StrategyError, match=r"cycles are what the TPU compiler schedules, got target 'cpu'"):
        autoshard.verify(strategy, fn, *args, target="cpu", cycles=True)
    other = autoshard.search(fn, *args, cluster="cpu:8", mesh=MESH)
    with pytest.raises(autoshard.ClusterError, match=r"this strategy is for 'cpu:8'.*v5e:2x4"):
        autoshard.verify(other, fn, *args, target="tpu")


def test_a_program_that_does_not_fit_is_a_result(program, monkeypatch):
    """The compiler's refusal is reported with both sizes, and nothing agrees."""
    fn, args, strategy = program
    refused = Ahead("", None, 50e9, 16.9e9, False, 1.0)
    monkeypatch.setattr("autoshard.ask.verification.compile_ahead", lambda *_: refused)
    found = autoshard.verify(strategy, fn, *args, target="tpu")
    assert found.fits is False and not found.exact and not found.near
    assert "Does not fit: the compiler needs 50.0 GB of memory, of the 16.9 GB a program may use" in str(found)


def test_a_tpu_program_is_held_against_all_predictions(program, monkeypatch):
    """Collectives, flops, memory and cycles come out of the compiler's text; here a stand-in's."""
    fn, args, strategy = program
    hlo = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[64,64]{1,0} parameter(0)
  %d = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"estimated_cycles":"3000"}
  ROOT %a = f32[64,64]{1,0} all-reduce(%d), replica_groups=[2,4]<=[8], to_apply=%add
}
"""
    monkeypatch.setattr("autoshard.ask.verification.compile_ahead", lambda *_: Ahead(hlo, 2e6, 3e6, None, True, 1.0))
    found = autoshard.verify(strategy, fn, *args, target="tpu", cycles=True)
    assert sum(row.actual_bytes for row in found.rows) == 64 * 64 * 4 and not found.exact and not found.near
    assert found.actual_flops == 2 * 64**3 and found.actual_peak_bytes == 2e6 and found.needed_bytes == 3e6 and found.fits
    share = autoshard.Cluster.parse("v5e:2x4").device.matrix_efficiency
    assert found.actual_compute_seconds == pytest.approx(3000 / 1.5e9 / share), "on the scale of predictions"
    assert "computing" in str(found) and "It fits" in str(found)
    assert any("peak memory" in line and "differs" in line for line in str(found).splitlines())


def test_gpus_need_not_be_there(program, monkeypatch):
    """A strategy for GPUs is compiled for those of its cluster; what needs more than a program may use does not fit, and is shown."""
    fn, args, _ = program
    strategy = autoshard.search(fn, *args, cluster="h100:4x2", mesh=MESH)
    hlo = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    asked = []

    def compiled(_lowered, mesh, topology, _cycles, options):
        asked.append((mesh, topology.platform, topology.options["topology"], options))
        return Ahead(hlo, 61e9, 61e9, topology.memory_limit_bytes, False, 1.0)

    monkeypatch.setattr("autoshard.ask.verification.compile_ahead", compiled)
    buckets = "xla_gpu_reduce_scatter_combine_threshold_bytes"
    found = autoshard.verify(strategy, fn, *args, target="gpu", compiler_options={"xla_an_option": True, buckets: 3}, bucket_bytes=2)
    options = {"xla_an_option": True, **platform_options("gpu", 2), buckets: 3}
    assert asked == [(strategy.record.mesh, "cuda", "2x1x4", options)] and 2 in options.values()
    assert found.fits is False and not found.near and found.actual_flops == 2 * 64**3
    assert "Does not fit: the compiler needs 61.0 GB of memory, of the 60.0 GB a program may use" in str(found) and "FLOPs" in str(found)


def test_one_device_sends_nothing():
    """On a mesh of one device no collective is predicted, whatever the plan would send on more; none is found."""
    fn, args = mlp()
    strategy = autoshard.search(fn, *args, cluster="h100:1", mesh={"data": 1}, searcher="fully_sharded")
    assert strategy.cost.collectives == () and autoshard.verify(strategy, fn, *args).exact


def test_gpus_that_are_there_are_compiled_for(program, monkeypatch):
    """With enough devices of the platform the program is compiled for them; here the CPU's stand for them."""
    fn, args, _ = program
    strategy = autoshard.search(fn, *args, cluster="h100:8", mesh=MESH)
    monkeypatch.setattr("autoshard.ask.verification.devices_here", lambda _: jax.devices("cpu"))
    monkeypatch.setattr("autoshard.ask.verification.compile_ahead", None)
    assert autoshard.verify(strategy, fn, *args, target="gpu").actual_flops == strategy.cost.flops


@pytest.mark.skipif(not COMPILERS["cuda"].installed, reason="needs XLA:GPU, the compiler")
def test_the_gpu_compiler_makes_what_was_predicted(program):
    """Compiled ahead of time: it fits, with the predicted collectives and flops, and the peak but for cuBLAS's workspace of 4 MiB."""
    fn, args, _ = program
    strategy = autoshard.search(fn, *args, cluster="h100:4x2", mesh=MESH)
    found = autoshard.verify(strategy, fn, *args, target="gpu")
    assert found.exact and found.fits and found.flops_ratio == 1.0
    assert found.actual_peak_bytes == pytest.approx(found.predicted_peak_bytes + 4 * 2**20, rel=0.01)


@needs_tpu_compiler
def test_the_tpu_compiler_makes_what_was_predicted(program):
    """Compiled ahead of time by the real compiler: same flops, and it fits."""
    fn, args, strategy = program
    found = autoshard.verify(strategy, fn, *args, target="tpu")
    assert found.fits and found.flops_ratio == pytest.approx(1, abs=0.01) and found.actual_peak_bytes


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("cluster", ["v5e:1x1", "v5p:1x1x1"])
def test_the_tpu_compiler_takes_one_chip(program, cluster):
    """Which is less than a host."""
    fn, args, _ = program
    found = autoshard.verify(autoshard.search(fn, *args, cluster=cluster), fn, *args, target="tpu")
    assert found.exact and found.fits and found.flops_ratio == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("mesh", [{"slice": 2, "data": 4}, {"data": 8}])
def test_the_tpu_compiler_divides_collectives_between_slices_as_predicted(mesh):
    """Two slices: what goes within and what across is as planned, for an axis across, one within and one over both."""
    width, shape = 1024, jax.ShapeDtypeStruct

    def train_step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - gradient, loss

    args = shape((width, width), jnp.float32), shape((2**19, width), jnp.float32)
    pins = {"x": PartitionSpec(tuple(mesh), None), "w": PartitionSpec(None, "data")}
    strategy = autoshard.search(train_step, *args, cluster="2*v5e:2x2", mesh=mesh, pins=pins, donate_argnums=0)
    found = autoshard.verify(strategy, train_step, *args, target="tpu")
    large = {(row.kind, row.mesh_axes): row.agrees or abs(row.actual_bytes - row.predicted_bytes) <= 1024 for row in found.rows}
    assert found.as_predicted and all(large.values())
    assert {("all_gather", ("data",)), ("all_reduce", ("slice" if "slice" in mesh else "data",))} <= set(large)


def test_only_the_strategys_own_compiler_is_expected_to_rewrite_its_plan():
    """What the cluster's compiler makes of a collective counts for that target; the partitioner and other compilers have the plan."""
    made = Collective("all_reduce", ("data",), 4096.0, 1)
    planned = Collective("all_reduce", ("data",), 4096.0, 8, compiled=(made,))
    cost = replace(EXAMPLE.cost, collectives=(planned,))
    for cluster, target, found in (
        *(("v5e:2x4", "tpu", made), ("v5e:2x4", "shardy", planned), ("v5e:2x4", "cpu", planned)),
        *(("h100:8", "gpu", made), ("h100:8", "shardy", planned)),
    ):
        record = replace(EXAMPLE, cost=cost, cluster=autoshard.Cluster.parse(cluster).to_dict())
        assert expected(record, target) == (found,)


def test_bfloat16_on_the_cpu_is_explained():
    """XLA:CPU sends bfloat16 as float32: the report says so where bytes differ, and only there."""

    def product(w, x):
        return x @ w

    for dtype, said in ((jnp.bfloat16, True), (jnp.float32, False)):
        args = jax.ShapeDtypeStruct((64, 32), dtype), jax.ShapeDtypeStruct((16, 64), dtype)
        strategy = autoshard.evaluate(
            product, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=(jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec())
        )
        found = autoshard.verify(strategy, product, *args, target="cpu")
        assert ("XLA:CPU computes, sends and stores bfloat16 as float32" in " ".join(str(found).split())) is said


@pytest.mark.parametrize("ratio, words", [(1.1, "As predicted: "), (1.7, "Collectives as predicted, memory not: ")])
def test_a_peak_that_is_far_off_is_in_the_verdict(program, ratio, words):
    """Exact collectives do not make a far peak as predicted; it fits, and the exit code stays that of the collectives."""
    fn, args, strategy = program
    found = replace(autoshard.verify(strategy, fn, *args), target="cpu", actual_peak_bytes=ratio * strategy.cost.peak_bytes)
    assert found.as_predicted and words in str(found) and ("differs" in str(found)) == (ratio == 1.7)


def test_a_peak_of_other_devices_says_whose_it_is(program):
    """A TPU's strategy compiled for CPUs says for what its peak was predicted, where that is far off; one for CPUs does not."""
    fn, args, strategy = program
    found = autoshard.verify(strategy, fn, *args, target="cpu")
    far = replace(found, actual_peak_bytes=3 * strategy.cost.peak_bytes)
    words = "The peak was predicted for v5e:2x4, and compilers of other devices store other arrays."
    assert words in " ".join(str(far).split())
    assert "was predicted for" not in str(replace(found, actual_peak_bytes=strategy.cost.peak_bytes))
    own = autoshard.search(fn, *args, cluster="cpu:8", mesh=MESH)
    assert autoshard.verify(own, fn, *args, target="cpu").predicted_for == ""
