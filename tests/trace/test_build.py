"""What a graph says of a program: laws over all test programs first, then one primitive family at a time."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS, abstract, concrete, gpt, gpt_scan

import autoshard
from autoshard.ir import Flow, Graph, Op
from autoshard.ir.naming import RARELY
from autoshard.trace import subjaxprs, trace
from autoshard.trace.build import build

x8 = abstract((8, 4))


def primitives(graph: Graph) -> list[str]:
    return [op.primitive for op in graph.walk()]


def only(graph: Graph, primitive: str) -> Op:
    (found,) = (op for op in graph.walk() if op.primitive == primitive)
    return found


def equation(jaxpr, path):
    """The equation at a path, found as the lowering finds it."""
    eqn = getattr(jaxpr, "jaxpr", jaxpr).eqns[path[0]]
    return eqn if len(path) == 1 else equation(subjaxprs(eqn)[path[1]], path[2:])


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PROGRAMS)
def traced(request):
    fn, args = PROGRAMS[request.param]()
    return trace(fn, *args)


def test_paths_lead_back_to_the_equations(traced):
    """An op's path leads to an equation of its primitive, parameters and array shapes; no two ops share one."""
    graph = traced.graph
    for op in graph.walk():
        eqn = equation(traced.jaxpr, op.path)
        assert eqn.primitive.name == op.primitive and eqn.params is op.params
        assert [v.aval.shape for v in eqn.invars] == [graph.values[v].shape for v in op.operands]
        assert [v.aval.shape for v in eqn.outvars] == [graph.values[v].shape for v in op.results]
    assert len({op.path for op in graph.walk()}) == len(graph.walk())


def test_every_value_is_made_before_it_is_read(traced):
    """Ops read what an argument, a literal, an earlier op or a surrounding body gives; each value is made once, each op is numbered."""
    graph = traced.graph
    assert [op.index for op in graph.walk()] == list(range(len(graph.walk())))
    made = [*graph.arguments, *graph.constants, *graph.literals]

    def check(ops, seen: set[int], trips: int):
        for op in ops:
            assert seen.issuperset(op.operands) and op.trips == trips
            inner = set()
            for body in op.bodies:
                made.extend(body.inputs)
                inner |= check(body.ops, seen | set(body.inputs), trips * body.trips)
            own = [value for value in op.results if not inner or value not in inner]
            made.extend(own)
            seen |= set(own) | (inner if op.primitive == "remat2" else set())
        return seen

    seen = check(graph.ops, set(made), 1)
    assert seen.issuperset(graph.results)
    assert len(made) == len(set(made))


def test_flows_fit_their_holders(traced):
    """A source has the holder's shape, but for the leading dimension of scanned values; views have its shape too."""
    values = traced.graph.values
    for op in traced.graph.walk():
        for holder in op.holders:
            shape = values[holder.value].shape
            assert all(values[view].shape == shape for view in holder.views)
            for flow in holder.sources:
                assert values[flow.value].shape[max(0, flow.shift) :] == shape[max(0, -flow.shift) :]


@pytest.mark.sample(3)
def test_the_ops_compute_the_program(traced):
    """Binding the ops one after another gives what the closed jaxpr gives: nothing that matters is inlined wrongly or dropped."""
    program = build(traced.jaxpr)
    flat = [jnp.asarray(x) for x in jax.tree.leaves(concrete(traced.in_tree.unflatten([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in map(
        program.values.__getitem__, program.arguments)])))]  # fmt: skip
    assert not program.constants
    arrays = dict(zip((*program.arguments, *program.literals), (*flat, *program.written), strict=True))

    def run(*flat):
        arrays.update(zip(program.arguments, flat, strict=True))
        for op in program.ops:
            primitive = equation(traced.jaxpr, op.path).primitive
            results = primitive.bind(*[arrays[v] for v in op.operands], **primitive.get_bind_params(op.params))
            arrays.update(zip(op.results, results if primitive.multiple_results else [results], strict=True))
        return [arrays[v] for v in program.results]

    for got, expected in zip(jax.jit(run)(*flat), jax.jit(jaxpr_as_fun(traced.jaxpr))(*flat), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-5)


@pytest.mark.sample(3)
def test_a_graph_exports_to_networkx(traced):
    """Every op, argument and result is a node, every read of a produced value an edge, and results hang together with arguments."""
    graph = traced.graph.to_networkx()
    nodes = len(traced.graph.walk()) + len(traced.graph.arguments) + len(traced.graph.results)
    assert graph.number_of_nodes() == nodes and graph.number_of_edges() > len(traced.graph.results)
    assert all(graph.in_degree(("result", i)) == 1 for i in range(len(traced.graph.results)))


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_are_inlined():
    """`jit`, `custom_jvp` and `custom_vjp` calls leave only what they compute; the path counts each nesting level."""

    @jax.custom_vjp
    def half(x):
        return x * 0.5

    half.defvjp(lambda x: (half(x), None), lambda _, g: (g * 0.5,))
    graph = trace(lambda x: jax.jit(jax.jit(jnp.sin))(jax.nn.relu(half(x))), x8).graph
    assert primitives(graph) == ["mul", "max", "sin"]
    assert [op.path for op in graph.ops] == [(0, 0, 0), (1, 0, 0, 0, 0), (2, 0, 0, 0, 0)]


def test_dead_code_is_dropped_and_effects_are_kept():
    """What no result needs is gone; a print stays."""

    def fn(x):
        jnp.sin(x)
        jax.debug.print("{}", jnp.cos(x))
        return x + 1

    names = primitives(trace(fn, x8).graph)
    assert "sin" not in names and "cos" in names and "add" in names


def test_literals_and_constants_are_listed():
    """A number written in the program is a literal, an array it captures a constant, once however often it is used."""
    captured = jnp.arange(4.0)
    graph = trace(lambda x: (x * 2.0 + captured) * captured, x8).graph
    assert [graph.values[v].shape for v in graph.literals] == [()]
    assert [graph.values[v].shape for v in graph.constants] == [(4,)]


def test_element_sizes():
    """int4 takes half a byte, float8 one, a typed key the bytes of its data."""
    args = [abstract((2,), t) for t in (jnp.int4, jnp.float8_e4m3fn, jnp.bfloat16, jnp.bool_, jnp.complex64)] + [jax.random.key(0)]
    graph = trace(lambda *args: args, *args).graph
    kinds = [(graph.values[v].dtype, graph.values[v].itemsize) for v in graph.arguments]
    assert kinds == [("int4", 0.5), ("float8_e4m3fn", 1), ("bfloat16", 2), ("bool", 1), ("complex64", 8), ("key<fry>", 8)]


def test_a_shard_map_is_part_of_the_program():
    """Its operands are taken apart, its body is on shards, and its results are put together; what nothing reads is left out."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def body(x, y):
        return jnp.sin(x), jax.lax.psum(y, "d")

    graph = trace(lambda x: jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, P()))(x, x)[0], x8).graph
    assert [(op.primitive, op.mapped) for op in graph.walk()] == [(name, (("d", 8),)) for name in ("shard_map", "sin", "shard_map")]
    shapes = [[graph.values[value].shape for value in (*op.operands, *op.results)] for op in graph.walk()]
    assert shapes == [[(8, 4), (1, 4)], [(1, 4), (1, 4)], [(1, 4), (8, 4)]]


# --- control flow -----------------------------------------------------------------------------------------------------


def test_scan_holders():
    """A carry is held with its initial value and what the body makes of it; slices and stacked results are one dimension apart."""

    def fn(w, x, xs):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w) + x, c * 2.0), x, xs)

    graph = trace(fn, abstract((4, 4)), x8, abstract((3, 8, 4))).graph
    op, (w, x, xs), (carry, stacked) = graph.ops[0], graph.arguments, graph.results
    body = op.bodies[0]
    made, slice_out = body.outputs
    assert (op.primitive, op.trips, body.trips) == ("scan", 1, 3) and {inner.trips for inner in body.ops} == {3}
    consts, carries, slices, ys = op.holders
    assert (consts.value, consts.sources) == (body.inputs[0], (Flow(w),))
    assert (carries.value, carries.sources, carries.views) == (body.inputs[1], (Flow(x), Flow(made, inside=True)), (carry,))
    assert (slices.value, slices.sources) == (body.inputs[2], (Flow(xs, shift=1),))
    assert (ys.value, ys.sources) == (stacked, (Flow(slice_out, shift=-1, inside=True),))


def test_unused_stacked_results_are_dead():
    """What a scan would stack for nobody is not computed, and is no result; carries stay."""
    graph = trace(lambda x: lax.scan(lambda c, _: (c + 1.0, jnp.sin(c)), x, None, length=3)[0], x8).graph
    assert primitives(graph) == ["scan", "add"]
    assert len(graph.ops[0].results) == 1 and len(graph.ops[0].holders) == 1


def test_what_a_loop_does_not_need_never_enters_it():
    """Slices that no body reads, and carries that only feed themselves, are no operands; neither is what made them."""
    graph = trace(lambda x: lax.scan(lambda c, _: ((c[0] + 1.0, c[1] * 2.0), None), (x, jnp.sin(x)), jnp.cos(x))[0][0], x8).graph
    assert primitives(graph) == ["scan", "add"]
    assert graph.ops[0].operands == graph.arguments and len(graph.ops[0].results) == 1


def test_nested_loops_multiply_their_trips():
    """An op runs as often as the product of the loops around it says."""
    inner = lambda x: lax.fori_loop(0, 5, lambda _, x: jnp.sin(x), x)  # noqa: E731
    graph = trace(lambda x: lax.fori_loop(0, 3, lambda _, x: inner(x), x), x8).graph
    sine = only(graph, "sin")
    assert sine.trips == 15 and len(sine.path) == 5


def test_while_holders():
    """The condition's view of a carry, and the result, share the carry's layout; constants of both bodies are held."""

    def fn(limit, w, x):
        return lax.while_loop(lambda x: x.sum() < limit, lambda x: x @ w, x)

    graph = trace(fn, abstract(()), abstract((4, 4)), x8).graph
    op, (condition, body) = graph.ops[0], graph.ops[0].bodies
    limit, w, x = graph.arguments
    of_limit, of_w, carry = op.holders
    assert (of_limit.value, of_limit.sources) == (condition.inputs[0], (Flow(limit),))
    assert (of_w.value, of_w.sources) == (body.inputs[0], (Flow(w),))
    assert carry.value == body.inputs[1] and carry.views == (condition.inputs[1], graph.results[0])
    assert carry.sources == (Flow(x), Flow(body.outputs[0], inside=True))
    assert len(graph.assumptions) == 1 and "test_build.py" in graph.assumptions[0] and "one trip" in graph.assumptions[0]


@pytest.mark.parametrize(
    "condition, step, trips",
    [
        (lambda i: i < 10, 1, 10),
        (lambda i: i < 10, 3, 4),
        (lambda i: i <= 10, 5, 3),
        (lambda i: i < 0, 1, 0),
        (lambda i: i > 10, 1, None),
        (lambda i: i < 10, -1, None),
        (lambda i: i != 10, 1, None),
    ],
)
def test_counting_loops_are_counted(condition, step, trips):
    """A loop that counts by literals has a trip count; any other runs once by assumption."""
    graph = trace(lambda x: lax.while_loop(lambda c: condition(c[0]), lambda c: (c[0] + step, c[1] * 2), (0, x)), x8).graph
    assert graph.ops[0].bodies[1].trips == (1 if trips is None else trips)
    assert len(graph.assumptions) == (trips is None)


def test_rare_loops_have_no_trip():
    """A loop in the scope of rare ones counts as none, and needs no assumption."""

    def fn(limit, x):
        with jax.named_scope(RARELY):
            return lax.while_loop(lambda x: x.sum() < limit, lambda x: x * 2, x)

    graph = trace(fn, abstract(()), x8).graph
    assert graph.ops[0].bodies[1].trips == graph.ops[0].bodies[1].ops[0].trips == 0
    assert not graph.assumptions


def test_a_bound_carried_along_is_read():
    """JAX carries a loop's bound: an unchanged one that starts as a literal counts, one from an argument does not."""

    def loop(limit, x):
        return lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] * 2), (0, limit, x))[2]

    assert trace(lambda x: loop(7, x), x8).graph.ops[0].bodies[1].trips == 7
    assert trace(loop, 7, x8).graph.assumptions


def test_cond_holders():
    """Branches share the layout of what enters and of what leaves; an unused result is computed in none of them."""

    def fn(flag, x):
        kept, _ = lax.cond(flag, lambda x: (jnp.sin(x), jnp.tan(x)), lambda x: (x, jnp.tan(x)), x)
        return kept

    graph = trace(fn, abstract((), bool), x8).graph
    op = only(graph, "cond")
    assert "tan" not in primitives(graph) and len(op.bodies) == 2 and {body.trips for body in op.bodies} == {1}
    entering, leaving = op.holders
    assert entering.value == op.bodies[0].inputs[0] and entering.views == op.bodies[1].inputs
    assert entering.sources == (Flow(graph.arguments[1]),)
    assert leaving.value == graph.results[0] and leaving.sources == tuple(Flow(body.outputs[0]) for body in op.bodies)


def test_checkpoint_results_are_its_bodys_outputs():
    """A checkpoint adds nothing but a border: fresh inputs, and its body's own outputs as results, dead ones excepted."""

    def fn(x):
        same, sine, _, number = jax.checkpoint(lambda x: (x, jnp.sin(x), jnp.tan(x), 2.0))(x)
        return same, sine, number

    graph = trace(fn, x8).graph
    op = only(graph, "remat2")
    (body,) = op.bodies
    assert op.results == body.outputs and len(op.results) == 2  # what it only passes on is no result
    assert body.inputs[0] == op.holders[0].value and graph.results[0] == graph.arguments[0]
    assert op.holders[0].sources == (Flow(graph.arguments[0]),)
    assert [inner.primitive for inner in body.ops] == ["sin"] and graph.results[1] == op.results[0]


# --- origins ----------------------------------------------------------------------------------------------------------


def test_ops_name_the_users_line():
    """An op knows file, line, function and name stack; one from inside a library points to where the user called it."""

    def fn(x):
        with jax.named_scope("outer"):
            y = jnp.sin(x)  # first
        a = jax.nn.relu(y)  # second
        return jax.nn.relu(a + 1)  # third

    graph = trace(fn, x8).graph
    start = fn.__code__.co_firstlineno
    sine, first, second = (op.origin for op in graph.walk() if op.primitive in ("sin", "max"))
    assert sine.file.endswith("tests/trace/test_build.py") and sine.function.endswith("fn")
    assert [sine.line, first.line, second.line] == [start + 2, start + 3, start + 4]
    assert "outer" in sine.name_stack


@pytest.mark.parametrize("options", [{"stages": 2}, {"remat": "full"}])
def test_rewritten_programs_keep_the_users_lines(options):
    """In microbatches, stages and with recomputation what autoshard adds, and what libraries' functions do, is at a line of the step."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jax.nn.log_softmax(y @ w)
            return -jnp.mean(y)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    args = [jnp.ones((16, 16))] * 4, jnp.ones((8, 16))
    found = autoshard.search(step, *args, cluster="cpu:8", searcher="data_parallel", microbatches=2, **options)
    lines = range(step.__code__.co_firstlineno, step.__code__.co_firstlineno + 8)
    for traced in [stage._traced for stage in found.stages or [found]]:
        places = {(op.origin.file, op.origin.line in lines) for op in traced.graph.walk()}
        assert {file.rpartition("/")[2] for file, _ in places} == {"test_build.py"} and {inside for _, inside in places} == {True}


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_building_is_linear():
    """Eight times the layers take about eight times as long, not sixty-four."""

    def seconds(n_layers: int) -> float:
        fn, args = gpt(n_layers)
        jaxpr = jax.make_jaxpr(fn)(*args)
        times = []
        for _ in range(5):
            start = time.process_time()
            build(jaxpr)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(32) < 24 * seconds(4)


def test_a_scanned_model_is_as_small_as_one_layer():
    """The graph of a scanned model does not grow with its depth."""
    sizes = {len(trace(fn, *args).graph.walk()) for fn, args in (gpt_scan(2), gpt_scan(12))}
    assert len(sizes) == 1
