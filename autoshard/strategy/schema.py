"""The schema of strategy files: encoding of each part of a record as JSON values, and its checked decoding.

Numbered parts (choices, layouts, copies, ahead, windows) are lists of pairs ``[number, entry]`` with ascending numbers. A choice is an
object with the mesh axes that split a factor: ``{"data": 0, "model": [2, 1]}`` splits factor 0 over ``data``, and factor 2 over ``model``
with its partial results scattered onto dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, ShardingError
from autoshard.ir import Choice, Layout, Mesh, Placement, Spec, check_divides, spec_to_layout
from autoshard.ir.rewrites import from_json, to_json
from autoshard.reader import MAX_DEPTH, Node, written
from autoshard.strategy.cost_schema import MAX_RANK, decode_cost, encode_cost, mesh_axis, spec_entry
from autoshard.strategy.pipeline_schema import decode_pipeline, encode_pipeline
from autoshard.strategy.record import (
    MEASURES,
    OUTCOMES,
    SCHEMA,
    Confirmation,
    Finalist,
    Program,
    Provenance,
    Record,
    SearcherRecord,
    TensorRecord,
    Tried,
    plain,
)

MAX_AXES = 16
LINE = 130  # characters of a report on one line

MAX_FACTORS = 4096

T = TypeVar("T")


def encode(record: Record) -> dict[str, Any]:
    """The record as JSON values, in the order of the file."""
    names = record.mesh.names
    return plain(
        {
            "schema": SCHEMA,
            "name": record.name,
            "program": _encode_program(record.program),
            "mesh": record.mesh.shape,
            **({} if record.mesh.order == tuple(range(len(names))) else {"axis_order": names}),
            **({} if record.mesh.placement is None else {"placement": asdict(record.mesh.placement)}),
            "searcher": {"name": record.searcher.name, "options": _sorted(record.searcher.options)},
            "provenance": asdict(record.provenance),
            "cluster": _sorted(record.cluster),
            "lower_bound_seconds": float(record.lower_bound_seconds),
            "cost": encode_cost(record.cost),
            **({} if record.confirmation is None else {"confirmation": _encode_confirmation(record.confirmation)}),
            "stats": _sorted(record.stats),
            "assumptions": record.assumptions,
            "donate_argnums": record.donate_argnums,
            "arguments": [asdict(tensor) for tensor in record.arguments],
            "results": [asdict(tensor) for tensor in record.results],
            "argument_structure": _sorted(record.argument_structure),
            "result_structure": _sorted(record.result_structure),
            "choices": [(op, _encode_choice(choice, names)) for op, choice in sorted(record.choices.items())],
            "layouts": sorted(record.layouts.items()),
            "copies": sorted(record.copies.items()),
            **({"ahead": sorted(record.ahead.items())} if record.ahead else {}),
            **({"windows": sorted(record.windows.items())} if record.windows else {}),
            **({"trail": written(record.trail)} if record.trail else {}),
            **({} if record.pipeline is None else {"pipeline": encode_pipeline(record.pipeline, encode)}),
            **({"report": [record.report[at : at + LINE] for at in range(0, len(record.report), LINE)]} if record.report else {}),
        }
    )


def decode(document: Node) -> Record:
    """The record of a document, fully checked.

    Raises:
        StrategyError: a part is invalid; the message has its position.
    """
    version = dict(document.members()).get("schema", Node(None, "schema"))
    if version.value not in (1, 2, 3, SCHEMA) or isinstance(version.value, bool):
        raise version.error(f"schema {SCHEMA}, or 1 to {SCHEMA - 1}, which this version of autoshard reads")
    part = document.fields(
        *("schema", "name", "program", "mesh", "searcher", "provenance", "cluster", "lower_bound_seconds", "cost", "stats"),
        *("assumptions", "donate_argnums", "arguments", "results", "argument_structure", "result_structure"),
        *("choices", "layouts", "copies"),
        optional=("axis_order", "placement", "confirmation", "ahead", "windows", "pipeline", "trail", "report"),
    )
    program = _program(part["program"] if version.value == SCHEMA else _with_rewrites(part["program"]))
    mesh = _mesh(part["mesh"], part.get("placement"), part.get("axis_order"))
    arguments = tuple(_tensor(node, mesh) for node in part["arguments"].items())
    results = tuple(_tensor(node, mesh) for node in part["results"].items())
    sizes = len(arguments), len(results), mesh.size
    return Record(
        name=part["name"].text(),
        program=program,
        cluster=_cluster(part["cluster"], mesh),
        mesh=mesh,
        arguments=arguments,
        results=results,
        argument_structure=_structure(part["argument_structure"], len(arguments)),
        result_structure=_structure(part["result_structure"], len(results)),
        choices=_numbered(part["choices"], program.n_ops, lambda node: _choice(node, mesh)),
        layouts=_numbered(part["layouts"], program.n_values, lambda node: _layout(node, mesh)),
        copies=_numbered(part["copies"], program.n_values, lambda node: _layout(node, mesh)),
        cost=decode_cost(part["cost"], mesh, worded=version.value == 1),
        searcher=_searcher(part["searcher"]),
        lower_bound_seconds=part["lower_bound_seconds"].number(),
        donate_argnums=tuple(node.integer(0, MAX_FACTORS) for node in part["donate_argnums"].items()),
        assumptions=tuple(node.text() for node in part["assumptions"].items()),
        stats={name: _stat(node) for name, node in _named(part["stats"])},
        provenance=_provenance(part["provenance"]),
        confirmation=_confirmation(part["confirmation"]) if "confirmation" in part else None,
        ahead=_numbered(part["ahead"], program.n_values, lambda node: _layout(node, mesh)) if "ahead" in part else {},
        windows=_numbered(part["windows"], program.n_ops, lambda node: node.integer(-1, 1)) if "windows" in part else {},
        pipeline=decode_pipeline(part["pipeline"], *sizes, decode) if "pipeline" in part else None,
        trail=tuple(each.record(Tried) for each in part["trail"].items()) if "trail" in part else (),
        report="".join(node.text() for node in part["report"].items()) if "report" in part else "",
    )


# -- parts, in the order of the file -------------------------------------------------------------------------------------


def _stat(node: Node) -> int | float:
    node.number()
    return node.value


def _encode_program(program: Program) -> dict[str, Any]:
    named = {"name": program.name, "fingerprint": program.fingerprint, "n_ops": program.n_ops, "n_values": program.n_values}
    rewrites = {"rewrites": to_json(program.rewrites)} if program.rewrites else {}
    return named | rewrites | ({"batch": program.batch} if program.batch else {})


def _program(node: Node) -> Program:
    part = node.fields("name", "fingerprint", "n_ops", "n_values", optional=("batch", "rewrites"))
    sizes = part["n_ops"].integer(0), part["n_values"].integer(0)
    rewrites = from_json(part["rewrites"]) if "rewrites" in part else ()
    batch = tuple(one.text() for one in part["batch"].items()) if "batch" in part else ()
    return Program(part["name"].text(), part["fingerprint"].text(), *sizes, rewrites, batch)


def _mesh(node: Node, placement: Node | None = None, order: Node | None = None) -> Mesh:
    axes = []
    for axis in node.items():
        name, size = axis.items(2)
        axes.append((name.text(), size.integer(1)))
    if len(axes) > MAX_AXES:
        raise node.error(f"at most {MAX_AXES} mesh axes")
    try:
        mesh = Mesh(tuple(axes))
    except ShardingError:
        raise node.error(f"mesh axes with distinct names, not {[name for name, _ in axes]}") from None
    if order is not None:
        names = [name.text() for name in order.items(len(mesh.axes))]
        if sorted(names) != sorted(mesh.names):
            raise order.error(f"the mesh axes larger than 1, {', '.join(mesh.names)}, in the order of layouts")
        mesh = mesh.ordered(names)
    if placement is None:
        return mesh
    part = placement.fields("topology", "dims", "axes")
    orders = {name: tuple(size.integer(0) for size in child.items()) for name, child in part.items()}
    try:
        return _placed(mesh, Placement(**orders))
    except ShardingError as error:
        raise placement.error(f"a placement of the mesh {mesh} ({str(error).rstrip('.')})") from None


def _placed(mesh: Mesh, placement: Placement) -> Mesh:
    """The mesh so placed; files of earlier versions number axes of size 1 too."""
    return Mesh(mesh.shape, placement) if len(placement.axes) > len(mesh.axes) else replace(mesh, placement=placement)


def _searcher(node: Node) -> SearcherRecord:
    part = node.fields("name", "options")
    return SearcherRecord(part["name"].text(), {name: option.json() for name, option in _named(part["options"])})


def _provenance(node: Node) -> Provenance:
    part = node.fields("command", "autoshard", "jax", "date")
    date = None if part["date"].value is None else part["date"].text()
    return Provenance(part["command"].text(empty=True), part["autoshard"].text(empty=True), part["jax"].text(empty=True), date)


def _cluster(node: Node, mesh: Mesh) -> dict[str, Any]:
    data = node.json()
    try:
        cluster = Cluster.from_dict(data)
    except ClusterError as error:
        raise node.error(f"the description of a cluster ({str(error).rstrip('.')})") from None
    if mesh.placement is not None and mesh.placement.topology != cluster.dimensions:
        raise node.error(f"the cluster that the mesh is placed on, of topology {list(mesh.placement.topology)}, outermost first")
    if cluster.n_devices != mesh.size:
        raise node.error(f"a cluster of as many devices as the mesh {mesh} has, not {cluster.n_devices}")
    return data


def _encode_confirmation(confirmation: Confirmation) -> dict[str, Any]:
    """A confirmation, its finalists without unknown figures."""
    finalists = [written(each) | {"mesh": each.mesh.shape} for each in confirmation.finalists]
    return {"by": confirmation.by, "name": confirmation.name, "version": confirmation.version, "finalists": finalists}


def _confirmation(node: Node) -> Confirmation:
    part = node.fields("by", "name", "version", "finalists")
    finalists = tuple(_finalist(each) for each in part["finalists"].items())
    if sum(each.outcome == "taken" for each in finalists) != 1:
        raise part["finalists"].error("finalists of which one is taken")
    by = part["by"].one_of(("compiler", "devices"))
    return Confirmation(by, part["name"].text(), part["version"].text(empty=True), finalists)


def _finalist(node: Node) -> Finalist:
    return node.record(Finalist, mesh=_mesh, outcome=partial(Node.one_of, words=OUTCOMES), measure=partial(Node.one_of, words=MEASURES))


def _tensor(node: Node, mesh: Mesh) -> TensorRecord:
    part = node.fields("path", "shape", "dtype", "spec")
    path = part["path"].text(empty=True)
    shape = tuple(dim.integer(0) for dim in part["shape"].items())
    spec: Spec = tuple(spec_entry(entry, mesh) for entry in part["spec"].items())
    try:
        check_divides(spec_to_layout(spec, mesh, len(shape), path), shape, mesh, path)
    except ShardingError as error:
        raise part["spec"].error(f"a spec that fits shape {list(shape)} on the mesh {mesh} ({str(error).rstrip('.')})") from None
    return TensorRecord(path, shape, part["dtype"].text(), spec)


def _structure(node: Node, n_leaves: int) -> Any:
    """The pytree of a structure, in which each leaf occurs once."""
    leaves: set[int] = set()

    def walk(tree: Node, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise tree.error(f"a pytree nested at most {MAX_DEPTH} deep")
        if tree.value is None:
            return
        if not isinstance(tree.value, dict):
            leaf = tree.integer(0, n_leaves - 1)
            if leaf in leaves:
                raise tree.error("a leaf that occurs nowhere else in the pytree")
            leaves.add(leaf)
            return
        for child in _children(tree):
            walk(child, depth + 1)

    walk(node, 0)
    if len(leaves) < n_leaves:
        raise node.error(f"a pytree of {n_leaves} leaves, not {len(leaves)}")
    return node.value


def _children(tree: Node) -> list[Node]:
    """The children of an inner node of a pytree."""
    kind = next(iter(tree.value), None)
    if kind in ("tuple", "list"):
        return tree.fields(kind)[kind].items()
    if kind == "dict":
        return [child for _, child in tree.fields(kind)[kind].members()]
    part = tree.fields("node", "keys", "children")
    part["node"].text()
    children = part["children"].items()
    for key in part["keys"].items(len(children)):
        if isinstance(key.value, dict | list):
            raise key.error("a string or a number")
        key.json()
    return children


def _encode_choice(choice: Choice, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: factor if scatter < 0 else [factor, scatter]
        for name, (factor, scatter) in zip(names, choice, strict=True)
        if factor >= 0 or scatter >= 0
    }


def _choice(node: Node, mesh: Mesh) -> Choice:
    found = {name: (-1, -1) for name in mesh.all_names}
    for name, entry in node.members():
        mesh_axis(Node(name, entry.where), mesh)
        if isinstance(entry.value, list):
            factor, scatter = entry.items(2)
            found[name] = factor.integer(0, MAX_FACTORS), scatter.integer(0, MAX_RANK)
        else:
            found[name] = entry.integer(0, MAX_FACTORS), -1
    return tuple(found[name] for name in mesh.names)


def _layout(node: Node, mesh: Mesh) -> Layout:
    """A layout; those of earlier versions have axes of size 1 too."""
    if isinstance(node.value, list) and len(node.value) == len(mesh.shape) > len(mesh.axes):
        return tuple(dim.integer(-1, MAX_RANK) for dim, (_, size) in zip(node.items(), mesh.shape, strict=True) if size > 1)
    return tuple(dim.integer(-1, MAX_RANK) for dim in node.items(len(mesh.axes)))


# -- helpers --------------------------------------------------------------------------------------------------------------


def _numbered(node: Node, count: int, read: Callable[[Node], T]) -> dict[int, T]:
    """The entries of a list of ``[number, entry]`` with ascending numbers below `count`."""
    found: dict[int, T] = {}
    least = 0
    for pair in node.items():
        number, entry = pair.items(2)
        found[number.integer(least, count - 1)] = read(entry)
        least = number.value + 1
    return found


def _named(node: Node) -> list[tuple[str, Node]]:
    return [(Node(name, node.where).text(), child) for name, child in node.members()]


def _sorted(value: Any) -> Any:
    """The JSON value with the names of every object sorted."""
    if isinstance(value, Mapping):
        return {name: _sorted(child) for name, child in sorted(value.items())}
    return [_sorted(child) for child in value] if isinstance(value, list) else value


def _with_rewrites(node: Node) -> Node:
    """A program of schema 3 or older, whose rewrites have names of their own, with these as a list, as in files of today."""
    fields = dict(node.value) if isinstance(node.value, dict) else {}
    if not fields.keys() & {"microbatches", "remat", "offload", "stages", "rounds"}:
        return node
    rewrites = [*found] if isinstance(found := fields.pop("rewrites", []), list) else [found]
    if (remat := fields.pop("remat", None)) is not None:
        rewrites.append({"kind": "recompute", "remat": remat})
    microbatches, stages, rounds = (fields.pop(name, 1) for name in ("microbatches", "stages", "rounds"))
    if stages != 1:
        rewrites.append({"kind": "one_program", "stages": stages, "microbatches": microbatches, "rounds": rounds})
    elif microbatches != 1:
        rewrites.append({"kind": "microbatches", "microbatches": microbatches})
    if leaves := fields.pop("offload", []):
        rewrites.append({"kind": "offload", "leaves": leaves})
    return Node(fields | {"rewrites": rewrites}, node.where)
