"""The document of a checkpoint: the strategy, which of its arguments the state is, and a checksum of each array.

It is one JSON object beside Orbax's files, with a digest of itself. Nothing in it is executed, and it is checked as strategy files are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from autoshard.errors import CheckpointError, StrategyError
from autoshard.reader import Node, parse
from autoshard.run.structure import per_argument
from autoshard.strategy import Record, from_json
from autoshard.strategy.record import TensorRecord

FORMAT = 1
MAX_BYTES = 256 * 2**20
"""Of a document: a strategy file may have a quarter of it, and JSON escapes its quotes and ends of lines."""

MAX_EXTRA_BYTES = 2**20
WORD = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint says of its arrays.

    Attributes:
        record: the strategy under which the state was saved.
        first, last: the state is the argument at ``first``, or the tuple of those up to, and without, ``last``.
        weak: positions among the state's arrays of those of a weak type, such as counters that began as Python numbers.
        checksums: per array, as `checksums` computes them.
        extra: the user's own JSON value.
    """

    record: Record
    first: int
    last: int
    weak: tuple[int, ...]
    checksums: tuple[int, ...]
    extra: Any = None

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """The arrays of the state, in order."""
        return tensors_of(self.record, self.first, self.last)


def tensors_of(record: Record, first: int, last: int) -> tuple[TensorRecord, ...]:
    """The arrays of the arguments from one position up to another."""
    ends = [0, *accumulate(per_argument(record.argument_structure))]
    return record.arguments[ends[first] : ends[last]]


def document_of(contents: Contents, text: str) -> dict[str, Any]:
    """The document, its digest included; ``text`` is the strategy's JSON.

    Raises:
        CheckpointError: ``extra`` is no JSON value, or would not come back equal.
    """
    document = {
        "autoshard_checkpoint": FORMAT,
        "strategy": text,
        "arguments": [contents.first, contents.last],
        "weak": list(contents.weak),
        "checksums": list(contents.checksums),
        "extra": _checked(contents.extra),
    }
    return {**document, "digest": _digest(document)}


def _checked(extra: Any) -> Any:
    """The user's value, if JSON has it."""
    try:
        text = json.dumps(extra, allow_nan=False)
        if parse(text).json() == extra and len(text) <= MAX_EXTRA_BYTES:
            return extra
        reason = f"{len(text)} bytes of JSON" if len(text) > MAX_EXTRA_BYTES else "it would not come back equal"
    except (TypeError, ValueError, RecursionError, StrategyError) as error:
        reason = str(error)
    raise CheckpointError(
        "extra= of a checkpoint is a JSON value: dicts with string keys, lists, strings, numbers, booleans and None, of at most "
        f"{MAX_EXTRA_BYTES} bytes; got {extra!r:.100}: {reason.rstrip('.')}. Convert it, and make arrays part of the state."
    )


def contents_of(text: str) -> Contents:
    """The contents of a document's text, fully checked.

    Raises:
        StrategyError: it is no such document, or a damaged one; the message has the position.
    """
    part = parse(text).fields("autoshard_checkpoint", "strategy", "arguments", "weak", "checksums", "extra", "digest")
    part["autoshard_checkpoint"].integer(FORMAT, FORMAT)
    value = {name: node.value for name, node in part.items() if name != "digest"}
    if part["digest"].value != _digest(value):
        raise part["digest"].error("the digest of the rest: something was changed")
    if not isinstance(part["strategy"].value, str):
        raise part["strategy"].error("a string")
    record = from_json(part["strategy"].value)
    first, last = _range(part["arguments"], len(per_argument(record.argument_structure)))
    n = len(tensors_of(record, first, last))
    sums = tuple(node.integer(0, WORD) for node in part["checksums"].items(n))
    weak = tuple(node.integer(0, n - 1) for node in part["weak"].items())
    return Contents(record, first, last, weak, sums, part["extra"].json())


def _range(node: Node, n: int) -> tuple[int, int]:
    first, last = (child.integer(0, n) for child in node.items(2))
    if first >= last or (first > 0 and last - first > 1):
        raise node.error("one argument, or the first few")
    return first, last


def _digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
