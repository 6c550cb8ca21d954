"""A step searched with stages runs as a pipeline: the same call, the same numbers, the planned collectives."""

import functools
import os
import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.errors import ClusterError, OutOfTime, ShardingError, StrategyError, TraceError
from autoshard.explanation.explain_pipeline import schedule_as
from benchmarks import models
from tests.requirements import needs_tpu_compiler

WIDTH, HIDDEN, LAYERS, BATCH = 16, 32, 4, 16
OPTIMIZER = optax.adam(1e-2)


def init(key):
    keys = iter(jax.random.split(key, 2 * LAYERS))
    layers = [
        {"up": jax.random.normal(next(keys), (WIDTH, HIDDEN)) / 4, "down": jax.random.normal(next(keys), (HIDDEN, WIDTH)) / 6}
        for _ in range(LAYERS)
    ]
    return {"params": layers, "optimizer": OPTIMIZER.init(layers)}


def train_step(state, batch):
    def loss(layers):
        x = batch["x"]
        for layer in layers:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


@functools.cache
def example():
    key = jax.random.key(0)
    return init(key), {"x": jax.random.normal(key, (BATCH, WIDTH)), "y": jnp.zeros((BATCH, WIDTH))}


@functools.cache
def searched(schedule="1f1b", stages=2, microbatches=4):
    state, batch = example()
    return autoshard.search(
        train_step, state, batch, cluster="cpu:8", stages=stages, schedule=schedule, microbatches=microbatches, donate_argnums=0
    )


@functools.cache
def unsharded(steps=3):
    """The state and the losses of the step on one device."""
    (state, batch), losses = example(), []
    for _ in range(steps):
        state, loss = jax.jit(train_step)(state, batch)
        losses.append(float(loss))
    return state, losses


def trained(run, state, batch, steps=3):
    losses = []
    for _ in range(steps):
        state, loss = run(state, batch)
        losses.append(float(loss))
    return state, losses


def check_equal(found, losses):
    state, expected = unsharded()
    assert losses == pytest.approx(expected, rel=1e-6)
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert jnp.allclose(jax.device_get(here), jax.device_get(there), atol=3e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("gpipe", 4), ("interleaved", 2), ("zero_bubble", 2)])
def test_a_pipeline_computes_what_the_step_computes(schedule, stages):
    """Losses and state are those of one device, and each part of the devices runs its tasks in the order of the schedule."""
    strategy = searched(schedule, stages)
    assert strategy.mesh_shape["stage"] == stages and strategy.microbatches == 4
    run = strategy.apply(train_step)
    check_equal(*trained(run, strategy.init(init, jax.random.key(0)), example()[1]))
    for stage, order in enumerate(schedule_as(strategy.record, strategy.record.pipeline).orders):
        assert tuple(task for at, task in run.executed if at == stage) == order


@pytest.mark.slow
def test_state_is_on_the_devices_of_its_stage():
    """Each leaf has the devices of one stage, from `init` on, and every stage has some of them."""
    strategy = searched()
    state = strategy.init(init, jax.random.key(0))
    parts = [frozenset(jax.devices()[:4]), frozenset(jax.devices()[4:])]
    before = [x.sharding.device_set for x in jax.tree.leaves(state)]
    assert set(map(frozenset, before)) == set(parts)
    assert [s.device_set for s in jax.tree.leaves(strategy.shardings(0))] == before
    state, _ = strategy.apply(train_step)(state, strategy.shard(state, example()[1])[1])
    assert [x.sharding.device_set for x in jax.tree.leaves(state)] == before
    assert dict(strategy.mesh.shape) == strategy.mesh_shape


@pytest.mark.slow
def test_a_saved_pipeline_runs_as_before(tmp_path):
    """The file has all that it takes: stages, cut, schedule."""
    strategy = searched()
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and len(loaded.stages) == 2
    check_equal(*trained(loaded.apply(train_step), init(jax.random.key(0)), example()[1]))
    explained = str(loaded.explain())
    assert "Schedule 1f1b: 4 microbatches" in explained and "divides the program and its state into stages" in explained.replace("\n", " ")


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_the_compiled_tasks_have_the_planned_collectives(target):
    """Those of all tasks and microbatches of a stage together, in kind, number and bytes; FLOPs too."""
    options = {"cluster": "cpu:8", "stages": 2, "microbatches": 4, "mesh": {"data": 2, "model": 2}}
    spec = jax.sharding.PartitionSpec
    pins = {"*params*['up']": spec(None, "model"), "*params*['down']": spec("model", None), "batch*": spec("data", None)}
    strategy = autoshard.search(train_step, *example(), pins=pins, **options, donate_argnums=0)
    found = autoshard.verify(strategy, train_step, *example(), target=target)
    assert found.exact and len(found.stages) == 2
    assert all(stage.rows for stage in found.stages)
    assert all(stage.flops_ratio == pytest.approx(1.0, abs=0.01) for stage in found.stages)
    assert "Stage 1" in str(found) and found.to_json()["exact"]


@pytest.mark.slow
@needs_tpu_compiler
def test_gathers_before_the_loop_are_as_narrow_on_tpus_as_predicted():
    """Float32 weights of scanned layers that cast them themselves are gathered as bfloat16, as within one program."""
    step, args = models.llama(4, 256, 4, 2, 512, 512, batch=16, length=128, scan=True)[:2]
    asked = {"cluster": "v5e:2x4", "stages": 2, "microbatches": 2, "mesh": {"data": 4}}
    strategy = autoshard.search(step, *args, **asked, donate_argnums=0)
    found = autoshard.verify(strategy, step, *args, target="tpu")
    gathers = [row for stage in found.stages for row in stage.rows if row.kind == "all_gather"]
    assert gathers and all(row.agrees for row in gathers)


STACKED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def stacked_init(key, layers=LAYERS):
    up, down = jax.random.split(key)
    layers = {
        "up": jax.random.normal(up, (layers, WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(down, (HIDDEN, layers, WIDTH)) / 6,
        "gain": jnp.ones(WIDTH),
    }
    return {"params": layers, "optimizer": STACKED.init(layers)}


def scanned_step(state, batch):
    """Scanned layers, of one weight of which the layers are the second dimension; gradients are clipped by the norm of all."""

    def loss(params):
        layers = params["up"], jnp.moveaxis(params["down"], 1, 0)
        x, _ = jax.lax.scan(lambda x, layer: (x + jax.nn.relu(x @ layer[0]) @ layer[1], None), batch["x"], layers)
        return jnp.mean((x * params["gain"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = STACKED.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def scanned(layers=LAYERS, **options):
    state, batch = stacked_init(jax.random.key(0), layers), example()[1]
    given = {"cluster": "cpu:8", "stages": 2, "microbatches": 4, "donate_argnums": 0} | options
    return autoshard.search(scanned_step, state, batch, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_stages_have_the_rows_of_their_own_layers(tmp_path, schedule, chunks):
    """Weights, and optimizer state with them, are split over the stages from `init` on; losses and state are those of one device, and so
    is what a saved strategy computes and a checkpoint restores, also under a strategy without stages. So it is with several chunks.
    """
    spec = jax.sharding.PartitionSpec
    pins = {"*['up']": spec(None, None, "model"), "*['down']": spec("model", None, None)}  # they hold on every stage
    strategy = scanned(mesh={"data": 2, "model": 2}, pins=pins, schedule=schedule)
    assert strategy.record.pipeline.chunks == chunks
    specs = strategy.in_specs[0]
    strategy.save(tmp_path / "s.json")
    strategy = autoshard.load(tmp_path / "s.json")
    for layers in (specs["params"], specs["optimizer"][1][0].mu, specs["optimizer"][1][0].nu):
        assert layers["up"] == spec("stage", None, "model") and layers["down"] == spec("model", "stage", None)
        assert "stage" not in layers["gain"]
    run, (state, expected), batch = strategy.apply(scanned_step), [stacked_init(jax.random.key(0)) for _ in range(2)], example()[1]
    state = strategy.init(stacked_init, jax.random.key(0))
    wanted = jax.tree.leaves(strategy.shardings(0))
    assert all(x.sharding == there for x, there in zip(jax.tree.leaves(state), wanted, strict=True))
    assert state["params"]["up"].addressable_shards[0].data.shape[0] == LAYERS // 2
    for _ in range(3):
        given, (state, loss) = state, run(state, batch)
        expected, value = jax.jit(scanned_step)(expected, batch)
        assert float(loss) == pytest.approx(float(value), rel=1e-6)
        assert given["params"]["up"].is_deleted()  # its memory has the new rows
    assert all(x.sharding.is_equivalent_to(there, x.ndim) for x, there in zip(jax.tree.leaves(state), wanted, strict=True))
    for here, there in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(jax.device_get(here), there, atol=3e-5)
    plain = autoshard.search(scanned_step, expected, batch, cluster="cpu:4", searcher="data_parallel", mesh={"data": 4})
    autoshard.checkpoint.save(os.fspath(tmp_path / "a"), state, strategy)
    there = autoshard.checkpoint.restore(os.fspath(tmp_path / "a"), plain, like=expected)
    autoshard.checkpoint.save(os.fspath(tmp_path / "b"), there, plain)
    back = autoshard.checkpoint.restore(os.fspath(tmp_path / "b"), strategy, like=expected)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and jnp.array_equal(x, y)
    assert "Arguments of which every stage has the rows of its own layers" in str(strategy.explain())


@pytest.mark.slow
def test_a_note_says_which_stacked_arrays_stay_whole():
    """Where stages have unequal numbers of layers: one of them has the array."""
    strategy = scanned(layers=3, mesh={"data": 4}, searcher="data_parallel")
    assert autoshard.strategy.BY_ROWS not in strategy.record.pipeline.argument_stages
    assert any("stacked along scanned layers" in note and "['up']" in note for note in strategy.notes)


@pytest.mark.slow
def test_a_decorated_step_is_a_pipeline():
    """`parallelize(stages=)` searches at the first call."""
    run = autoshard.parallelize(train_step, cluster="cpu:8", stages=2, microbatches=4, donate_argnums=0, progress=False)
    state, batch = example()
    check_equal(*trained(run, run.search(state, batch).init(init, jax.random.key(0)), batch))
    assert run.strategy.mesh_shape["stage"] == 2


@pytest.mark.slow
def test_checkpoints_move_between_pipelines_and_plain_strategies(tmp_path):
    """A state that was saved under one is restored under the other, bit by bit."""
    state, batch = example()
    plain = autoshard.search(train_step, state, batch, cluster="cpu:4", searcher="data_parallel", mesh={"data": 4})
    made = searched().init(init, jax.random.key(0))
    autoshard.checkpoint.save(os.fspath(tmp_path / "a"), made, searched())
    there = autoshard.checkpoint.restore(os.fspath(tmp_path / "a"), plain, like=state)
    autoshard.checkpoint.save(os.fspath(tmp_path / "b"), there, plain)
    back = autoshard.checkpoint.restore(os.fspath(tmp_path / "b"), searched(), like=state)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(back), strict=True):
        assert x.sharding == y.sharding and jnp.array_equal(x, y)


def test_the_number_of_microbatches_is_found_where_none_is_given():
    """Numbers that are multiples of the stages and divide the batch are tried."""
    strategy = autoshard.search(train_step, *example(), cluster="cpu:8", stages=2, mesh={"data": 4}, searcher="data_parallel")
    assert strategy.microbatches in (2, 4, 8)


def test_the_best_pipeline_by_then_is_the_answer_where_the_time_is_over(monkeypatch):
    """Of several numbers of microbatches those that were searched count."""
    module = import_module("autoshard.plan.stage_planner")
    best, calls = module.Planner.best, []

    def late(planner):
        calls.append(planner.staged.n_microbatches)
        if len(calls) > 1:
            raise OutOfTime("over")
        return best(planner)

    monkeypatch.setattr(module.Planner, "best", late)
    options = {"cluster": "cpu:8", "stages": 2, "mesh": {"data": 4}, "searcher": "data_parallel"}
    assert autoshard.search(train_step, *example(), **options).microbatches == calls[0] and len(calls) == 2


def test_a_time_that_is_over_leaves_first_answers():
    """Each stage has one, also those whose searches begin without any time left."""
    found = autoshard.search(train_step, *example(), cluster="cpu:8", stages=2, microbatches=4, time_limit_seconds=1e-9)
    assert len(found.stages) == 2


@pytest.mark.slow
def test_stages_share_the_time_and_an_interrupt(monkeypatch):
    """Each search has its part of the time that is left; after Ctrl-C in one, the others have none."""
    module = import_module("autoshard.plan.stage_searches")
    timed, searched_on_meshes, given = module.timed, module.searched_on_meshes, []
    monkeypatch.setattr(module, "timed", lambda progress, left: given.append(left) or timed(progress, left))
    options = {"cluster": "cpu:8", "stages": 4, "microbatches": 4, "mesh": {"data": 2}}
    autoshard.search(train_step, *example(), time_limit_seconds=1000, **options)
    assert given == sorted(given) and 240 < given[0] <= 250

    def interrupted(*arguments, **options):
        solution, problem = searched_on_meshes(*arguments, **options)
        return replace(solution, stats={**solution.stats, "ended_early": 1}), problem

    monkeypatch.setattr(module, "searched_on_meshes", interrupted)
    given.clear()
    autoshard.search(train_step, *example(), interruptible=True, **options)
    assert given[0] is None and set(given[1:]) == {0.0}


def test_the_reserve_is_given_up_last(monkeypatch):
    """What fits only with it is found, with a note."""
    module = import_module("autoshard.plan.stage_searches")
    pipelined, limits = module.pipelined, []

    def barely(traced, cluster, asked, *rest):
        limits.append(asked.limit)
        if len(limits) == 1:
            raise autoshard.InfeasibleError("it does not fit", 0.999 * cluster.memory_limit_bytes)
        return pipelined(traced, cluster, asked, *rest)

    monkeypatch.setattr(module, "pipelined", barely)
    options = {"cluster": "cpu:8", "stages": 2, "microbatches": 4, "mesh": {"data": 4}, "searcher": "data_parallel"}
    found = autoshard.search(train_step, *example(), remat=None, **options)
    assert limits[0] < limits[1] and any("within 2" in note for note in found.notes)


def test_notes_say_which_stage_they_are_of():
    """Where not all stages have them."""
    module = import_module("autoshard.plan.pipeline_record")
    records = [SimpleNamespace(assumptions=notes) for notes in (("a", "b"), ("a",), ("a", "b"))]
    staged = SimpleNamespace(divided=SimpleNamespace(whole=()), stages=())
    plan = SimpleNamespace(staged=staged, stages=[SimpleNamespace(strategy=SimpleNamespace(record=record)) for record in records])
    assert module._notes(plan) == ("a", "stages 0, 2: b")


@pytest.mark.slow
def test_equal_stages_are_searched_once(monkeypatch):
    """Those in the middle; each has the names of its own arguments."""
    module, solved = import_module("autoshard.plan.prepared"), []
    search = module.search_meshes
    monkeypatch.setattr(module, "search_meshes", lambda *arguments: solved.append(1) or search(*arguments))
    fn, args = models.gpt(12, 32, 4, 64, batch=8, length=16)
    options = {"stages": 4, "schedule": "1f1b", "microbatches": 4, "mesh": {"data": 2}, "searcher": "fully_sharded"}
    found = autoshard.search(fn, *args, cluster="cpu:8", **options).stages
    assert len(solved) == 3
    first, second = found[1:3]
    assert first.record.choices == second.record.choices and first.cost.makespan_seconds == second.cost.makespan_seconds
    assert "['layers'][6]" in str(second.record.arguments) and "['layers'][6]" in str(second.cost.collectives)
    assert "['layers'][3]" not in str(second.record.arguments) + str(second.cost.collectives)


def test_a_solution_that_has_the_mesh_and_the_layouts_is_not_found_again(monkeypatch):
    """Both stages are searched on any mesh, and on that of both again only where one of them has another mesh or other layouts."""
    module, solved = import_module("autoshard.plan.stage_searches"), []
    search = module.searched_on_meshes
    monkeypatch.setattr(module, "searched_on_meshes", lambda *arguments, **more: solved.append(1) or search(*arguments, **more))
    found = autoshard.search(train_step, *example(), cluster="cpu:8", stages=2, microbatches=4, schedule="1f1b").stages
    n = len(solved)
    monkeypatch.setattr(module, "_answers", lambda *_: False)
    again = autoshard.search(train_step, *example(), cluster="cpu:8", stages=2, microbatches=4, schedule="1f1b").stages
    assert n < len(solved) - n
    assert [each.cost.makespan_seconds for each in found] == [each.cost.makespan_seconds for each in again]


def test_pins_hold_on_the_stage_that_has_the_argument():
    """A pin of one layer's weight is kept, and one that matches nothing is refused."""
    spec = jax.sharding.PartitionSpec(None, "model")
    options = {"cluster": "cpu:8", "stages": 2, "microbatches": 2, "mesh": {"data": 2, "model": 2}}
    strategy = autoshard.search(train_step, *example(), pins={"*params*[3]['up']": spec}, **options)
    assert strategy.in_specs[0]["params"][3]["up"] == spec
    with pytest.raises(ShardingError, match="matches none"):
        autoshard.search(train_step, *example(), pins={"nothing": spec}, **options)


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"stages": 1}, ShardingError, "stages are a number, 2 or more, or None, got 1"),
        ({"stages": 3}, ClusterError, "has no 3 of them"),
        ({"stages": 2, "schedule": "2f2b"}, ShardingError, "schedule is 'auto', '1f1b', 'gpipe'"),
        ({"stages": 2, "microbatches": 3}, TraceError, "divides a batch"),
        ({"stages": 2, "mesh": {"data": 2}}, ClusterError, "that of each stage, on 4 of the 8 devices"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_pipeline_is_refused(options, error, pattern):
    """With the rule, what was got, and what to do."""
    with pytest.raises(error, match=re.escape(pattern)):
        autoshard.search(train_step, *example(), cluster="cpu:8", **options)


def test_a_pipeline_is_no_part_of_another_program():
    """Lowering it, and calling it inside a transformation, are refused."""
    run = searched().apply(train_step)
    with pytest.raises(StrategyError, match=r"Use autoshard\.verify"):
        run.lower(*example())
    with pytest.raises(StrategyError, match=r"inside jax\.jit"):
        jax.jit(run)(*example())
    with pytest.raises(StrategyError, match=r"inside jax\.jit"):  # also on arrays of its own
        jax.jit(lambda: run(*example()))()
    with pytest.raises(StrategyError, match="pins shard a program as it is"):
        searched().pins(train_step, *example())


@pytest.mark.slow
def test_stages_compute_again_what_they_do_not_keep(tmp_path):
    """With recomputation microbatches keep less, losses and state stay the same, and a saved pipeline runs so, too."""
    options = {"cluster": "cpu:8", "stages": 2, "microbatches": 4, "donate_argnums": 0}
    strategy = autoshard.search(train_step, *example(), remat="full", **options)
    assert strategy.remat == "full"
    again, plain = (sum(stage.residual_bytes for stage in each.record.pipeline.stages) for each in (strategy, searched()))
    assert again < plain
    strategy.save(tmp_path / "found.json")
    loaded = autoshard.load(tmp_path / "found.json")
    check_equal(*trained(loaded.apply(train_step), loaded.init(init, jax.random.key(0)), example()[1]))


def test_a_stage_that_does_not_fit_is_named():
    """The refusal has the stage, its lines, the microbatches in flight and the smallest peak."""
    with pytest.raises(autoshard.InfeasibleError, match=r"stage 0 \(.*test_pipelines.py:\d+ to \d+\).* must fit 9.00 kB"):
        autoshard.search(train_step, *example(), cluster="cpu:8", stages=2, microbatches=4, memory_limit_bytes=9e3)


@pytest.mark.slow
def test_the_stages_plans_and_programs_can_be_saved(tmp_path):
    """A folder a stage, with its graph and plan from a call, and the compiled text of its programs from `verify`."""
    searched().apply(train_step, save_graphs=tmp_path)(init(jax.random.key(0)), example()[1])
    autoshard.verify(searched(), train_step, *example(), target="cpu", save_graphs=tmp_path)
    found = [{path.name for path in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert found == [{"graph.graphml", "plan.txt", "compiled.txt"}] * 2


@pytest.mark.slow
def test_what_if_of_stages_chunks_and_schedules():
    """Another schedule of the same stages, two chunks in a V, and four stages: each runs, or is refused with what to do."""
    strategy = searched()
    other = strategy.what_if(schedule="auto").strategy
    assert other.record.pipeline.stages[0].record == strategy.record.pipeline.stages[0].record
    assert other.cost.makespan_seconds < strategy.cost.makespan_seconds
    folded = strategy.what_if(chunks=2, schedule="auto").strategy
    assert (folded.record.pipeline.placement, len(folded.stages)) == ("v", 4)
    check_equal(*trained(folded.apply(train_step), *jax.tree.map(jnp.copy, example())))
    kept = [folded.what_if(stages=n).strategy.record.pipeline.chunks for n in (4, 8)]
    assert kept == [2, 1]  # the step has no sixteen parts
    chunks = [strategy.what_if(schedule="interleaved"), folded.what_if(schedule="1f1b")]
    assert [each.strategy.record.pipeline.chunks for each in chunks] == [2, 1]  # other ones are searched
    with pytest.raises(autoshard.errors.PipelineError, match=r"two chunks a stage or more; got 1"):
        strategy.what_if(schedule="interleaved", chunks=1)
    found = strategy.what_if(stages=4)
    assert found.strategy.mesh_shape["stage"] == 4 and "stages=4" in str(found)
    with pytest.raises(autoshard.errors.PipelineError, match=r"schedule='one_program'. Search with it instead"):
        strategy.what_if(schedule="one_program")
