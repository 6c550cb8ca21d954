"""What repeats is written once and comes back; folded parts that contradict themselves are refused."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategy_records import EXAMPLE, PIPELINED, SENT

from autoshard.errors import StrategyError
from autoshard.ir import MovedValue, Origin, ServedOp
from autoshard.strategy import TensorRecord, from_json, to_json
from autoshard.strategy.folded_leaves import MAX_ENTRIES
from autoshard.strategy.schema import encode


def deep(layers: int, changed: int = -1):
    """A record of a program of equal layers, but one whose layouts and specs are its own."""
    names = ("down", "norm", "up")

    def spec(layer: int):
        return (None, "model") if layer != changed else ("data", None)

    weights = [(f"['{layer}']['{name}']", spec(layer)) for layer in range(layers) for name in names]
    state = [TensorRecord(f"state['{part}']{path}", (64, 32), "float32", laid) for part in ("mu", "params") for path, laid in weights]
    results = [TensorRecord(f"[0]{tensor.path.removeprefix('state')}", *tensor[1:]) for tensor in map(_parts, state)]
    ops = 7 * layers
    sent = [
        replace(
            SENT,
            op=ServedOp("dot_general", 7 * layer + number, Origin("model.py", 7, "loss")),
            value=MovedValue("argument", f"state['params']['{layer}']['{names[number]}']", "float32", (32, 64)),
        )
        for layer in range(layers)
        for number in range(3)
    ]
    tree = [{"dict": {name: 3 * layer + number for number, name in enumerate(names)}} for layer in range(2 * layers)]
    sums = replace(SENT, op=ServedOp(name="[1]"), value=MovedValue("result", "reduce_sum", "float32", ()))
    return replace(
        EXAMPLE,
        program=replace(EXAMPLE.program, n_ops=ops, n_values=ops),
        arguments=tuple(state),
        results=(*results, TensorRecord("[1]", (), "float32", ())),
        argument_structure={"tuple": [{"list": tree}]},
        result_structure={"tuple": [{"list": tree}, 6 * layers]},
        choices={op: ((op % 7, -1), (-1, -1)) for op in range(ops)},
        layouts={op: (op % 7 % 3 - 1, 0 if op // 7 == changed else -1) for op in range(ops)},
        copies={},
        cost=replace(EXAMPLE.cost, collectives=(*sent, sums)),
    )


def _parts(tensor: TensorRecord):
    return _Whole((tensor.path, tensor.shape, tensor.dtype, tensor.spec))


class _Whole(tuple):
    path = property(lambda self: self[0])


DEEP = deep(12, changed=5)
TEXT = to_json(DEEP)


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
@pytest.mark.parametrize("changed", [-1, 0, 1])
def test_layers_come_back(layers, changed):
    """Equal layers, and layers of which one differs, are read as they were written, and written as they were read."""
    record = deep(layers, changed)
    text = to_json(record)
    assert from_json(text) == record
    assert to_json(from_json(text)) == text


def test_more_layers_take_no_more_room():
    """The file of 96 equal layers is as long as that of 12, numbers' digits apart; without folding it is fifteen times as long."""
    sizes = [len(to_json(deep(layers))) for layers in (12, 96)]
    assert sizes[1] < sizes[0] + 200
    assert len(json.dumps(encode(deep(96)))) > 15 * sizes[1]


def test_leaves_are_written_by_the_pattern_of_their_paths():
    """One line for all layers' weights of a name, one for parameters laid out as their moments are, one for the new state."""
    lines = [line.strip().removesuffix(",") for line in to_json(deep(12)).splitlines()]
    sizes = '"shape": [64, 32], "dtype": "float32", "spec": [null, "model"]'
    assert f'{{"path": "state[\'mu\'][\'*\'][\'up\']", "first": 0, "count": 12, "every": 3, {sizes}}}' in lines
    assert '{"path": "state[\'params\']*", "of": "state[\'mu\']*", "first": 0, "count": 36}' in lines
    assert '{"path": "[0]*", "of": "state*", "first": 0, "count": 72}' in lines


def test_files_of_schema_2_are_read():
    """In them nothing is folded."""
    for record in (DEEP, EXAMPLE):
        assert from_json(json.dumps(encode(record) | {"schema": 2})) == record


def test_the_stages_of_a_pipeline_are_folded_too():
    """Each is a whole strategy."""
    stages = tuple(
        replace(stage, record=replace(deep(8), cluster=stage.record.cluster, mesh=stage.record.mesh)) for stage in PIPELINED.pipeline.stages
    )
    record = replace(PIPELINED, pipeline=replace(PIPELINED.pipeline, stages=stages))
    text = to_json(record)
    assert from_json(text) == record and text.count('"again"') >= 8


blocks = st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 1)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(blocks, st.integers(1, 6)), max_size=5),
    st.lists(st.integers(0, 30), max_size=40),
    st.sampled_from(("['{}']", "a{}b", "*{}")),
)
def test_whatever_repeats_comes_back(runs, numbers, path):
    """Layouts in blocks that repeat, at any distances, and leaves whose paths count up, down, repeat or have stars."""
    layouts, number = {}, 0
    for block, times in runs:
        for step, layout in block * times:
            number += step
            layouts[number] = (layout, -1)
    leaves = tuple(TensorRecord(f"x{path.format(each)}", (each % 2,), "float32", (None,)) for each in numbers)
    order = {"list": list(range(len(leaves)))}
    record = replace(
        EXAMPLE,
        program=replace(EXAMPLE.program, n_values=number + 1, n_ops=number + 1),
        layouts=layouts,
        choices={},
        copies=dict(reversed(layouts.items())),
        arguments=leaves,
        argument_structure=order,
        results=tuple(replace(leaf, path=f"y{leaf.path[1:]}") for leaf in leaves),
        result_structure=order,
        cost=replace(EXAMPLE.cost, collectives=()),
    )
    text = to_json(record)
    assert from_json(text) == record
    assert to_json(from_json(text)) == text


# -- damage ---------------------------------------------------------------------------------------------------------------

REPLACEMENTS = (None, True, -1, 0, 10**9, "", "a*b", [], [1, 2], {}, {"again": 3, "back": 1, "shift": 1})
DOCUMENT = json.loads(TEXT)


def _places(value, path=()):
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(child, (*path, key))


def test_any_folded_value_replaced_is_read_or_refused():
    """Whatever stands in a folded entry, reading gives a record that can be written again or a StrategyError that names a place."""
    refused = 0
    for path in _places(DOCUMENT):
        if not {"again", "back", "shift", "first", "count", "every", "of", "as"}.isdisjoint(path):
            for new in REPLACEMENTS:
                document = copy.deepcopy(DOCUMENT)
                parent = document
                for key in path[:-1]:
                    parent = parent[key]
                parent[path[-1]] = new
                try:
                    record = from_json(json.dumps(document))
                except StrategyError as error:
                    assert re.match(r"at .*expected .*got ", str(error)), str(error)
                    refused += 1
                else:
                    assert from_json(to_json(record)) == record
    assert refused > 200


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        (r'"again":', f'"again":{MAX_ENTRIES}', "at most 4194304 entries"),
        (r'"back":', '"back":10', "back: expected a whole number from 1 to"),
        (r'"count": ', '"count": 9999999999', "lists of at most"),
        (r'"every": ', '"every": 9', "a path with a star, whose leaves have free places"),
    ],
    ids=("again", "back", "count", "every"),
)
def test_copies_of_what_is_not_there_are_refused(old, new, pattern):
    """Neither do a few characters unfold to gigabytes."""
    with pytest.raises(StrategyError, match=pattern):
        from_json(re.sub(old, new, TEXT, count=1))


def test_nested_copies_count_all_they_make():
    """Lists of copies of lists of copies are refused before they fill the memory."""
    tree: object = 0
    for _ in range(12):
        tree = {"list": [tree, {"again": 99, "back": 1, "shift": 0}]}
    with pytest.raises(StrategyError, match="entries in all"):
        from_json(json.dumps(DOCUMENT | {"argument_structure": tree}))
