"""What commands print with ``--json``: by command the type, of which `autoshard.cli.json_schemas` makes JSON Schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class Printed:
    """An object that is printed: the fields of a dataclass but some, and more; or a list of such objects.

    Attributes:
        base: the dataclass; None: none.
        more: by name the types of further fields, or of fields that are printed otherwise.
        without: fields that are not printed.
        of: of a list, its items.
    """

    base: Any
    more: Mapping[str, Any]
    without: tuple[str, ...] = ()
    of: Any = None


@dataclass(frozen=True, slots=True)
class Either:
    """One of several things, by what is asked for."""

    kinds: tuple[Any, ...]


class Summary(TypedDict):
    """A strategy in its main figures; seconds and bytes are of one step on one device.

    Attributes:
        name, program, fingerprint: of the strategy; the function it is for, and a hash that equal programs share.
        cluster, mesh, searcher: where it runs, axis sizes by name, and what found it.
        makespan_seconds: the predicted step time; interval_seconds: between which times eight in ten published runs would be.
        objective_seconds, lower_bound_seconds: what searchers minimise, and its proven lower bound on this mesh.
        compute_seconds, communication_seconds, exposed_communication_seconds: parts of the step; exposed is what no compute hides.
        peak_bytes, flops: memory at the fullest moment, and work of products.
    """

    name: str
    program: str
    fingerprint: str
    cluster: str
    mesh: dict[str, int]
    searcher: str
    makespan_seconds: float
    objective_seconds: float
    lower_bound_seconds: float
    interval_seconds: tuple[float, float] | None
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    peak_bytes: float
    flops: float


class Named(Summary):
    """A strategy that is compared, by its file or its name in the library."""

    strategy: str


class Listed(Named):
    """A strategy of the library.

    Attributes:
        against_expert: step time in multiples of that of the usual sharding for the model; null where there is none.
    """

    against_expert: float | None


class Verified(TypedDict):
    """``autoshard strategies verify``: whether a strategy's predicted figures are still those of its file."""

    strategy: str
    reproduced: bool
    differences: list[str]


class Confirmed(TypedDict):
    """``autoshard strategies confirm``: what a compiler makes of a strategy, in words."""

    strategy: str
    confirmed: bool
    words: str


class Device(TypedDict):
    """A device of the catalogue: its name, a cluster of it as ``--cluster`` takes it, and the source of its figures."""

    name: str
    example: str
    source: str


class Resharded(TypedDict):
    """``autoshard reshard``: what moves between the layouts of two strategies.

    Attributes:
        kept_bytes, moved_bytes: of all devices: what stays on its device, and what is sent.
        bytes_by_link: by network, what is sent over it.
        seconds: predicted, of all transfers.
        order: per place of the new cluster, in the order in which strategies take devices, the number of the device that takes it.
    """

    kept_bytes: float
    moved_bytes: float
    bytes_by_link: dict[str, float]
    seconds: float
    order: list[int]


class Trained(TypedDict):
    """``autoshard demo``: one program, trained on one device and on all; numbers that are not finite are null."""

    program: str
    agrees: bool
    largest_relative_difference: float | None
    losses: list[float | None]
    reference_losses: list[float | None]
    step_seconds: float
    reference_step_seconds: float
    strategies: dict[str, Summary]
    collectives: list[Any]


class Sample(TypedDict):
    """A measured program, with its time as fitted and as predicted before."""

    section: str
    name: str
    size: str
    measured_seconds: float
    fitted_seconds: float
    before_seconds: float


class Calibrated(TypedDict):
    """``autoshard calibrate``: the cluster with the constants that fit what was measured.

    Attributes:
        cluster, start: with these constants, and the one that was started from, as in strategy files.
        constants: by name, each ``fitted`` and ``before``.
        errors: by section the median error of the fit: 0.1 where a prediction is 10 % too long or too short.
        start_seconds: of a program, which no prediction counts.
        disturbance: how many times as long as the fastest a typical run took.
    """

    cluster: dict[str, Any]
    start: dict[str, Any]
    constants: dict[str, Any]
    errors: dict[str, float]
    start_seconds: float
    disturbance: float
    samples: list[Sample]


_OBJECT, _LIST, _NUMBER, _TEXT = {"type": "object"}, {"type": "array"}, {"type": "number"}, {"type": "string"}
_TENSORS = {
    "type": "array",
    "items": _OBJECT,
    "description": "path, shape, dtype and spec of each leaf; runs of equal ones are folded",
}
_REWRITES = {
    "type": "array",
    "items": {"type": "object", "required": ["kind"], "properties": {"kind": _TEXT, "microbatches": {"type": "integer"}}},
    "description": "such as microbatches and recomputation, in the order in which they are applied",
}
_STRATEGY: dict[str, Any] = {
    "type": "object",
    "title": "Strategy file",
    "description": "What --save writes, without what reports show; autoshard.load reads it. Numbered lists are folded where layers repeat.",
    "required": ["schema", "name", "program", "mesh", "searcher", "provenance", "cluster", "lower_bound_seconds", "cost"]
    + ["stats", "assumptions", "arguments", "results", "argument_structure", "result_structure"],
    "properties": {
        "schema": {"const": 4, "description": "version of the file format"},
        "name": _TEXT,
        "program": {
            "type": "object",
            "required": ["name", "fingerprint", "n_ops", "n_values"],
            "properties": {"name": _TEXT, "fingerprint": _TEXT, "n_ops": {"type": "integer"}, "rewrites": _REWRITES},
        },
        "mesh": {
            "type": "array",
            "items": {"type": "array", "prefixItems": [_TEXT, {"type": "integer"}]},
            "description": "axes and sizes, outermost first",
        },
        "placement": {"description": "on which links of the cluster the axes are"},
        "searcher": {"type": "object", "required": ["name"], "properties": {"name": _TEXT, "options": _OBJECT}},
        "provenance": {"type": "object", "properties": {"command": _TEXT, "autoshard": _TEXT, "jax": _TEXT}},
        "cluster": {"type": "object", "description": "devices and links, as in cluster files"},
        "lower_bound_seconds": {"type": "number", "description": "proven for the objective on this mesh; 0.0: nothing is proven"},
        "cost": {
            "type": "object",
            "required": ["objective_seconds", "makespan_seconds", "compute_seconds", "communication_seconds", "peak_bytes", "flops"]
            + ["exposed_communication_seconds", "collectives"],
            "properties": {
                **dict.fromkeys(("objective_seconds", "makespan_seconds", "compute_seconds", "communication_seconds"), _NUMBER),
                **dict.fromkeys(("exposed_communication_seconds", "peak_bytes", "flops"), _NUMBER),
                "collectives": _LIST,
            },
        },
        "stats": {"type": "object", "description": "counts and seconds of the search"},
        "assumptions": {"type": "array", "items": _TEXT, "description": "what was assumed, in words"},
        "donate_argnums": {"type": "array", "items": {"type": "integer"}},
        "arguments": _TENSORS,
        "results": _TENSORS,
        "choices": _LIST,
        "layouts": _LIST,
        "copies": _LIST,
    },
}


def outputs() -> dict[str, Any]:
    """By command what it prints: a type, or a schema."""
    from autoshard.ask.sweep import SweepPoint
    from autoshard.ask.verification import Verification
    from autoshard.explanation import Explanation
    from autoshard.explanation.difference import Difference
    from autoshard.explanation.lint import Finding
    from autoshard.explanation.tensor import TensorExplanation
    from autoshard.verify.compare import Row
    from autoshard.verify.pins import Pin

    costs = dict.fromkeys(("seconds_per_item", "device_hours_per_item", "cost_per_item"), float | None)
    point = Printed(SweepPoint, {"mesh": dict[str, int], **costs}, ("strategy",))
    verdict = dict.fromkeys(("exact", "near", "as_predicted"), bool) | dict.fromkeys(("bytes_ratio", "flops_ratio"), float)
    pins = {"exact": bool, "minimal": bool, "constraints_in_all": int, "constraints": list[Pin], "per_shard": list[Any]}
    swept = {"item": str, "total": float | None, "pareto": list[str], "equal": list[list[str]]}
    swept |= {"points": Printed(None, {}, of=point), "notes": list[str]}
    return {
        "search": Either((_STRATEGY, list[Summary])),
        "evaluate": _STRATEGY,
        "explain": Either((Explanation, TensorExplanation)),
        "what-if": Difference,
        "lint": Printed(None, {"findings": list[Finding]}),
        "verify": Printed(Verification, {"mesh": dict[str, int], **verdict}),
        "pins": Printed(None, {**pins, "differing": list[Row], "python": str}),
        "compare": Either((list[Named], Printed(None, {"strategies": list[Named], "difference": Difference}))),
        "reshard": Resharded,
        "sweep": Printed(None, swept),
        "calibrate": Calibrated,
        "clusters": list[Device],
        "strategies": Either((list[Listed], list[Verified], list[Confirmed])),
        "demo": list[Trained],
    }
