"""Strategy files come back as they were saved, and damaged ones give a StrategyError and nothing else."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from strategy_records import EXAMPLE, HALF, PIPELINED, records, rewrites

from autoshard.cluster import Cluster
from autoshard.errors import StrategyError
from autoshard.ir import Placement, ServedOp
from autoshard.strategy import Tried, from_json, load_record, save_record, to_json
from autoshard.strategy.file import MAX_BYTES, WIDTH

TEXT = to_json(EXAMPLE)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(records())
def test_a_record_comes_back_equal_and_its_bytes_too(record):
    """Reading what was written gives the record, and writing that gives the same text."""
    text = to_json(record)
    assert from_json(text) == record
    assert to_json(from_json(text)) == text


def test_the_example_is_read_back_from_its_file(tmp_path):
    """`save_record` writes what `load_record` reads, replacing what was there and leaving no other file."""
    path = tmp_path / "s.json"
    path.write_text("old")
    save_record(EXAMPLE, path)
    assert load_record(path) == EXAMPLE
    assert os.listdir(tmp_path) == ["s.json"]
    assert path.read_bytes() == TEXT.encode()


def test_a_placement_is_saved_and_may_be_missing():
    """A placed mesh comes back placed, on the cluster's own topology; a file without a placement is laid row-major."""
    placement = Placement((2, 4), (1, 0), (0, 1))
    record = replace(EXAMPLE, mesh=replace(EXAMPLE.mesh, placement=placement), cluster=Cluster.parse("v5e:2x4").to_dict())
    text = to_json(record)
    assert from_json(text).mesh.placement == placement
    assert '"placement"' not in to_json(EXAMPLE) and from_json(to_json(EXAMPLE)).mesh.placement is None
    with pytest.raises(StrategyError, match="placement"):
        from_json(text.replace('"dims": [1, 0]', '"dims": [1, 1]'))
    with pytest.raises(StrategyError, match="topology"):
        from_json(text.replace('"topology": [2, 4], "dims": [1, 0]', '"topology": [8], "dims": [0]'))


def test_the_forms_that_were_compared_are_saved():
    """With the figures that are known; a file without them is read as one of a search of one form."""
    trail = (Tried("2 microbatches", "taken", 0.2, 2e9, 0.1, 1e9), Tried("1 microbatch", "does not fit", seconds=0.05, peak_bytes=4e9))
    text = to_json(replace(EXAMPLE, trail=trail))
    assert from_json(text).trail == trail and from_json(TEXT).trail == () and '"trail"' not in TEXT
    with pytest.raises(StrategyError, match="trail"):
        from_json(text.replace('"outcome": "taken"', '"outcome": 3'))


def test_the_updates_of_a_pipeline_are_saved_and_may_be_missing():
    """With the orders that have them; a file of an earlier version has their seconds in those that come after."""
    updated = tuple(replace(stage, update_seconds=0.5) for stage in PIPELINED.pipeline.stages)
    record = replace(PIPELINED, pipeline=replace(PIPELINED.pipeline, stages=updated, orders=("FFBBU", "FBFBU")))
    assert from_json(to_json(record)) == record
    data = json.loads(to_json(PIPELINED))
    for stage in data["pipeline"]["stages"]:
        del stage["update_seconds"]
    assert from_json(json.dumps(data)) == PIPELINED


def test_a_pipeline_is_saved_with_the_strategy_of_each_stage():
    """Its stages, cut and schedule come back."""
    assert from_json(to_json(PIPELINED)) == PIPELINED


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"stages": PIPELINED.pipeline.stages[:1]}, "expected two stages or more, 1 on each part of the devices, that have all 8"),
        ({"argument_stages": (0, 2)}, "at pipeline.argument_stages.1.: expected a whole number from -1 to 1"),
        ({"result_stages": (0,)}, "expected a list of 2"),
        ({"stages": (replace(PIPELINED.pipeline.stages[0], record=PIPELINED),) * 2}, "pipeline.stages"),
        ({"schedule": ""}, "a string that is not empty"),
    ],
    ids=str,
)
def test_a_pipeline_that_contradicts_itself_is_refused(changes, pattern):
    """Stages have the devices of the mesh among them, and leaves are on stages that there are."""
    assert HALF.mesh.size * 2 == PIPELINED.mesh.size
    with pytest.raises(StrategyError, match=pattern):
        to_json(replace(PIPELINED, pipeline=replace(PIPELINED.pipeline, **changes)))


def in_schema_1(record):
    """The text of a record as files had it that say in words what collectives move, for what and why."""
    document = json.loads(to_json(record)) | {"schema": 1}
    cost = document["cost"]
    del cost["origins"], cost["reasons"]
    for sent in cost["collectives"]:
        for name in ("value", "op", "reason"):
            sent.pop(name, None)
        sent |= {"source": "dot_general model.py:7 (loss)", "tensor": "w float32[8]", "cause": "kept as P('model'), read whole: ..."}
    return json.dumps(document)


def test_a_file_of_schema_1_is_read_and_saved_as_today():
    """All of it comes back; of the words about a collective those for what it serves, and saving it writes today's schema."""
    old = from_json(in_schema_1(EXAMPLE))
    worded = tuple(
        replace(sent, op=ServedOp(name="dot_general model.py:7 (loss)"), value=None, reason=None) for sent in EXAMPLE.cost.collectives
    )
    assert old == replace(EXAMPLE, cost=replace(EXAMPLE.cost, collectives=worded))
    assert [sent.source for sent in old.cost.collectives] == ["dot_general model.py:7 (loss)"]
    assert json.loads(to_json(old))["schema"] == 4 and from_json(to_json(old)) == old


def in_schema_3(record):
    """The text of a record as files had it in which each rewrite of the program has a name of its own."""
    document = json.loads(to_json(record)) | {"schema": 3}
    program = document["program"]
    for each in program.pop("rewrites", []):
        kind = each.pop("kind")
        if kind == "recompute":
            program["remat"] = each["remat"]
        elif kind in ("microbatches", "one_program"):
            program |= each
        elif kind == "offload":
            program["offload"] = each["leaves"]
        else:
            program.setdefault("rewrites", []).append({"kind": kind, **each})
    return json.dumps(document)


@settings(deadline=None)
@given(rewrites.filter(lambda found: not any(getattr(each, "weights_apart", False) for each in found)))
def test_files_of_schema_3_are_read(found):
    """Their rewrites become a tuple, in the order in which they are applied."""
    record = replace(EXAMPLE, program=replace(EXAMPLE.program, rewrites=found))
    assert from_json(in_schema_3(record)) == record


@settings(max_examples=20, deadline=None)
@given(rewrites.filter(bool))
def test_rewrites_have_one_order(found):
    """A file with rewrites in another order, or with one of them twice, is refused."""
    document = json.loads(to_json(replace(EXAMPLE, program=replace(EXAMPLE.program, rewrites=found))))
    document["program"]["rewrites"] *= 2
    with pytest.raises(StrategyError, match=r"program\.rewrites: expected rewrites of different kinds in the order fused_attention, "):
        from_json(json.dumps(document))


def test_bytes_do_not_depend_on_the_order_in_which_a_record_was_built():
    """Mappings with the same members give the same bytes."""
    shuffled = replace(
        EXAMPLE,
        choices=dict(reversed(EXAMPLE.choices.items())),
        layouts=dict(reversed(EXAMPLE.layouts.items())),
        stats=dict(reversed(EXAMPLE.stats.items())),
        cluster=dict(reversed(EXAMPLE.cluster.items())),
    )
    assert to_json(shuffled) == TEXT


def test_a_file_is_readable():
    """Arguments and collectives take a line each, nothing else is much wider than the page, and the text ends its last line."""
    lines = TEXT.splitlines()
    assert '  {"path": "batch", "shape": [16, 64], "dtype": "float32", "spec": ["data", null]}' in lines
    assert '  [0,{"data":1,"model":0}], [3,{"data":[2,1]}], [5,{}]' in lines
    sent = [line for line in lines if line.startswith('   {"kind":"all_gather"')]
    assert len(sent) == len(EXAMPLE.cost.collectives) and max(len(line) for line in lines if line not in sent) <= WIDTH + 20
    assert TEXT.endswith("}\n")


def test_numpy_scalars_are_saved_as_numbers():
    """Stats of numpy type come back as the plain numbers they are."""
    record = replace(EXAMPLE, stats={"n": np.int64(3), "t": np.float64(0.1)})
    assert from_json(to_json(record)).stats == {"n": 3, "t": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {"lower_bound_seconds": float("nan")},
        {"stats": {"x": float("inf")}},
        {"stats": {"x": print}},
        {"layouts": {99: (0, 0)}},
        {"layouts": {0: (0,)}},
        {"layouts": {0: [0, -1]}},
        {"choices": {0: ((-1, 1), (-1, -1))}},
        {"name": ""},
        {"argument_structure": {"tuple": [0]}},
        {"assumptions": ("\x1b[2J",)},
    ],
    ids=str,
)
def test_a_record_that_would_not_come_back_is_not_written(changes, tmp_path):
    """Saving refuses what loading would refuse or change, and leaves no file."""
    with pytest.raises(StrategyError, match="cannot be saved"):
        save_record(replace(EXAMPLE, **changes), tmp_path / "s.json")
    assert not os.listdir(tmp_path)


def test_nesting_beyond_the_limit_is_not_written():
    """A pytree too deep to be read back, even too deep for the encoder, is refused."""
    for depth in (150, 100_000):
        tree: object = 0
        for _ in range(depth):
            tree = {"list": [tree]}
        with pytest.raises(StrategyError, match="cannot be saved"):
            to_json(_with_structure({"tuple": [tree, 1]}))


def _with_structure(structure):
    try:
        return replace(EXAMPLE, argument_structure=structure)
    except RecursionError:
        raise StrategyError("cannot be saved") from None


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    """A missing folder is named, with what to do."""
    with pytest.raises(StrategyError, match=r"nowhere.*cannot be written.*Choose"):
        save_record(EXAMPLE, tmp_path / "nowhere" / "s.json")


def test_a_failed_write_leaves_no_file(tmp_path):
    """Where the target cannot be replaced, here a folder, the temporary file goes."""
    (tmp_path / "s.json").mkdir()
    with pytest.raises(StrategyError, match="cannot be written"):
        save_record(EXAMPLE, tmp_path / "s.json")
    assert os.listdir(tmp_path) == ["s.json"]


# -- damage ---------------------------------------------------------------------------------------------------------------

REPLACEMENTS = (None, True, -1, 0, 1.5, 10**30, "", "text", "a\u001b[31m", "\ud800", [], [[]], [1, 2, 3], {}, {"x": 1}, {"tuple": 3})


def _places(value, path=()):
    """The path of every value in a JSON document."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in members:
        yield from _places(child, (*path, key))


def _replaced(path, new):
    document = copy.deepcopy(DOCUMENT)
    if not path:
        return new
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = new
    return document


DOCUMENT = json.loads(TEXT)


def test_any_value_replaced_by_any_other_is_read_or_refused():
    """Whatever stands anywhere in the file, reading gives a record that can be written again or a StrategyError; for a
    top-level part a value of another type is always refused."""
    free = ("stats", "searcher", "cluster")
    refused = 0
    for path in _places(DOCUMENT):
        for new in REPLACEMENTS:
            text = json.dumps(_replaced(path, new))
            try:
                record = from_json(text)
            except StrategyError as error:
                assert re.match(r"(at|in) .*expected .*got ", str(error)), str(error)
                assert "\n" not in str(error)
                refused += 1
            else:
                assert from_json(to_json(record)) == record
                now = DOCUMENT
                for key in path:
                    now = now[key]
                assert path[0] in free or isinstance(new, type(now)) or isinstance(now, float | None) or _nullable(path), (path, new)
    assert refused > 1000


def _nullable(path):
    """Where null and other types are legal: spec entries, splits, an op's name, dates, structures and factors of a choice."""
    return not {"spec", "before", "splits", "op", "date", "argument_structure", "result_structure", "choices"}.isdisjoint(path)


@pytest.mark.sample(20)
@pytest.mark.parametrize("path", [p for p in _places(DOCUMENT) if p and isinstance(p[-1], str)], ids=lambda p: ".".join(map(str, p)))
def test_a_missing_name_is_refused_unless_it_is_free(path):
    """Every named part of the format must be there."""
    document = copy.deepcopy(DOCUMENT)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    unknown = path[:2] == ("cost", "collectives") and path[-1] in ("exposed_seconds", "value", "moves", "op", "reason", "compiled")
    if unknown or (path[0] == "stats" and len(path) > 1) or "options" in path[:-1] or (path[0] == "choices" and len(path) > 1):
        from_json(json.dumps(document))
    elif path[0] != "cluster" or len(path) == 1:
        with pytest.raises(StrategyError, match="expected"):
            from_json(json.dumps(document))


@pytest.mark.sample(30)
@pytest.mark.parametrize("path", [p for p in _places(DOCUMENT)], ids=lambda p: ".".join(map(str, p)) or "top")
def test_an_unknown_name_is_refused_unless_names_are_free(path):
    """A name the format does not know is refused wherever names are fixed."""
    document = copy.deepcopy(DOCUMENT)
    node = document
    for key in path:
        node = node[key]
    if not isinstance(node, dict) or path[:1] == ("stats",) or "options" in path:
        return
    node["surprise"] = 1
    with pytest.raises(StrategyError, match="expected"):
        from_json(json.dumps(document))


@pytest.mark.sample(10)
@pytest.mark.parametrize("end", range(0, len(TEXT) - 2, 50))
def test_a_truncated_file_is_refused(end, tmp_path):
    """Every prefix of a file is refused with its name, a place and what to do, in one paragraph."""
    path = tmp_path / "s.json"
    path.write_text(TEXT[:end])
    with pytest.raises(StrategyError, match=r"s\.json' cannot be used: at .*expected .*got .*\. Restore") as caught:
        load_record(path)
    assert "\n" not in str(caught.value)


def _text(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


HOSTILE = {
    "deep lists": ("[" * 200_000, "nested"),
    "deep objects": ('{"a":' * 200_000, "nested"),
    "stats in words": (_text('"induced_width": 2', '"induced_width": "two"'), r"a number from 0 to 1e\+30"),
    "deep options": (_text('"options": {', f'"options": {{"x": {"[" * 300}{"]" * 300}, '), "nested at most 100"),
    "thousands of digits": (_text('"n_ops": 6', '"n_ops": ' + "9" * 5000), "digits"),
    "more than 63 bits": (_text('"n_ops": 6', '"n_ops": ' + "9" * 30), r"program\.n_ops"),
    "float overflow": (_text("3e-06", "1e999"), "finite"),
    "NaN": (_text("3e-06", "NaN"), "finite"),
    "Infinity": (_text("3e-06", "-Infinity"), "finite"),
    "negative seconds": (_text("3e-06", "-3e-06"), r"cost\.objective_seconds: expected a number from 0 to 1e\+30, got -3e-06"),
    "seconds beyond sense": (_text("3e-06", "1e308"), r"cost\.objective_seconds: expected a number from 0 to 1e\+30, got 1e\+308"),
    "a negative dimension": (_text('"shape": [16, 64]', '"shape": [-16, 64]'), r"arguments\[1\]\.shape\[0\]: expected a whole"),
    "a name twice": (_text('"name": "mlp', '"name": "x", "name": "mlp'), 'once, got "name" twice'),
    "a number twice": (_text("[1,[0,-1]]", "[0,[0,-1]]"), r"layouts\[1\]\[0\]: expected a whole number from 1 to 8, got 0"),
    "a value out of range": (_text("[8,[-1,-1]]", "[9,[-1,-1]]"), r"layouts\[2\]\[0\]: expected a whole number from 2 to 8, got 9"),
    "a short layout": (_text("[1,[0,-1]]", "[1,[0]]"), r"layouts\[1\]\[1\]: expected a list of 2, got a list of 1"),
    "a bool for a dimension": (_text("[1,[0,-1]]", "[1,[true,-1]]"), r"layouts\[1\]\[1\]\[0\]: expected a whole number"),
    "an unknown axis": (
        _text('{"data":1,"model":0}', '{"dta":1,"model":0}'),
        r"choices\[0\]\[1\].dta: expected a mesh axis, one of data, model",
    ),
    "a spec of too many entries": (_text('["data", null]', '["data", null, null]'), r"arguments\[1\]\.spec: expected a spec that fits"),
    "a spec that does not divide": (_text('"shape": [16, 64]', '"shape": [18, 64]'), r"arguments\[1\]\.spec: .*size 18"),
    "an axis twice in a spec": (_text('["data", null]', '["data", "data"]'), r"arguments\[1\]\.spec"),
    "a reason that there is not": (_text('"reason":0', '"reason":7'), r"collectives\[0\]\.reason: expected a whole number from 0 to 0"),
    "a reason of another mesh": (_text('[["i",16,""]]', '[["i",16,""],null]'), r"reason: expected a reason with 1 splits"),
    "an unknown reason": (_text('"kind":"read"', '"kind":"whim"'), r"reasons\[0\]\.kind: expected one of read, unruled"),
    "a reason that lacks its data": (_text('"before":[null,"model"],', ""), r"reasons\[0\]: expected an object with 'before'"),
    "a mesh of other size": (_text('["data", 4]', '["data", 8]'), "as many devices as the mesh"),
    "a mesh axis twice": (_text('["model", 2]', '["data", 2]'), "distinct"),
    "a leaf twice": (
        _text('[{"dict": {"w": 0}}, 1]', '[{"dict": {"w": 0}}, 0]'),
        r"argument_structure\.tuple\[1\]: expected a leaf that occurs nowhere else",
    ),
    "a missing leaf": (_text('[{"dict": {"w": 0}}, 1]', '[{"dict": {"w": 0}}]'), "2 leaves, not 1"),
    "another schema": (_text('"schema": 4', '"schema": 5'), "at schema: expected schema 4, or 1 to 3, which"),
    "a true schema": (_text('"schema": 4', '"schema": true'), "at schema"),
    "terminal escapes": (_text("mlp-cpu8", "mlp\\u001b[2J"), "control characters"),
    "terminal escapes in a name": (_text('{"dict": {"w": 0}}', '{"dict": {"\\u001b[2J\\n": true}}'), r"dict\.\?\[2J\?: expected"),
    "text after the end": (TEXT + "{}", "Extra data"),
    "nothing": ("", "expected JSON"),
    "another document": ("[1, 2]", "at its top: expected an object, got a list of 2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_with_what_is_wrong(name, tmp_path):
    """Each kind of damage gives a one-paragraph error that names the place and the reason."""
    text, pattern = HOSTILE[name]
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(StrategyError, match=pattern) as caught:
        load_record(path)
    assert str(caught.value).startswith(f"strategy file '{path}' cannot be used: ")
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_a_pytree_too_deep_is_refused():
    """Nesting that JSON still reads but a walk over it should not follow is refused."""
    tree = '{"list": [' * 150 + "0" + "]}" * 150
    with pytest.raises(StrategyError, match="nested at most 100 deep") as caught:
        from_json(_text('{"dict": {"w": 0}}', tree))
    assert len(str(caught.value)) < 400


def test_duplicates_among_very_many_names_are_found_quickly():
    """A name that stands twice is found in linear time."""
    names = ", ".join(f'"k{number}": 0' for number in range(200_000))
    with pytest.raises(StrategyError, match="k199999"):
        from_json(f'{{{names}, "k199999": 1}}')


def test_files_that_are_none_are_refused(tmp_path):
    """A missing path, a folder, bytes that are no text, and a file beyond the size limit are refused, each by name."""
    for path in (tmp_path / "missing.json", tmp_path, "nul\0byte"):
        with pytest.raises(StrategyError, match="Give the path of a file"):
            load_record(path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(StrategyError, match="at byte 12: expected UTF-8 text, got 0xff"):
        load_record(binary)
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(StrategyError, match="has more"):
        load_record(big)
