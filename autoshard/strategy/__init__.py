"""The record of a strategy and its canonical JSON file, without JAX."""

from autoshard.strategy.check import check_program
from autoshard.strategy.file import from_json, load_record, save_record, to_json
from autoshard.strategy.record import (
    BY_ROWS,
    SCHEMA,
    Confirmation,
    Finalist,
    PipelineRecord,
    Program,
    Provenance,
    Record,
    SearcherRecord,
    StageRecord,
    TensorRecord,
    Tried,
)
