"""A small hand-written record, and hypothesis strategies for arbitrary ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.ir import Collective, Mesh, MovedValue, Origin, Reason, ServedOp, Split, layout_to_spec
from autoshard.ir.attribution import REASONS, ROLES, VALUES
from autoshard.ir.collective import KINDS
from autoshard.ir.remat import Kept, LoopKept, Remat
from autoshard.ir.rewrites import FusedAttention, Microbatches, Offload, OneProgram, PackedExperts, Padded, PaddedDim, Recompute
from autoshard.rewrite.ring_attention import IMPLEMENTATIONS
from autoshard.strategy import (
    Confirmation,
    Finalist,
    PipelineRecord,
    Program,
    Provenance,
    Record,
    SearcherRecord,
    StageRecord,
    TensorRecord,
)

MESH = Mesh((("data", 4), ("model", 2)))

SENT = Collective(
    kind="all_gather",
    mesh_axes=("model",),
    bytes=4096.0,
    op=ServedOp("dot_general", 3, Origin("model.py", 7, "loss")),
    value=MovedValue("argument", "state['w']", "float32", (32, 64), ("transpose",)),
    reason=Reason("read", (None, "model"), (), (Split("i", 16),)),
    seconds=1e-6,
    exposed_seconds=0.5e-6,
    compiled=(Collective("all_gather", ("model",), 2048.0),),
)

EXAMPLE = Record(
    name="mlp-cpu8-example",
    program=Program("train_step", "5f" * 16, n_ops=6, n_values=9),
    cluster=Cluster.parse("cpu:8").to_dict(),
    mesh=MESH,
    arguments=(
        TensorRecord("state['w']", (64, 32), "float32", (None, "model")),
        TensorRecord("batch", (16, 64), "float32", ("data", None)),
    ),
    results=(TensorRecord("[0]['w']", (64, 32), "float32", (None, "model")), TensorRecord("[1]", (), "float32", ())),
    argument_structure={"tuple": [{"dict": {"w": 0}}, 1]},
    result_structure={"tuple": [{"node": "module.State", "keys": ["w", 1], "children": [0, None]}, {"list": [1]}]},
    choices={0: ((1, -1), (0, -1)), 3: ((2, 1), (-1, -1)), 5: ((-1, -1), (-1, -1))},
    layouts={0: (-1, 1), 1: (0, -1), 8: (-1, -1)},
    copies={0: (-1, -1)},
    cost=Cost(3e-6, 2.5e-6, 2e-6, 1e-6, 0.5e-6, 4096.0, 65536.0, (SENT,)),
    searcher=SearcherRecord("recursive_programming", {"seed": 0, "sweeps": 3}),
    lower_bound_seconds=2.9e-6,
    donate_argnums=(0,),
    assumptions=("the while loop at step.py:3 runs 10 times",),
    stats={"n_variables": 4, "search_seconds": 0.25, "induced_width": 2},
    provenance=Provenance("autoshard search step:train_step --cluster cpu:8", "0.1.0", "0.10.2"),
)

HALF = replace(EXAMPLE, name="stage", cluster=Cluster.parse("cpu:4").to_dict(), mesh=Mesh((("data", 2), ("model", 2))))

PIPELINED = replace(
    EXAMPLE,
    mesh=Mesh((("stage", 2), ("data", 2), ("model", 2))),
    choices={},
    layouts={},
    copies={},
    cost=replace(EXAMPLE.cost, collectives=()),
    pipeline=PipelineRecord("1f1b", 1, (2, 4), (StageRecord(HALF, *map(float, range(8))), StageRecord(HALF, *[1e-6] * 8)), (0, 1), (0, 1)),
)

seconds = st.floats(0, 1e30, allow_subnormal=True)
names = st.text(st.characters(min_codepoint=32, exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | names
options = st.dictionaries(
    names, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
)


@st.composite
def structures(draw, n_leaves: int):
    """A pytree in which each of the leaves stands once, with a None or an empty tuple here and there."""
    trees: list = [*range(n_leaves), None, {"tuple": []}]
    while len(trees) > 1:
        take = draw(st.integers(2, len(trees)))
        children, trees = trees[:take], trees[take:]
        keys = [f"k{position}" for position in range(take)]
        kinds = {
            "tuple": {"tuple": children},
            "list": {"list": children},
            "dict": {"dict": dict(zip(keys, children, strict=True))},
            "node": {"node": "some.Type", "keys": keys, "children": children},
        }
        trees.insert(0, kinds[draw(st.sampled_from(sorted(kinds)))])
    return trees[0]


known = st.none() | seconds
figures = {name: known for name in ("seconds", "collective_bytes", "flops", "peak_bytes", "needed_bytes")}
meshes = st.sampled_from((Mesh.of({"data": 8}), Mesh.of({"data": 2, "model": 4})))
measures = st.sampled_from((None, "scheduled", "corrected", "timed"))
taken = st.builds(Finalist, names, meshes, seconds, st.just("taken"), measure=measures, **figures)
others = st.builds(
    Finalist, names, meshes, seconds, st.sampled_from(("slower", "does not fit", "failed", "not reached")), st.just("") | names, **figures
)
confirmations = st.builds(
    Confirmation,
    st.sampled_from(("compiler", "devices")),
    names,
    st.just("") | names,
    st.tuples(st.lists(others, max_size=2), taken).map(lambda parts: (*parts[0], parts[1])),
)


shapes = st.lists(st.integers(0, 64), max_size=3).map(tuple)
values = st.builds(MovedValue, st.sampled_from(VALUES), names, names, shapes, st.lists(names, max_size=2).map(tuple))
origins = st.builds(Origin, st.just("") | names, st.integers(0, 2**20), st.just("") | names)
ops = st.builds(ServedOp, names, st.integers(0, 19), origins) | st.builds(ServedOp, name=names)


@st.composite
def reasons(draw, mesh: Mesh, n_axes: int):
    """Any reason of a collective over so many axes of a mesh, or None."""
    axis = st.sampled_from(mesh.names)
    spec = st.lists(st.none() | axis | st.just(mesh.names), max_size=3).map(tuple)
    splits = st.tuples(*[st.none() | st.builds(Split, names, st.integers(0, 64), st.sampled_from(ROLES))] * n_axes)
    dims = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    parts = {"before": spec, "after": spec, "splits": splits, "operator": names, "dims": dims, "argument": names}
    kind = draw(st.none() | st.sampled_from(sorted(REASONS)))
    return kind and Reason(kind, **{name: draw(parts[name]) for name in REASONS[kind]})


number = st.integers(0, 40)
pairs = st.lists(st.tuples(st.integers(-1, 40), number), max_size=3).map(tuple)
kept = st.builds(Kept, number, st.lists(number, max_size=3).map(tuple), pairs, pairs)
loops = st.lists(st.builds(LoopKept, number, number, kept), max_size=2).map(tuple)
remats = st.builds(Remat, names, st.just(()) | st.tuples(number, st.just(0)), kept, loops, *[seconds] * 4, st.booleans())
extents = st.lists(number.map(lambda n: (n + 1, n + 3)), min_size=1, max_size=2).map(tuple)
several = st.integers(2, 64)
each_kind = (
    st.builds(FusedAttention, st.sampled_from(sorted(IMPLEMENTATIONS)), st.lists(names, max_size=2).map(tuple), st.booleans(), several),
    st.builds(PackedExperts, seconds, st.lists(st.tuples(several, several), max_size=2).map(tuple)),
    st.builds(
        Padded,
        st.lists(st.builds(PaddedDim, number, number, extents, names, several, seconds), max_size=2).map(tuple),
        st.lists(st.tuples(number, number, extents), max_size=2).map(tuple),
    ),
    st.builds(Recompute, remats),
    st.builds(Microbatches, several)
    | st.builds(lambda n, each, *how: OneProgram(n, n * each, *how), several, several, several, st.booleans()),
    st.builds(Offload, st.lists(number, min_size=1, max_size=3).map(tuple)),
)
rewrites = st.tuples(*(st.none() | each for each in each_kind)).map(lambda found: tuple(each for each in found if each is not None))


@st.composite
def records(draw):
    """Any legal record of a small program."""
    sizes = draw(st.sampled_from(((8,), (2, 4), (4, 2), (2, 2, 2), (8, 1))))
    mesh = Mesh(tuple((f"axis{position}", size) for position, size in enumerate(sizes)))
    mesh = mesh.ordered(draw(st.permutations(mesh.names)))
    sizes = mesh.sizes
    layout = st.tuples(*(st.integers(-1, 3) for _ in sizes))
    choice = st.tuples(*(st.tuples(st.integers(0, 5), st.integers(-1, 3)) | st.just((-1, -1)) for _ in sizes))

    def tensor():
        rank = draw(st.integers(0, 3))
        placed = tuple(draw(st.integers(-1, rank - 1)) for _ in sizes)
        shape = tuple(8 * draw(st.integers(0, 4)) for _ in range(rank))
        return TensorRecord(
            draw(names), shape, draw(st.sampled_from(("float32", "key<fry>", "int4"))), layout_to_spec(placed, mesh.names, rank)
        )

    arguments = tuple(tensor() for _ in range(draw(st.integers(1, 4))))
    results = tuple(tensor() for _ in range(draw(st.integers(1, 3))))
    sent = st.sampled_from(KINDS), st.lists(st.sampled_from(mesh.names), unique=True).map(tuple), seconds, st.integers(0, 2**40)
    made = st.none() | st.lists(st.builds(Collective, *sent), max_size=2).map(tuple)
    collective = st.builds(Collective, *sent, st.none() | ops, st.none() | values, seconds=seconds, exposed_seconds=seconds, compiled=made)
    collective = collective.flatmap(lambda one: reasons(mesh, len(one.mesh_axes)).map(lambda reason: replace(one, reason=reason)))
    return Record(
        name=draw(names),
        program=Program(draw(names), draw(names), 20, 30, draw(rewrites), tuple(draw(st.lists(names, max_size=2)))),
        cluster=EXAMPLE.cluster,
        mesh=mesh,
        arguments=arguments,
        results=results,
        argument_structure=draw(structures(len(arguments))),
        result_structure=draw(structures(len(results))),
        choices=draw(st.dictionaries(st.integers(0, 19), choice, max_size=8)),
        layouts=draw(st.dictionaries(st.integers(0, 29), layout, max_size=8)),
        copies=draw(st.dictionaries(st.integers(0, 29), layout, max_size=3)),
        cost=Cost(*draw(st.tuples(*[seconds] * 7)), tuple(draw(st.lists(collective, max_size=3)))),
        searcher=SearcherRecord(draw(names), draw(options)),
        lower_bound_seconds=draw(seconds),
        donate_argnums=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        assumptions=tuple(draw(st.lists(names, max_size=2))),
        stats=draw(st.dictionaries(names, st.integers(0, 2**40) | seconds, max_size=4)),
        provenance=Provenance(draw(names), "0.1.0", "0.10.2", draw(st.none() | st.just("2026-11-21"))),
        confirmation=draw(st.none() | confirmations),
    )
