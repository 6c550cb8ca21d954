"""A confirmed search takes what a compiler, or devices, make the best of; a script stands in for the compiler's process in most tests."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import PROGRAMS
from schedules import schedule

import autoshard
import autoshard.plan.rounds  # before a test changes the margin that it takes from another file
from autoshard import Confirm
from autoshard.errors import InfeasibleError, SearcherError
from autoshard.plan import compiled_finalists
from autoshard.strategy import to_json
from autoshard.verify import aot
from tests.requirements import needs_tpu_compiler

TWO = Confirm("compiler", finalists=2)
CLOSE, FAR = 1e9, -1.0  # margins by which everybody is close, and nobody
PLAIN = {"microbatches": None, "remat": None}  # quick where nothing fits
WAITS = "time.sleep(600)"
CRASHES = "print('UNIMPLEMENTED:\\n  no such thing', file=sys.stderr); sys.exit(134)"
TOO_LARGE = "(folder / 'failure').write_text('Ran out of memory. Used {}G of 15.75G hbm. Exceeded by 6.78G.')"


def compiles(cycles=0, peak=5):
    """A script that compiles a program of so many cycles and bytes."""
    found = {"hlo": schedule(cycles), "peak_bytes": peak, "needed_bytes": peak + 1}
    return f"(folder / 'compiled.json').write_text({json.dumps(found)!r})"


@pytest.fixture
def processes(monkeypatch):
    """A function that has the compiler's first process run the first of some scripts, and so on; it returns the processes started."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "there")
    monkeypatch.setattr(compiled_finalists, "cores", lambda nbytes: 8)
    run, started = aot.subprocess.Popen, []

    def stand_in(*scripts):
        def popen(command, **how):
            code = "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n" + scripts[len(started)]
            started.append(run([sys.executable, "-c", code, command[-1]], **how))
            return started[-1]

        monkeypatch.setattr(aot.subprocess, "Popen", popen)
        return started

    yield stand_in
    assert all(child.poll() is not None for child in started), "a compiler's process is left behind"


def searched(confirm=TWO, **options):
    """A confirmed search of a small program for a slice of eight."""
    fn, args = PROGRAMS["mlp"]()
    return autoshard.search(fn, *args, **{"cluster": "v5e:2x4", "mesh": {"data": 8}, "confirm": confirm, **options})


def reloaded(strategy):
    """The strategy as its file has it."""
    with tempfile.TemporaryDirectory() as folder:
        strategy.save(f"{folder}/s.json")
        return autoshard.load(f"{folder}/s.json")


def outcomes(strategy):
    return [each.outcome for each in strategy.confirmation.finalists]


def test_close_ones_are_ordered_by_the_compiled_schedule(processes, monkeypatch):
    """Both are compiled to the end; the slower prediction is taken, since its schedule is faster, and its bound stays the model's."""
    monkeypatch.setattr(compiled_finalists, "MARGIN", CLOSE)
    started, told = processes(compiles(10**9), compiles(10**6)), []
    found = searched(progress=lambda doing, done: told.append(doing))
    assert len(started) == 2 and outcomes(found) == ["slower", "taken"]
    first, second = found.confirmation.finalists
    assert first.predicted_seconds < second.predicted_seconds
    assert (found.cost.makespan_seconds, found.cost.peak_bytes) == (second.seconds, 5), "what is stated is the compiler's"
    assert first.measure == second.measure == "scheduled" and second.seconds < 1e-3 < 0.6 < first.seconds
    assert 0 <= found.lower_bound_seconds <= found.cost.objective_seconds
    assert (found.confirmation.by, found.confirmation.name) == ("compiler", "XLA:TPU")
    compiling = [doing.rsplit(": ", 1)[0] for doing in told if "compiling" in doing]
    assert compiling == [f"compiling for v5e:2x4, {n} of 2" for n in (1, 2)]
    assert (found.confirmation.peak_bytes, found.confirmation.flops) == (5, 0) and found.confirmation.collective_bytes > 0


def test_code_is_not_generated_for_what_is_far_apart(processes, monkeypatch):
    """Two processes do, and what was compiled until memory is assigned decides."""
    monkeypatch.setattr(compiled_finalists, "MARGIN", FAR)
    started = processes(compiles(), compiles())
    found = searched()
    assert len(started) == 2
    seconds = [each.seconds for each in found.confirmation.finalists]
    assert found.confirmation.seconds == min(seconds) and {each.measure for each in found.confirmation.finalists} == {"corrected"}


def test_who_comes_close_to_a_schedule_is_scheduled_too(processes, monkeypatch):
    """The first is compiled to the end at once, and turns out slower than the others' corrected times: these are as well, one by one."""
    corrected: dict = {}
    monkeypatch.setattr(compiled_finalists, "corrected_seconds", lambda cost, *_: corrected.setdefault(id(cost), 1 + len(corrected) / 4))
    started = processes(compiles(9 * 10**9), compiles(), compiles(), compiles(6 * 10**9), compiles(3 * 10**9))
    found = searched(Confirm(finalists=3))
    assert len(started) == 5 and outcomes(found) == ["slower", "slower", "taken"]
    assert found.confirmation.seconds == pytest.approx(2.0, rel=1e-2)


def test_what_does_not_fit_is_not_returned(processes):
    """The other one is; the record says what was needed. Since it is much slower, a second search looks for what is between."""
    processes(TOO_LARGE.format(22.53), *[compiles()] * 6)
    found = searched()
    assert outcomes(found) == ["does not fit", "taken", "slower", "slower"]
    assert found.confirmation.finalists[0].needed_bytes == 22.53 * 2**30
    assert reloaded(found) == found


@pytest.mark.slow
def test_nothing_that_fits_is_searched_again(processes):
    """The next search has the limit times predicted through compiled peak, so that nothing comes back; the record has both."""
    told = []
    processes(compiles(peak=6e5), compiles(peak=6e5), *[compiles(peak=4e5)] * 4)
    found = searched(memory_limit_bytes=5e5, progress=lambda *doing: told.append(doing), **PLAIN)
    first, second, *again = found.confirmation.finalists
    assert first.outcome == second.outcome == "does not fit" and {each.outcome for each in again} == {"taken", "slower"}
    assert found.cost.peak_bytes == 4e5 < 5e5
    assert "searched within 163 kB of predicted peak" in found.notes[-1] and "600 kB, where 200 kB were predicted" in found.notes[-1]
    assert any("searches again within 163 kB" in doing for doing, _ in told)
    assert all(0 <= fraction <= 1 for _, fraction in told)


@pytest.mark.slow
def test_nothing_that_fits_is_an_error(processes):
    """After a few searches it names the least that a plan needs, and what was predicted."""
    started = processes(*[TOO_LARGE.format(gibibytes) for gibibytes in (22.53, 19.5, 21, 20, 21, 20)])
    said = r"of the 6 that XLA:TPU compiled none does: .* 20\.9 GB, where 200 kB were predicted"
    with pytest.raises(InfeasibleError, match=said) as raised:
        searched(**PLAIN)
    assert raised.value.smallest_peak_bytes == 19.5 * 2**30 and len(started) == 6


def test_a_peak_just_above_the_limit_is_compiled_before_it_is_refused(processes):
    """The plan of the least predicted peak is the answer if the compiler accepts it; if not, the error says what it needs."""
    started = processes(compiles(peak=99e3), compiles(peak=11e4))
    found = searched(searcher="fully_sharded", memory_limit_bytes=1e5, **PLAIN)
    assert found.confirmation.peak_bytes == found.cost.peak_bytes == 99e3 < 1e5
    assert "where a device may hold 100 kB, since nothing is predicted to fit that" in found.notes[-1]
    with pytest.raises(InfeasibleError, match=r"110 kB, where \d+ kB were predicted.*must fit 100 kB"):
        searched(searcher="fully_sharded", memory_limit_bytes=1e5, **PLAIN)
    assert len(started) == 2


def test_a_peak_far_above_the_limit_is_refused(processes):
    """No compiler is started for it."""
    started = processes()
    with pytest.raises(InfeasibleError, match=r"must fit 80\.0 kB"):
        searched(searcher="fully_sharded", memory_limit_bytes=8e4, **PLAIN)
    assert not started


@pytest.mark.slow
def test_the_users_memory_limit_holds_as_compiled(processes):
    """A compiled peak above it is refused, though the device has more."""
    processes(compiles(peak=2**30), *[compiles()] * 3)
    assert outcomes(searched(memory_limit_bytes=1e9))[:2] == ["does not fit", "taken"]


def test_a_compiler_that_fails_on_one_leaves_the_other(processes):
    """The record has the reason, on one line."""
    processes(CRASHES, compiles(), compiles())
    found = searched()
    assert outcomes(found) == ["failed", "taken"]
    assert "UNIMPLEMENTED: no such thing" in found.confirmation.finalists[0].reason
    assert reloaded(found) == found


def test_a_compiler_that_fails_on_all_leaves_the_prediction(processes):
    """The unconfirmed answer comes with a note, no exception; a file takes it."""
    processes(CRASHES, CRASHES)
    found = searched()
    assert found.confirmation is None and found.cost == searched(None).cost
    assert found.notes[-1].startswith("not confirmed: XLA:TPU failed on 2 of 2") and "UNIMPLEMENTED: no such thing" in found.notes[-1]
    to_json(found.record)


def test_a_missing_compiler_leaves_the_prediction(monkeypatch):
    """The note says what to install."""
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(aot, "find_spec", lambda _: None)
    found = searched("compiler")
    assert found.confirmation is None
    assert found.notes[-1].startswith("not confirmed: compiling for TPUs needs libtpu") and "autoshard[tpu]" in found.notes[-1]


@pytest.mark.parametrize(("fake", "words"), [
    ((WAITS, compiles()), "confirming ended early, with 1 of 2 finalists decided, since the time was over"),
    pytest.param((WAITS, WAITS), "not confirmed: the time was over before XLA:TPU had accepted", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_time_limit_holds_for_all(processes, fake, words):
    """A compiler that does not come back is stopped; the answer is what was accepted by then, or the unconfirmed one."""
    started = time.perf_counter()
    searched(None)
    limit = 2 + 3 * (time.perf_counter() - started)
    processes(*fake)
    started = time.perf_counter()
    found = searched(time_limit_seconds=limit)
    assert time.perf_counter() - started < limit + 15 and found.notes[-1].startswith(words)
    assert found.confirmation is None or outcomes(found) == ["not reached", "taken"]


def test_schedules_that_are_not_done_do_not_decide(processes, monkeypatch):
    """Where the time is over while code is generated, all are ordered by what was compiled before."""
    monkeypatch.setattr(compiled_finalists, "MARGIN", CLOSE)
    processes(compiles(10**12), WAITS)
    found = searched(time_limit_seconds=5)
    assert [each.measure for each in found.confirmation.finalists] == ["corrected", None] and "ended early" in found.notes[-1]


def test_ctrl_c_leaves_no_process(processes):
    """While finalists are compiled it ends that alone: compilers are stopped, and the search that is done is not lost."""
    started = processes(WAITS, WAITS, WAITS)

    def progress(doing, _):
        if "compiling" in doing and len(started) == 2:
            raise KeyboardInterrupt

    found = searched(Confirm("compiler", 3), progress=progress)
    assert found.notes[-1] == "not confirmed: it was interrupted before XLA:TPU had accepted a finalist"
    assert found.stats["confirm_seconds"] > 0
    assert len(started) == 2 and all(child.poll() is not None for child in started)


def test_ctrl_c_while_searching_ends_it_all(processes):
    """Who wants it to end gets what there is, and no compiler is started."""
    started = processes()
    calls = []

    def progress(doing, _):
        calls.append(doing)
        if len(calls) == 20:
            raise KeyboardInterrupt

    found = searched(mesh=None, interruptible=True, progress=progress)
    assert not started and found.notes[-1] == "not confirmed: the search was interrupted"


def test_progress_names_every_compile(processes, monkeypatch):
    """Fractions stay in their bar and rise."""
    monkeypatch.setattr(compiled_finalists, "MARGIN", FAR)
    processes(compiles(), compiles())
    told = []
    searched(progress=lambda doing, fraction: told.append((doing, fraction)))
    assert sum("compiling for" in doing for doing, _ in told) == 2
    fractions = [fraction for doing, fraction in told if "compiling" in doing]
    assert fractions == sorted(fractions) and all(0.45 <= fraction <= 1 for fraction in fractions)
    assert all(fraction <= 0.45 for doing, fraction in told if "compiling" not in doing)


def test_a_confirmed_strategy_is_saved_loaded_and_explained(processes, monkeypatch):
    """The file is the same every time, has the finalists, and the report shows them."""
    monkeypatch.setattr(compiled_finalists, "MARGIN", CLOSE)
    scripts = compiles(10**6), compiles(10**9)
    processes(*scripts, *scripts)
    found, again = searched(), searched()
    assert found == again and reloaded(found) == found
    assert reloaded(found).confirmation == found.confirmation
    shown = " ".join(str(found.explain()).split())
    assert "published runs on such devices; " in shown and "as XLA:TPU schedules it" in shown and "Confirmed by XLA:TPU" in shown
    assert "above are as compiled. Times and bytes of their parts are as predicted" in shown
    assert "confirm" not in str(searched(None).explain()).lower()


@pytest.mark.parametrize("confirm", ["compilers", 3, True, "", ("compiler",)])
def test_other_values_are_refused(confirm):
    """Before anything is traced; a decorator says so where it stands."""
    with pytest.raises(SearcherError, match="'compiler' or 'devices'"):
        autoshard.search(None, confirm=confirm)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SearcherError, match="'compiler' or 'devices'"):
        autoshard.parallelize(cluster="cpu:8", confirm=confirm)
    with pytest.raises(SearcherError, match="from 1 up"):
        Confirm(finalists=0)


def test_the_cpus_compiler_confirms():
    """XLA:CPU compiles for virtual devices in a process of its own; it makes of the program exactly what was predicted."""
    found = searched(cluster="cpu:8")
    taken = found.confirmation.taken
    assert (found.confirmation.name, taken.measure) == ("XLA:CPU", "corrected") and outcomes(found).count("taken") == 1
    assert taken.collective_bytes == sum(one.bytes * one.count for one in found.cost.collectives)
    assert taken.flops == pytest.approx(found.cost.flops) and taken.seconds == pytest.approx(found.cost.makespan_seconds)
    assert 0 < taken.peak_bytes <= taken.needed_bytes


def test_devices_confirm():
    """Finalists are timed on this process's devices with zeros in place of abstract arguments; times are not saved."""
    found = searched("devices", cluster="cpu:8", donate_argnums=0)
    confirmation = found.confirmation
    assert (confirmation.by, confirmation.name) == ("devices", "cpu") and outcomes(found).count("taken") == 1
    assert all(each.seconds > 0 and each.measure == "timed" for each in confirmation.finalists)
    assert confirmation.seconds == min(each.seconds for each in confirmation.finalists)
    assert "on cpu devices" in str(found.explain())
    back = reloaded(found)
    assert back == found and back.confirmation.seconds is None and back.confirmation.flops == confirmation.flops


@pytest.mark.slow
def test_devices_run_keys_empty_arrays_and_modules():
    """What arguments there may be is made up too, and modules are not updated by it."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = jnp.copy(model.kernel[...])

    def step(model, key, keys, empty, x):
        model.kernel[...] = model.kernel[...] + 1.0
        return jax.random.uniform(key, x.shape) + model(x), jax.vmap(jax.random.bits)(keys), empty * 2

    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    args = model, jax.random.key(1), keys, jnp.zeros((0, 8)), jnp.ones((16, 8))
    found = autoshard.search(step, *args, cluster="cpu:8", confirm="devices")
    assert found.confirmation is not None, found.notes
    assert (model.kernel[...] == before).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("cluster", ["v5e:2x4", "cpu:16"])
def test_devices_that_are_not_there_leave_the_prediction(cluster):
    """The note says how many there are."""
    found = searched("devices", cluster=cluster, mesh=None)
    assert found.confirmation is None and "not confirmed: finalists are timed on" in found.notes[-1]


def test_a_device_without_a_compiler_leaves_the_prediction(monkeypatch):
    """GPUs that the compiler is not told of get a note."""
    cluster = autoshard.Cluster.parse("h100:8")
    found = searched("compiler", cluster=replace(cluster, device=replace(cluster.device, name="strange")))
    assert found.confirmation is None and "not confirmed: programs are compiled ahead of time for" in found.notes[-1]


def test_a_step_that_runs_out_of_memory_does_not_fit(monkeypatch):
    """On devices the allocator says so when it runs."""

    def exhausted(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("autoshard.plan.timed_finalists._median_seconds", exhausted)
    with pytest.raises(InfeasibleError, match="refuses all 2 finalists"):
        searched(Confirm("devices", 2), cluster="cpu:8")


@needs_tpu_compiler
def test_the_tpus_compiler_confirms():
    """XLA:TPU itself compiles a finalist; its time and peak are what is stated, and a note says by which operation they differ most."""
    found = searched(Confirm(finalists=1))
    taken = found.confirmation.taken
    assert found.confirmation.version.startswith("libtpu") and taken.measure == "scheduled"
    assert taken.flops == pytest.approx(found.cost.flops, rel=0.01)
    assert (found.cost.makespan_seconds, found.cost.peak_bytes) == (taken.seconds, taken.peak_bytes)
    assert found.cost.makespan_seconds != taken.predicted_seconds > 0
    assert any(note.startswith("search 1: 1 compiled") and "most of all" in note for note in found.notes), found.notes


@pytest.mark.slow(minutes=3)
@needs_tpu_compiler
def test_a_limit_below_the_tpus_own_peak_is_searched_again():
    """Between predicted and compiled peak a smaller plan is found, or the error has XLA:TPU's figure."""
    fn, args = PROGRAMS["gpt"]()
    plain = autoshard.search(fn, *args, cluster="v5e:2x4")
    compiled = autoshard.verify(plain, fn, *args, target="tpu").actual_peak_bytes
    limit = (plain.cost.peak_bytes + compiled) / 2
    try:
        found = autoshard.search(fn, *args, cluster="v5e:2x4", confirm="compiler", memory_limit_bytes=limit)
    except InfeasibleError as error:
        assert "that XLA:TPU compiled none does" in str(error)
    else:
        assert found.confirmation.peak_bytes <= limit


def test_parallelize_confirms():
    """The decorator's search is confirmed as any."""

    @autoshard.parallelize(cluster="cpu:8", searcher="data_parallel", confirm="devices", progress=False)
    def step(w, x):
        return jnp.tanh(x @ w)

    found = step.search(jnp.ones((8, 8)), jnp.ones((16, 8)))
    assert found.confirmation is not None and outcomes(found) == ["taken"]
