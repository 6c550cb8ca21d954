"""The report on a strategy says what the record says, and its pictures what JAX does."""

import doctest
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from strategy_records import EXAMPLE

from autoshard.explanation import explain as module
from autoshard.explanation.explain import argument_parts, explain, side_by_side, summary
from autoshard.explanation.explain_tensors import mesh_picture, tensor_picture
from autoshard.explanation.groups import shard_bytes
from autoshard.ir import Collective, Mesh, MovedValue, Origin, Reason, ServedOp, Split, layout_to_spec
from autoshard.lower import jax_mesh
from autoshard.render import Table, to_text
from autoshard.search import DataParallel, FullySharded
from autoshard.strategy import SearcherRecord, TensorRecord, Tried

MESHES = [Mesh.of({"data": 8}), Mesh.of({"data": 4, "model": 2}), Mesh.of({"data": 2, "model": 2, "third": 2})]


@st.composite
def sharded_tensors(draw):
    """A mesh of 8 devices and a tensor that lies on it in any layout."""
    mesh = draw(st.sampled_from(MESHES))
    rank = draw(st.integers(1, 3))
    layout = tuple(draw(st.integers(-1, rank - 1)) for _ in mesh.axes)
    return mesh, TensorRecord("w", (8, 16, 24)[:rank], "float32", layout_to_spec(layout, mesh.names, rank))


@settings(deadline=None)
@given(sharded_tensors())
def test_pictures_show_where_jax_puts_the_blocks(case):
    """Each device stands in the block, counted along the two dimensions shown, that JAX gives it; bytes a device are JAX's."""
    mesh, tensor = case
    sharding = NamedSharding(jax_mesh(mesh), PartitionSpec(*tensor.spec))
    order = {device: number for number, device in enumerate(sharding.mesh.devices.flat)}
    local = sharding.shard_shape(tensor.shape)
    assert shard_bytes(tensor.shape, tensor.dtype, tensor.spec, mesh) == 4 * math.prod(local)
    shown = [dim for dim, (n, part) in enumerate(zip(tensor.shape, local, strict=True)) if part < n][:2]
    expected: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(tensor.shape).items():
        block = tuple((index[dim].start or 0) // local[dim] for dim in shown)
        expected.setdefault(block, set()).add(order[device])
    rows = tensor_picture(tensor, mesh).rows
    found = {}
    for down, row in enumerate(rows):
        for across, cell in enumerate(row):
            place = (down, across) if len(shown) == 2 else (max(down, across),) if shown else ()
            found[place] = numbers_of(cell.text)
    assert found == expected


def numbers_of(text):
    """The device numbers that ``0-2,5`` stands for."""
    found = set()
    for run in text.split(","):
        low, _, high = run.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def test_pictures_of_large_meshes_stay_small():
    """Of a mesh of 512 devices the picture shows the ends, and says that something is left out."""
    picture = mesh_picture(Mesh.of({"data": 32, "model": 16}))
    assert max(len(picture.rows), *map(len, picture.rows)) <= 8
    assert "…" in {cell.text for row in picture.rows for cell in row} and picture.rows[-1][-1].text == "511"


def test_repeated_layers_and_optimizer_moments_share_a_row():
    """Layers of equal sharding share a row with their moments; one that differs has its own, named by its number."""

    def tensors(prefix):
        for layer in range(4):
            yield TensorRecord(f"{prefix}['layers'][{layer}]['up']", (64, 32), "float32", (None, "model" if layer != 2 else "data"))

    arguments = (*tensors("state['params']"), *tensors("state['optimizer'][0].mu"), *tensors("state['optimizer'][0].nu"))
    table = next(part for part in argument_parts(replace(EXAMPLE, arguments=arguments)) if isinstance(part, Table))
    some, other = "state['params']['layers'][0,1,3]['up'] x 3", "state['params']['layers'][2]['up']"
    assert [row[:2] for row in table.rows] == [(some, "6"), (other, "2")]
    assert table.rows[0][4] == "36.9 kB"  # 9 tensors of 64 x 32 / 2 float32


def test_a_moment_that_is_sharded_otherwise_has_its_own_row():
    """What mirrors a parameter's path but not its spec is not counted with it."""
    parameter = TensorRecord("params['up']", (64, 32), "float32", (None, None))
    moment = TensorRecord("optimizer[0].mu['up']", (64, 32), "float32", (None, "model"))
    table = next(part for part in argument_parts(replace(EXAMPLE, arguments=(parameter, moment))) if isinstance(part, Table))
    assert [row[:2] for row in table.rows] == [("params['up']", ""), ("optimizer[0].mu['up']", "")]


def test_new_values_that_take_memory_of_their_own_are_mentioned():
    """Where nothing is donated the report says how to, and not where something is."""
    assert "--donate" not in to_text(explain(EXAMPLE, details=True))
    text = to_text(explain(replace(EXAMPLE, donate_argnums=()), details=True))
    assert "No argument is donated, so both are held" in " ".join(text.split())


def test_the_forms_that_were_compared_show_in_the_details():
    """Each with what was estimated and found; nothing where there was one form."""
    taken = Tried("2 microbatches", "taken", 0.25, 2e9, 0.125, 1e9)
    trail = taken, Tried("8 microbatches", "not searched: estimated to be slower", 0.5, 5e8)
    text = to_text(explain(replace(EXAMPLE, trail=trail), details=True))
    assert re.search(r"2 microbatches +250 ms +2.00 GB +125 ms +1.00 GB +taken", text)
    assert "estimated to be slower" in text and "Forms of the step" not in to_text(explain(EXAMPLE, details=True))


def test_the_report_has_every_section_with_the_records_numbers():
    """Step time, memory, proof, arguments, new results, collectives with seconds, assumptions and origin all show in the details."""
    text = to_text(explain(EXAMPLE, details=True))
    for words in (
        *("2.50 µs predicted", "4.10 kB a device", "gap 3.3 %", "state['w']", "P(None, 'model')", "1 that replace arguments"),
        *(
            "all_gather",
            "dot_general",
            "the while loop at step.py:3",
            "autoshard search step:train_step",
            "seed=0",
            "mesh data=4 x model=2",
        ),
    ):
        assert words in text, words


@pytest.mark.parametrize("bound, words", [(0.0, "nothing proven"), (EXAMPLE.cost.objective_seconds, "proven: no strategy on this mesh")])
def test_optimality_is_said_plainly(bound, words):
    """What is proven and what is not reads differently."""
    assert words in to_text(explain(replace(EXAMPLE, lower_bound_seconds=bound), details=True))


def test_equal_collectives_are_counted_together_and_long_lists_are_cut():
    """Collectives of one kind, size and source line are one row, dearest first; the rest is summed up."""
    same = [Collective("all_reduce", ("data",), 1e6, 1, ServedOp("dot_general", n, Origin("/home/a/model.py", 7, "f"))) for n in range(3)]
    others = [Collective("all_gather", ("model",), 10.0, 2, ServedOp("add", 9, Origin("model.py", line, "g"))) for line in range(20)]
    text = to_text(explain(replace(EXAMPLE, cost=replace(EXAMPLE.cost, collectives=(*others, *same)))))
    first = next(line for line in text.splitlines() if line.startswith((" all_reduce", " all_gather")))
    assert first.split()[:2] == ["all_reduce", "data"] and " 3 " in first and "dot_general model.py:7 (f)" in first
    assert "43 in a step" in text and "18 more take" in text


def test_layers_share_a_row_that_says_why():
    """A collective of every layer is one row with count, seconds and exposed seconds, the tensor with a star, its reader and its cause."""
    reason = Reason("read", ("data", None), (), (Split("i", 16),))
    layers = [
        Collective("all_gather", ("data",), 4e3, 1, op, MovedValue("argument", f"w['layers'][{n}]", "float32", (32, 8)), reason, 2e-3, 5e-4)
        for n, op in enumerate(ServedOp("dot_general", index, Origin("/a/model.py", 7, "f")) for index in (2, 4, 6))
    ]
    (table,) = (
        part
        for part in explain(replace(EXAMPLE, cost=replace(EXAMPLE.cost, collectives=tuple(layers)))).parts
        if isinstance(part, Table) and part.columns[0] == "kind"
    )
    cause = "kept as P('data', None), read whole: dot_general splits i=16 over 'data'"
    told = f"w['layers'][*] float32[32,8]\nfor dot_general model.py:7 (f)\n{cause}"
    assert table.rows == (("all_gather", "data", "4.00 kB", "3", "6.00 ms", "1.50 ms", told),)


def test_a_portfolio_names_its_members():
    """The searchers among a searcher's options read as one writes them, not as bare dicts."""
    searcher = SearcherRecord("auto", {"members": (DataParallel(), FullySharded(stage=1))})
    text = " ".join(to_text(explain(replace(EXAMPLE, searcher=searcher), details=True)).split())
    assert "auto(members=[data_parallel(), fully_sharded(stage=1)])" in text


def test_comparisons_give_ratios_within_a_program_only():
    """Strategies of one program are set against its fastest, with padded dimensions too; another program has its own."""
    slow = replace(EXAMPLE, cost=replace(EXAMPLE.cost, makespan_seconds=5e-6))
    other = replace(slow, program=replace(EXAMPLE.program, fingerprint="00"))
    padded = replace(slow, program=replace(EXAMPLE.program, fingerprint="01", rewrites=(SimpleNamespace(kind="padding"),)))
    rows = side_by_side({"fast": EXAMPLE, "slow": slow, "other": other, "padded": padded}).parts[0].rows
    assert [row[4] for row in rows] == ["1.00 x", "2.00 x", "1.00 x", "2.00 x"]
    assert summary(slow)["makespan_seconds"] == 5e-6 and summary(slow)["mesh"] == {"data": 4, "model": 2}


def test_examples_in_the_docstrings_hold():
    """The examples of the small formatting functions hold."""
    assert doctest.testmod(module).failed == 0 and jax.device_count() == 8
