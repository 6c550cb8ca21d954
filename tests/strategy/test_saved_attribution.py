"""What a strategy's collectives move, for which op and why, is data, in memory and in the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from programs import PROGRAMS

import autoshard
from autoshard.ir import ServedOp
from autoshard.ir.attribution import REASONS, VALUES
from autoshard.strategy import from_json, to_json

NAMES = ("mlp", "moe", "lstm", "gpt_scan", "control_flow")


@pytest.fixture(scope="module", params=NAMES)
def record(request):
    """A strategy's record with many collectives."""
    fn, args = PROGRAMS[request.param]()
    options = {"mesh": {"data": 4, "model": 2}, "donate_argnums": 1 if request.param == "control_flow" else ()}  # what it carries is state
    return autoshard.search(fn, *args, cluster="v5e:2x4", searcher=autoshard.FullySharded(stage=3), **options).record


def test_every_collective_says_as_data_what_it_moves_for_which_op_and_why(record):
    """The value is an argument of the program or made by a primitive, the op has its number and line, the reason what its kind has."""
    assert record.cost.collectives
    paths = {tensor.path for tensor in record.arguments}
    for sent in record.cost.collectives:
        assert sent.value.kind in VALUES and sent.value.dtype and all(isinstance(dim, int) for dim in sent.value.shape)
        assert (sent.value.name in paths) == (sent.value.kind == "argument") and sent.value.kind != "unknown"
        assert set(REASONS[sent.reason.kind]) >= {name for name in ("splits", "argument") if getattr(sent.reason, name)}
        if sent.op.primitive:
            assert 0 <= sent.op.index < record.program.n_ops and sent.op.origin.file.endswith(".py") and sent.op.origin.line > 0
        else:
            assert sent.reason.kind == "replaced" and sent.op == ServedOp(name=sent.op.name)
        assert sent.source and sent.tensor and sent.cause


def test_collectives_come_back_from_a_file_with_their_words(record):
    """What is read is equal, down to each collective's attribution, and so reads alike."""
    back = from_json(to_json(record)).cost.collectives
    assert back == record.cost.collectives
    assert [(one.source, one.tensor, one.cause) for one in back] == [(one.source, one.tensor, one.cause) for one in record.cost.collectives]


def test_no_sentence_is_saved_with_a_collective(record):
    """Every string in the file that belongs to a collective is a name, which has no space: no kind, path or primitive has one."""
    cost = json.loads(to_json(record))["cost"]
    found = [*strings([cost[part] for part in ("origins", "reasons", "collectives")])]
    assert found and not [text for text in found if " " in text]


def test_a_value_that_is_moved_before_it_is_sent_says_which_argument_it_was():
    """A weight that is cast and then gathered is that argument, with what was done to it."""
    import jax
    import jax.numpy as jnp

    def program(w, x):
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    args = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    specs = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec("data")
    strategy = autoshard.evaluate(program, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    (sent,) = strategy.cost.collectives
    assert (sent.value.kind, sent.value.name) == ("argument", "w")
    assert sent.reason.kind == "read" and sent.reason.before == ("data", None) and sent.reason.after == ()
    assert (sent.op.primitive, sent.op.origin.function) == ("dot_general", sys._getframe().f_code.co_name + ".<locals>.program")


def strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value but the names of its members."""
    if isinstance(value, str):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(child)
