"""What-ifs are searches of the same program under one change: with the same options, and with what the first search computed."""

import gc
import weakref
from functools import cache

import equinox
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs import two_products, two_products_step

import autoshard
from autoshard.errors import ClusterError, InfeasibleError, ShardingError, StrategyError, TraceError
from autoshard.problem.cost_tables import CostTables

OPTIONS = {"cluster": "v5e:2x4", "searcher": "dynamic_programming", "donate_argnums": 0}


@cache
def strategy():
    return autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, **OPTIONS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "program"),
    [
        ({"pins": {"*up*": P(None, "data")}}, {"mesh": {"data": 8}, "pins": {"*up*": P(None, "data")}}),
        ({"mesh": {"data": 2, "model": 4}}, {"mesh": {"data": 2, "model": 4}}),
        ({"batch": 64}, {"mesh": {"data": 8}}),
        ({"cluster": "v5e:4x4", "mesh": {"data": 16}}, {"mesh": {"data": 16}, "cluster": "v5e:4x4"}),
        ({"microbatches": 4}, {"mesh": {"data": 8}, "microbatches": 4}),
    ],
    ids=lambda change: ",".join(change),
)
def test_a_what_if_is_the_search_with_that_change(change, program):
    """Its strategy has the cost that a search from the function has under the same change, and both sides' figures are theirs."""
    found = strategy().what_if(**change)
    searched = autoshard.search(two_products_step, *two_products(change.get("batch", 256)), **{**OPTIONS, **program})
    assert found.strategy.cost.makespan_seconds == pytest.approx(searched.cost.makespan_seconds, rel=1e-9)
    assert found.data.before.step_seconds == strategy().cost.makespan_seconds
    assert found.data.after.step_seconds == found.strategy.cost.makespan_seconds
    assert found.strategy.record.program.fingerprint == searched.record.program.fingerprint
    assert next(iter(change)) in str(found).splitlines()[0]


def test_only_another_batch_is_traced_again(monkeypatch):
    """Other pins, meshes and clusters take the program as it was traced."""
    found = strategy()
    monkeypatch.setattr("autoshard.plan.prepared.trace", None)
    assert found.what_if(cluster="v5e:4x4").strategy.mesh_shape
    with pytest.raises(TypeError):
        found.what_if(batch=64)


def test_a_search_s_own_pins_stay():
    """They hold in a what-if, and give way to one of the same tensor."""
    pinned = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, pins={"*up*": P("data"), "x": P()}, **OPTIONS)
    (up,) = (t for t in pinned.what_if(pins={"x": P("data")}).strategy.record.arguments if "up" in t.path)
    assert up.spec == ("data", None)
    found = pinned.what_if(pins={"*up*": P()}).strategy
    assert [t.spec for t in found.record.arguments if "up" in t.path or t.path == "x"] == [(None, None), (None, None)]


def test_a_question_s_pin_comes_before_every_pin_of_the_search():
    """Also before those of later patterns that match the same tensor."""
    pinned = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, pins={"*up*": P(), "*params*": P()}, **OPTIONS)
    (up,) = (t for t in pinned.what_if(pins={"*up*": P("data")}).strategy.record.arguments if "up" in t.path)
    assert up.spec == ("data", None)


def test_a_strategy_from_a_file_wants_its_program(tmp_path):
    """It says so; with the program it gives the same, for another batch too."""
    strategy().save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    with pytest.raises(StrategyError, match="with_program"):
        loaded.what_if(batch=64)
    with pytest.raises(StrategyError, match="with_program"):
        loaded.explain("up")
    whole = loaded.with_program(two_products_step, *two_products())
    assert whole.what_if(batch=64).data == strategy().what_if(batch=64).data


@pytest.mark.parametrize(
    ("change", "error"), [({"batch": 0}, StrategyError), ({"batch": True}, StrategyError), ({"mesh": {"data": 3}}, ClusterError)]
)
def test_what_cannot_be_is_refused(change, error):
    """A batch is a positive number, and a mesh covers the devices."""
    with pytest.raises(error):
        strategy().what_if(**change)


def test_questions_of_the_wrong_type_say_what_they_take():
    """A tensor is a name, and its other layout a PartitionSpec."""
    with pytest.raises(StrategyError, match=r"given by its name, got 3"):
        strategy().explain(3)
    with pytest.raises(StrategyError, match=r"spec= is a PartitionSpec, got 'data'"):
        strategy().explain("up", spec="data")
    with pytest.raises(TypeError, match=r"^Strategy.what_if\(\) got an unexpected keyword argument 'clusters'"):
        strategy().what_if(clusters="v5e:4x4")


@pytest.mark.slow
def test_modules_are_traced_with_another_batch_and_not_kept_alive():
    """Of Flax NNX and Equinox modules the strategy keeps the types alone, from which another batch is traced."""

    def forward(model, x):
        return model(x)

    def mapped(model, x):
        return jax.vmap(model)(x)

    model, x = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jnp.ones((64, 16))
    other = equinox.nn.MLP(16, 32, 64, 1, key=jax.random.key(0))  # with activation functions and numbers, which are static
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves((nnx.state(model), equinox.filter(other, equinox.is_array)))]
    options = {"mesh": {"data": 8}, "cluster": "cpu:8", "searcher": "dynamic_programming"}
    found = autoshard.search(forward, model, x, **options), autoshard.search(mapped, other, x, **options)
    del model, other
    gc.collect()
    assert len(arrays) == 6 and not any(array() is not None for array in arrays)
    for strategy in found:
        answer = strategy.what_if(batch=128)
        assert answer.strategy.record.arguments[-1].shape == (128, 16)
        assert answer.strategy.what_if(batch=256).strategy.record.arguments[-1].shape == (256, 16)
        assert "batch=128 (dim 0 of x, 64 now)" in str(answer)


def test_static_arguments_stay_as_they_are():
    """Of a jitted step they are no arrays, and another batch leaves them."""
    step = jax.jit(lambda w, x, n: sum(jnp.sum(x @ w) for _ in range(n)), static_argnums=2)
    found = autoshard.search(step, jnp.ones((16, 16)), jnp.ones((64, 16)), 2, mesh={"data": 8}, cluster="cpu:8", searcher="data_parallel")
    assert found.what_if(batch=128).strategy.record.arguments[-1].shape == (128, 16)


def test_a_batch_that_the_step_cannot_compute_is_refused_by_size():
    """The error of a user's shard_map says which arrays got which size, and what of them does not divide."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w, x):
        return jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))(w, x)

    found = autoshard.search(step, jnp.ones((16, 16)), jnp.ones((64, 16)), cluster="cpu:8", searcher="data_parallel")
    with pytest.raises(TraceError, match=r"batch=100\) .*\(dim 0 of x, 64 now\).*8 does not evenly divide 100"):
        found.what_if(batch=100)


def test_the_search_s_memory_limit_stays():
    """It holds on devices of the same memory, for any change, and gives way to one of the question."""
    free = strategy()
    limit = 1.2 * free.cost.peak_bytes
    bound = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, memory_limit_bytes=limit, **OPTIONS)
    with pytest.raises(InfeasibleError):
        bound.what_if(batch=4096)
    found = bound.what_if(pins={"x": P("data")}).strategy
    assert found.cost.peak_bytes <= limit and found.record.memory_limit_bytes == limit
    assert bound.what_if(memory_limit_bytes=1e9).strategy.cost.peak_bytes == free.cost.peak_bytes
    assert bound.what_if(cluster="v5p:2x2x1", mesh={"data": 4}).strategy.record.memory_limit_bytes is None
    assert "memory_limit_bytes allows" in str(bound.explain())


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"memory_limit_bytes": 1.25e6}, {"batch": 512, "memory_limit_bytes": 1.3e6}], ids=["less", "more"])
def test_where_nothing_fits_microbatches_and_recomputation_are_tried(change):
    """As in a search within that memory, and the answer says in how many microbatches its step is."""
    found = strategy().what_if(**change)
    batch, limit = change.get("batch", 256), change["memory_limit_bytes"]
    searched = autoshard.search(two_products_step, *two_products(batch), mesh={"data": 8}, memory_limit_bytes=limit, **OPTIONS)
    assert found.strategy.microbatches == searched.microbatches > 1
    assert found.strategy.cost.makespan_seconds == pytest.approx(searched.cost.makespan_seconds, rel=1e-9)
    assert found.strategy.cost.peak_bytes <= limit < strategy().cost.peak_bytes
    assert f"microbatches 1 {searched.microbatches} " in " ".join(str(found).split())


@pytest.mark.slow
def test_where_nothing_fits_at_all_it_says_what_was_not_tried():
    """In the words of a search; of a strategy whose own microbatches do not fit, fewer and more are tried."""
    two = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, microbatches=2, **OPTIONS)
    less, least = 1.25e6, 1.115e6  # the arguments take 1.114 MB
    assert two.what_if(memory_limit_bytes=less).strategy.microbatches == strategy().what_if(memory_limit_bytes=less).strategy.microbatches
    for one in (strategy(), two):
        with pytest.raises(InfeasibleError, match=r"in microbatches, of which .* Not tried: pipelines \(stages=2\)\."):
            one.what_if(memory_limit_bytes=least)


def test_a_search_s_own_options_stay():
    """Microbatches, recomputation, donation and what is on hosts are those of the strategy for another batch as well."""

    def adam(state, x):
        value, grads = jax.value_and_grad(lambda params: jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2))(state["params"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, value

    params, x = two_products()
    state = {"params": params["params"], "moments": params["params"]}
    found = autoshard.search(adam, state, x, mesh={"data": 8}, offload="optimizer", microbatches=2, remat="full", **OPTIONS)
    for change in ({"batch": 512}, {"mesh": {"data": 2, "model": 4}}, {"pins": {"x": P("data")}}):
        other = found.what_if(**change).strategy
        assert (other.offload, other.microbatches, other.remat) == (found.offload, 2, found.remat) and other.offload
        assert other.record.donate_argnums == found.record.donate_argnums


def test_what_a_search_computed_serves_its_what_ifs(monkeypatch):
    """Other pins and meshes need no facts of the program again; another pin of an argument none of the other tables."""
    found = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, **OPTIONS)
    monkeypatch.setattr("autoshard.plan.prepared.program_facts", lambda *_: pytest.fail("the program's facts are known"))
    monkeypatch.setattr("autoshard.plan.plan.program_facts", None)
    assert found.what_if(mesh={"data": 2, "model": 4}).strategy.what_if(cluster="v5e:4x4").data.after.n_devices == 16
    monkeypatch.setattr("autoshard.problem.problem.decisions_of", None)
    made = []
    costed = CostTables._costed
    monkeypatch.setattr(CostTables, "_costed", lambda *args: made.append(args[1]) or costed(*args))
    assert found.what_if(pins={"x": P("data")}).strategy.in_specs[1] == P("data", None)
    assert {one.label_type for one in made} == {("layout", (256, 512), 4, True)}


@pytest.mark.slow
def test_microbatches_that_are_asked_for_are_those_of_the_answer():
    """Also one, of a strategy in several; what is no number of them is refused, and one that no batch has."""
    several = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, microbatches=4, **OPTIONS)
    assert several.what_if(microbatches=1).strategy.cost.makespan_seconds == pytest.approx(strategy().cost.makespan_seconds)
    with pytest.raises(ShardingError, match="number of microbatches, got 'fit'"):
        strategy().what_if(microbatches="fit")
    with pytest.raises(TraceError, match="got 3"):
        strategy().what_if(microbatches=3)
    with pytest.raises(StrategyError, match="Call what_if"):
        pipeline().stages[0].what_if(microbatches=2)
    with pytest.raises(StrategyError, match="Call what_if"):
        pipeline().stages[0].what_if(stages=2)


def test_a_file_without_its_pins_says_so(tmp_path):
    """Pins are no part of a file; the what-if of a strategy from one says that they are not kept."""
    pinned = autoshard.search(two_products_step, *two_products(), mesh={"data": 8}, pins={"x": P()}, **OPTIONS)
    pinned.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json").with_program(two_products_step, *two_products())
    assert any("does not have the pin of its search" in note for note in loaded.what_if(batch=512).strategy.notes)


@cache
def pipeline():
    return autoshard.search(two_products_step, *two_products(), cluster="v5e:2x4", stages=2, microbatches=4, donate_argnums=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "program"),
    [
        ({"batch": 512}, {"mesh": {"data": 4}}),
        ({"mesh": {"data": 2, "model": 2}}, {"mesh": {"data": 2, "model": 2}}),
        ({"pins": {"*up*": P(None, "data")}}, {"mesh": {"data": 4}, "pins": {"*up*": P(None, "data")}}),
        ({"microbatches": 8}, {"mesh": {"data": 4}, "microbatches": 8}),
    ],
    ids=lambda change: ",".join(change),
)
def test_a_what_if_of_a_pipeline_is_the_search_with_that_change(change, program):
    """Of as many stages and microbatches, on the same schedule; meshes are those of each stage."""
    found = pipeline().what_if(**change).strategy
    options = {"cluster": "v5e:2x4", "stages": 2, "microbatches": 4, "donate_argnums": 0, "searcher": "dynamic_programming"}
    searched = autoshard.search(two_products_step, *two_products(change.get("batch", 256)), **options | program)
    assert found.cost.makespan_seconds == pytest.approx(searched.cost.makespan_seconds, rel=1e-9)
    assert found.record.pipeline.schedule == "auto" and found.microbatches == change.get("microbatches", 4)


def test_a_pipeline_s_tensors_are_explained_in_their_stage(tmp_path):
    """By the program of the first stage that has the name, which the answer says; of a strategy from a file, too."""
    pipeline().save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    with pytest.raises(StrategyError, match="with_program"):
        loaded.explain("down")
    for strategy in (pipeline(), loaded.with_program(two_products_step, *two_products())):
        home = strategy.record.pipeline.argument_stages[[t.path for t in strategy.record.arguments].index("state['params']['down']")]
        report = strategy.explain("down")
        assert f"In stage {home}" in str(report)
        assert report.data.step_seconds == strategy.stages[home].cost.makespan_seconds
    with pytest.raises(StrategyError, match=r"named 'sideways'\. There are"):
        pipeline().explain("sideways")


@pytest.mark.slow
def test_a_pipeline_keeps_its_memory_limit():
    """As other strategies do."""
    limited = autoshard.search(
        two_products_step, *two_products(), cluster="v5e:2x4", stages=2, microbatches=4, donate_argnums=0, memory_limit_bytes=1e9
    )  # fmt: skip
    assert limited.record.memory_limit_bytes == limited.what_if(mesh={"data": 4}).strategy.record.memory_limit_bytes == 1e9
    assert pipeline().record.memory_limit_bytes is None
