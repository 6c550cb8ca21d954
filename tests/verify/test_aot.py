"""Reading what a process that compiles for TPUs or GPUs leaves; nothing here needs their compilers."""

import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, CompilerError
from autoshard.ir import Mesh
from autoshard.verify import aot, compile_ahead, topology_of

MESH = Mesh.of({"x": 1})
SLICE, GPUS = (topology_of(Cluster.parse(name)) for name in ("v5e:2x4", "h100:8x2"))
DUMP = "module_0000.jit_step.cl_1."


def lowered():
    """Any program."""
    return jax.jit(jnp.sin).trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower(lowering_platforms=("tpu",))


def stand_in(monkeypatch, script: str):
    """Has a script be the compiler's process; it finds its folder in ``folder``."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "there")
    run = aot.subprocess.Popen
    code = "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n" + script
    monkeypatch.setattr(aot.subprocess, "Popen", lambda command, **how: run([sys.executable, "-c", code, command[-1]], **how))


def dumping(before: str, last: str) -> str:
    """A script that dumps what a compiler does, its files' names beginning so, the last one ending so, and goes on then."""
    return f"""
def leave(name, text=""):
    (folder / ("{before}after_optimizations" + name)).write_text(text + chr(10))
leave(".txt", "HloModule m")
leave("-buffer-assignment.txt", "allocation 0: size 8, parameter 0:")
leave("-live-range.txt")
leave("{last}")
time.sleep(60)"""


def test_a_missing_compiler_is_named_with_the_cure(monkeypatch):
    """Without a compiler the error says what to install, for either; a package that is not there has no plugins in it."""
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(aot, "find_spec", lambda _: None)
    with pytest.raises(CompilerError, match=r"needs libtpu.*no TPU.*pip install 'autoshard\[tpu\]'"):
        compile_ahead(lowered(), MESH, SLICE)

    def nowhere(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(aot, "find_spec", nowhere)
    with pytest.raises(CompilerError, match=r"needs JAX's CUDA plugin.*no GPU.*pip install 'autoshard\[gpu-compiler\]'"):
        compile_ahead(lowered(), MESH, GPUS)


def test_gpus_are_described_by_the_catalogue(monkeypatch):
    """Hosts are slices, and at its clock all lanes make the vector peak; the error for GPUs without a description names those with one."""
    config = GPUS.options["target_config"]
    for figure in ("core_count: 132", "clock_rate_ghz: 1.983", "device_memory_size: 75000000000", "major: 9"):
        assert figure in config
    assert GPUS.options["topology"] == "2x1x8" and GPUS.memory_limit_bytes == 60e9
    assert topology_of(Cluster.parse("a100:4")).options["topology"] == "1x1x4"
    strange = Cluster.parse("h100:8")
    strange = replace(strange, device=replace(strange.device, name="mi300"))
    for cluster in (strange, Cluster.parse("cpu:8")):
        with pytest.raises(ClusterError, match=r"a100, a100-40g, h100, h200, h20, b200.*h100:8x1"):
            topology_of(cluster)


def test_slices_of_less_than_a_host():
    """XLA:TPU divides slices into hosts of four chips; one that is smaller is a host of its own."""
    found = {name: topology_of(Cluster.parse(name)).options for name in ("v5e:1x1", "v5p:1x1x1", "v5e:2x2", "v5p:2x2x1")}
    assert found == {name: {"chips_per_host_bounds": (1, 1, 1)} if "1x1" in name else {} for name in found}


def test_slices_that_hosts_of_two_by_two_chips_do_not_make():
    """Rows of chips, as stages of a pipeline have them, are hosts of other bounds."""
    parts = [Cluster.parse(name).part(n) for name, n in (("v5e:2x4", 2), ("v5e:8x8", 8), ("v5p:2x2x2", 2))]
    assert [topology_of(part).options["chips_per_host_bounds"] for part in parts] == [(1, 4, 1), (1, 4, 1), (1, 2, 2)]


@pytest.mark.parametrize(("needed", "fits"), [(6e9, True), (60.1e9, False)])
def test_what_a_gpu_program_needs_is_held_against_what_it_may_use(monkeypatch, needed, fits):
    """XLA:GPU refuses nothing: what a program takes and what JAX leaves it decide."""
    monkeypatch.setattr(aot, "_exists", lambda _: True)
    stand_in(
        monkeypatch, f"""(folder / "compiled.json").write_text('{{"hlo": "HloModule m", "peak_bytes": 5, "needed_bytes": {needed}}}')"""
    )
    found = compile_ahead(lowered(), MESH, GPUS)
    assert (found.fits, found.needed_bytes, found.available_bytes, found.hlo) == (fits, needed, 60e9, "HloModule m")


def test_a_gpu_compiler_is_stopped_too(monkeypatch):
    """It writes other files: the report on memory comes last, and the device's name stands before the others' endings."""
    monkeypatch.setattr(aot, "_exists", lambda _: True)
    stand_in(monkeypatch, dumping("module_0001.jit_step.sm_9.0a_gpu_", "-memory-usage-report.txt"))
    started = time.perf_counter()
    found = compile_ahead(lowered(), MESH, GPUS)
    assert time.perf_counter() - started < 30
    assert found.fits and found.hlo == "HloModule m\n" and found.peak_bytes == 8


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 22.53G of 15.75G hbm. Exceeded by 6.78G.", 22.53, 15.75),
        ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (46.43G) exceeds available HBM (15.75G).", 46.43, 15.75),
    ],
)
def test_a_refusal_is_a_result(monkeypatch, message, needed, available):
    """XLA:TPU's two ways to say that a program does not fit (libtpu 0.0.42)."""
    stand_in(monkeypatch, f"(folder / 'failure').write_text({message!r})")
    found = compile_ahead(lowered(), MESH, SLICE)
    assert not found.fits and found.peak_bytes is None
    assert (found.needed_bytes, found.available_bytes) == (needed * 2**30, available * 2**30)


@pytest.mark.parametrize(
    "script",
    [
        "(folder / 'failure').write_text('UNIMPLEMENTED: no such thing')",
        "print('UNIMPLEMENTED: no such thing', file=sys.stderr); sys.exit(134)",
    ],
)
def test_other_failures_are_errors(monkeypatch, script):
    """What the compiler says reaches the user, and so does what its process says when it dies."""
    stand_in(monkeypatch, script)
    with pytest.raises(CompilerError, match="UNIMPLEMENTED: no such thing"):
        compile_ahead(lowered(), MESH, SLICE)


CUT = """
(folder / "module_0000.jit_step.after_optimizations.txt").write_text("HloModule m")
(folder / "module_0000.jit_step.after_optimizations-buffer-assignment.txt").write_text(
    "allocation 1: size 8, preallocated-temp:" + chr(10) + " value: <1 fusion.1 @0> (size=8,offset=0): f32[2]")
(folder / "module_0000.jit_step.after_optimizations-live-range.txt").write_text("HloLiveRange")
(folder / "module_0000.jit_step.after_optimizations_after_buffer_assignment.txt").touch()"""


@pytest.mark.parametrize("script", [*(f"(folder / 'compiled.json').write_text({text!r})" for text in ('{"hlo": ', "[]")), CUT])
def test_files_of_a_compiler_that_was_cut_short_are_a_failure(monkeypatch, script):
    """Of a full disk, or a process that dies while it writes: whoever asked goes on as without a compiler."""
    stand_in(monkeypatch, script)
    with pytest.raises(CompilerError, match="left files that cannot be read"):
        compile_ahead(lowered(), MESH, SLICE)


def test_the_process_is_stopped_once_memory_is_assigned(monkeypatch, tmp_path):
    """Code generation is not waited for; nothing stays behind."""
    monkeypatch.setattr(aot.tempfile, "tempdir", str(tmp_path))
    stand_in(monkeypatch, dumping(DUMP, "_after_buffer_assignment.txt"))
    started = time.perf_counter()
    found = compile_ahead(lowered(), MESH, SLICE)
    assert time.perf_counter() - started < 30
    assert found.fits and found.hlo == "HloModule m\n" and found.peak_bytes == 8
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_dumps_nothing_compiles_to_the_end(monkeypatch):
    """Another libtpu's names are not needed: the compiled program itself says the same."""
    stand_in(monkeypatch, """(folder / "compiled.json").write_text('{"hlo": "HloModule m", "peak_bytes": 5, "needed_bytes": 6}')""")
    found = compile_ahead(lowered(), MESH, SLICE)
    assert found.fits and (found.hlo, found.peak_bytes, found.needed_bytes) == ("HloModule m", 5, 6)
