"""The schema of a pipeline's stages in strategy files: each is a whole strategy, with its predicted times and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from autoshard.ir.pieces import PLACEMENTS
from autoshard.reader import Node
from autoshard.strategy.record import BY_ROWS, PipelineRecord, Record, StageRecord

_OPTIONAL = ("placement", "orders", "earlier", "rows")
_FIGURES = tuple(field.name for field in fields(StageRecord) if field.name != "record")
_LATER = "update_seconds"  # a figure that files of earlier versions lack


def encode_pipeline(pipeline: PipelineRecord, encode: Callable[[Record], Any]) -> dict[str, Any]:
    """A pipeline as JSON values; ``encode`` is that of records."""
    passes = {"earlier": [encode_pipeline(each, encode) for each in pipeline.earlier]} if pipeline.earlier else {}
    return {
        "schedule": pipeline.schedule,
        "chunks": pipeline.chunks,
        "cut": pipeline.cut,
        "placement": pipeline.placement,
        "orders": pipeline.orders,
        "argument_stages": pipeline.argument_stages,
        "result_stages": pipeline.result_stages,
        "stages": [
            {**{name: float(getattr(stage, name)) for name in _FIGURES}, "strategy": encode(stage.record)} for stage in pipeline.stages
        ],
        **passes,
        **({"rows": pipeline.rows} if pipeline.rows else {}),
    }


def decode_pipeline(node: Node, n_arguments: int, n_results: int, n_devices: int, decode: Callable[[Node], Record]) -> PipelineRecord:
    """A pipeline of JSON values, fully checked; ``decode`` is that of records.

    Raises:
        StrategyError: a part is invalid; the message has its position.
    """
    part = node.fields("schedule", "chunks", "cut", "argument_stages", "result_stages", "stages", optional=_OPTIONAL)
    stages = tuple(_stage(child, decode) for child in part["stages"].items())
    chunks = part["chunks"].integer(1)
    if len(stages) < 2 or len(stages) % chunks or sum(stage.record.mesh.size for stage in stages[: len(stages) // chunks]) != n_devices:
        raise part["stages"].error(f"two stages or more, {chunks} on each part of the devices, that have all {n_devices} among them")

    def numbers(name: str, length: int) -> tuple[int, ...]:
        return tuple(child.integer(BY_ROWS, len(stages) - 1) for child in part[name].items(length))

    return PipelineRecord(
        schedule=part["schedule"].text(),
        chunks=chunks,
        cut=tuple(child.integer(-1) for child in part["cut"].items()),
        stages=stages,
        argument_stages=numbers("argument_stages", n_arguments),
        result_stages=numbers("result_stages", n_results),
        placement=_placement(part["placement"]) if "placement" in part else PLACEMENTS[0],
        orders=tuple(child.text() for child in part["orders"].items()) if "orders" in part else (),
        earlier=tuple(decode_pipeline(child, 0, 0, n_devices, decode) for child in part["earlier"].items()) if "earlier" in part else (),
        rows=tuple(child.integer(0) for child in part["rows"].items()) if "rows" in part else (),
    )


def _placement(node: Node) -> str:
    if (found := node.text()) not in PLACEMENTS:
        raise node.error(f"one of {', '.join(PLACEMENTS)}")
    return found


def _stage(node: Node, decode: Callable[[Node], Record]) -> StageRecord:
    part = node.fields(*(name for name in _FIGURES if name != _LATER), "strategy", optional=(_LATER,))
    record = decode(part["strategy"])
    if record.pipeline is not None:
        raise part["strategy"].error("a stage that is no pipeline itself")
    return StageRecord(record, **{name: part[name].number() for name in _FIGURES if name in part})
