"""Arguments and results: paths, aliases, donation, constraints, fingerprints, errors."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, SequenceKey
from programs import PROGRAMS, abstract, gpt, mlp

from autoshard.errors import AutoshardError, TraceError
from autoshard.ir import Value
from autoshard.trace import constraint_spec, trace
from autoshard.trace.leaves import find_aliases

P = PartitionSpec
x8 = abstract((8, 4))


def error_of(fn, *args, **options) -> str:
    with pytest.raises(TraceError) as caught:
        trace(fn, *args, **options)
    assert isinstance(caught.value, AutoshardError) and "\n" not in str(caught.value)
    return str(caught.value)


# --- structure --------------------------------------------------------------------------------------------------------


def test_arguments_may_be_arrays_structs_and_numbers():
    """Any pytree of arrays, abstract arrays and Python numbers is traced as `jax.jit` would."""
    traced = trace(lambda tree, k: tree["a"] * k + tree["b"][0], {"a": jnp.ones(4), "b": (abstract((4,)), None)}, 2)
    assert [traced.graph.values[v].dtype for v in traced.graph.arguments] == ["float32", "float32", "int32"]
    assert traced.graph.argument_paths == ("tree['a']", "tree['b'][0]", "k")
    assert traced.in_tree == jax.tree.structure(({"a": 0, "b": (0, None)}, 0))


def test_paths():
    """A path is the argument's name, then the keys; varargs and keywords are numbered and named; a bare result is 'result'."""

    def fn(first, *rest, **named):
        return {"loss": first, "rest": list(rest), "named": named}

    graph = trace(fn, x8, x8, (x8,), kwargs={"flag": x8}).graph
    assert graph.argument_paths == ("first", "rest[0]", "rest[1][0]", "kwargs['flag']")
    assert graph.result_paths == ("['loss']", "['named']['flag']", "['rest'][0]", "['rest'][1][0]")
    assert trace(jnp.sin, x8).graph.result_paths == ("result",)
    assert trace(functools.partial(fn, x8), x8).graph.name == "fn"


def test_a_call_goes_through_flat_arrays_and_back():
    """Splitting, running the closed jaxpr and packing gives the function's own result."""
    traced = trace(lambda s, x: ({"w": s["w"] + 1}, x.sum()), {"w": x8}, x8)
    args = ({"w": jnp.ones((8, 4))}, jnp.ones((8, 4)))
    flat = jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(traced.split(args)))
    state, total = traced.merge(args, traced.pack(flat))
    assert state["w"][0, 0] == 2 and total == 32
    with pytest.raises(TraceError, match="one structure"):
        traced.split((args[0]["w"], args[1]))


def test_a_prefix_is_spread_over_the_leaves():
    """One spec may stand for all leaves of an argument; anything structured otherwise is refused."""
    traced = trace(lambda s, x: x, {"a": x8, "b": [x8, x8]}, x8)
    is_leaf = lambda entry: entry is None or isinstance(entry, P)  # noqa: E731
    assert traced.flatten_prefix((P("d"), None), is_leaf) == [P("d")] * 3 + [None]
    assert traced.flatten_prefix(({"a": P(), "b": P("d")}, None), is_leaf) == [P(), P("d"), P("d"), None]
    with pytest.raises(ValueError):
        traced.flatten_prefix(({"c": P()}, None), is_leaf)


# --- aliases ----------------------------------------------------------------------------------------------------------


def aliases(fn, *args, **options):
    graph = trace(fn, *args, **options).graph
    return {graph.result_paths[r]: graph.argument_paths[a] for r, a in graph.aliases}


def test_returned_state_replaces_its_argument():
    """Every leaf of a train step's state is aliased to itself, whether the step returns the state or state and loss."""
    fn, args = mlp()
    graph = trace(fn, *args).graph
    pairs = {graph.result_paths[r]: graph.argument_paths[a] for r, a in graph.aliases}
    assert pairs == {f"[0]{path.removeprefix('state')}": path for path in graph.argument_paths if path.startswith("state")}
    assert aliases(lambda state, x: {"w": state["w"] + x}, {"w": x8}, x8) == {"['w']": "state['w']"}


def test_equal_trees_are_matched_in_order():
    """Parameters and moments that share their keys go each to their own argument."""

    def fn(params, mu, nu, x):
        return params, mu, nu, x.sum()

    tree = {"w": x8}
    assert aliases(fn, tree, tree, tree, x8) == {"[0]['w']": "params['w']", "[1]['w']": "mu['w']", "[2]['w']": "nu['w']"}


def test_bare_arrays_are_matched_in_order_of_equal_types():
    """The first result of a shape and type replaces the first bare argument of that shape and type."""
    fn = lambda w, m, x: (x.sum(), w - m, m)  # noqa: E731
    assert aliases(fn, x8, x8, abstract((3,))) == {"[1]": "w", "[2]": "m"}
    assert aliases(lambda w, x: w @ x, x8, abstract((4, 8))) == {}
    assert aliases(lambda w: w.astype(jnp.bfloat16), x8) == {}


def test_donated_arguments_take_what_is_left():
    """A donated leaf goes onto a result of its shape and type whatever their paths; one that fits none stays alone."""
    fn = lambda cache, x: {"new": cache["old"] + x}  # noqa: E731
    assert aliases(fn, {"old": x8}, abstract((4,))) == {}
    assert aliases(fn, {"old": x8}, abstract((4,)), donate_argnums=0) == {"['new']": "cache['old']"}
    assert trace(fn, {"old": x8}, abstract((4,)), donate_argnums=(0, -1)).graph.donated == (0, 1)
    assert aliases(fn, {"old": x8}, abstract((4,)), donate_argnums=1) == {}


leaf = st.tuples(st.sampled_from(["", "['a']", "['b']"]), st.sampled_from([(2,), (3,)]))
result = st.tuples(st.sampled_from([(), ("a",), (0, "a"), (0, "b"), (1,)]), st.sampled_from([(2,), (3,)]))


@given(st.lists(leaf, max_size=6), st.lists(result, max_size=6), st.sets(st.integers(0, 5)))
def test_aliases_are_one_to_one_and_typed(arguments, results, donated):
    """Whatever the trees: no argument or result twice, equal shapes, and no donated argument left next to a result that fits it."""
    arguments = [(key, Value(shape, "float32", 4)) for key, shape in arguments]
    paths = [tuple(SequenceKey(k) if isinstance(k, int) else DictKey(k) for k in path) for path, _ in results]
    results = [(path, Value(shape, "float32", 4)) for path, (_, shape) in zip(paths, results, strict=True)]
    donated = [position for position in donated if position < len(arguments)]
    pairs = find_aliases(arguments, results, donated, {})
    assert len({r for r, _ in pairs}) == len({a for _, a in pairs}) == len(pairs) and list(pairs) == sorted(pairs)
    assert all(results[r][1] == arguments[a][1] for r, a in pairs)
    left = [results[r][1] for r in range(len(results)) if r not in {r for r, _ in pairs}]
    assert not any(arguments[a][1] in left for a in donated if a not in {a for _, a in pairs})


# --- constraints ------------------------------------------------------------------------------------------------------


def constraints(fn, *args, **options):
    return [constraint_spec(op) for op in trace(fn, *args, **options).graph.walk() if op.primitive == "sharding_constraint"]


def test_bare_constraints_trace_without_a_mesh():
    """A bare PartitionSpec names axes and fixes no mesh; its axes are found out, inside loops too."""

    def fn(x):
        x = jax.lax.with_sharding_constraint(x, P("data", ("model", "seq")))
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.with_sharding_constraint(x, P(None, "late")), x)

    expected = [(("data", ("model", "seq")), None), ((None, "late"), None)]
    assert constraints(fn, x8) == expected == constraints(fn, x8, axis_names=("model", "other"))


def test_open_dimensions_stay_open():
    """An unconstrained dimension is told from an unsharded one."""
    fn = lambda x: jax.lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, None))  # noqa: E731
    ((spec, mesh),) = constraints(fn, x8, axis_names=("data",))
    assert spec[0] is P.UNCONSTRAINED and all(entry is None for entry in spec[1:]) and mesh is None


def test_a_named_sharding_fixes_the_mesh():
    """A NamedSharding brings its mesh's shape."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fn = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("b")))  # noqa: E731
    assert constraints(fn, x8) == [(("b",), {"a": 4, "b": 2})]


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_survives_another_process():
    """Another process with another hash seed finds the same fingerprints."""
    names = ["moe", "control_flow", "gpt_scan", "convnet"]
    code = (
        "from programs import PROGRAMS; from autoshard.trace import trace\n"
        f"for name in {names}: fn, args = PROGRAMS[name](); print(trace(fn, *args).graph.fingerprint)"
    )
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)])}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
    assert there == [trace(fn, *args).graph.fingerprint for fn, args in (PROGRAMS[name]() for name in names)]


def fingerprint(fn, *args, **options) -> str:
    return trace(fn, *args, **options).graph.fingerprint


def first(weights, inputs):
    hidden = jax.nn.relu(inputs @ weights)
    return jax.lax.cond(hidden.sum() > 0, jnp.sin, jnp.cos, hidden * 2.0)


def test_a_fingerprint_survives_renaming():
    """Other names, lines, jit wrappers and dead code leave it; the mesh of the trace does too."""

    def second(w, x):
        jnp.tan(x)
        h = jax.nn.relu(x @ w)
        positive = h.sum() > 0
        return jax.lax.cond(positive, lambda a: jnp.sin(a), lambda a: jnp.cos(a), h * 2.0)

    args = abstract((4, 4)), x8
    assert fingerprint(first, *args) == fingerprint(second, *args) == fingerprint(jax.jit(second), *args)
    pinned = lambda x: jax.lax.with_sharding_constraint(x, P("d"))  # noqa: E731
    assert fingerprint(pinned, x8) == fingerprint(pinned, x8, axis_names=("other", "d"))


@pytest.mark.parametrize(
    "other",
    [
        lambda w, x: jnp.sin(x @ w) * 3.0,
        lambda w, x: jnp.cos(x @ w) * 2.0,
        lambda w, x: jnp.sin(x @ w.T) * 2.0,
        lambda w, x: jnp.sin(jnp.matmul(x, w, precision="highest")) * 2.0,
        lambda w, x: (jnp.sin(x @ w) * 2.0, w),
        lambda w, x: jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x @ w) * 2.0, x),
    ],
)
def test_another_program_has_another_fingerprint(other):
    """A literal, an op, an operand, a parameter, a result or a loop more makes another program; so do shapes and donation onto results."""
    fn = lambda w, x: jnp.sin(x @ w) * 2.0  # noqa: E731
    args = abstract((4, 4)), x8
    assert fingerprint(fn, *args) != fingerprint(other, *args)
    assert fingerprint(fn, *args) != fingerprint(fn, abstract((4, 4)), abstract((16, 4)))
    assert fingerprint(lambda d: [d["x"]], {"x": x8}) != fingerprint(lambda d: [d["x"]], {"x": x8}, donate_argnums=0)


def test_trip_counts_and_bodies_are_in_the_fingerprint():
    """Loops of other lengths or with other bodies are other programs."""
    loop = lambda n, f: lambda x: jax.lax.fori_loop(0, n, lambda _, x: f(x), x)  # noqa: E731
    prints = {fingerprint(loop(n, f), x8) for n in (2, 3) for f in (jnp.sin, jnp.cos)}
    assert len(prints) == 4


def test_self_partitioned_functions_are_told_apart():
    """The inside of an opaque op counts, by structure."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))  # noqa: E731
    assert fingerprint(mapped(lambda x: jnp.sin(x)), x8) == fingerprint(mapped(lambda y: jnp.sin(y)), x8)
    assert fingerprint(mapped(lambda x: jnp.sin(x)), x8) != fingerprint(mapped(lambda x: jnp.cos(x)), x8)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_argument_that_is_no_array_is_named():
    """The error gives the path of the leaf, what it is, and what to do."""
    message = error_of(lambda state, x: x, {"a": [1.0, {"text"}]}, x8)
    assert "'state['a'][1]' is set {'text'}" in message and "functools.partial" in message


def test_something_that_is_no_function_is_refused():
    """What cannot be called is not traced."""
    assert "int 3" in error_of(3, x8)


def test_control_flow_on_values_names_the_line():
    """JAX's own reason, the user's line and a way out."""

    def branch(x):
        if x.sum() > 0:
            return x
        return -x

    message = error_of(branch, x8)
    line = branch.__code__.co_firstlineno + 1
    assert re.search(rf"'branch' failed at \S*test_trace.py:{line} ", message)
    assert "TracerBoolConversionError" in message and "argument x" in message and "jax.lax.cond" in message


@pytest.mark.parametrize(
    "fn, args, pieces",
    [
        (lambda a, b: a @ b, (x8, x8), ["contracting dimensions", "test_trace.py"]),
        (lambda a, b: a, (x8,), ["got 1", "missing a required argument: 'b'", "all of them"]),
        (lambda a: "text", (x8,), ["not a valid JAX type"]),
        (lambda a: jax.lax.psum(a, "nowhere"), (x8,), ["nowhere"]),
        (lambda a: range(a), (3,), ["functools.partial"]),
        (lambda a, n: jax.jit(jnp.multiply, static_argnums=1)(a, n), (x8, 3), ["takes it static", "functools.partial"]),
    ],
)
def test_untraceable_functions_say_why(fn, args, pieces):
    """Whatever goes wrong while tracing becomes one paragraph with the reason."""
    message = error_of(fn, *args)
    assert all(piece in message for piece in pieces)


def test_donation_is_checked():
    """Donating an argument that is not there is an error."""
    assert "got 2" in error_of(lambda a, b: a, x8, x8, donate_argnums=2)


def test_a_large_model_is_traced_whole():
    """An unrolled transformer's graph holds the ops of every layer and of the optimizer."""
    one, two = ([op.primitive for op in trace(fn, *args).graph.walk()] for fn, args in (gpt(1), gpt(2)))
    assert two.count("dot_general") - one.count("dot_general") == 18  # six products and their gradients
    assert two.count("sqrt") - one.count("sqrt") == 8  # AdamW, eight parameters a layer


def test_an_explicit_mesh_in_force_counts_as_an_auto_one():
    """A shard_map without a mesh, and a bare constraint, are of the mesh in force; what needs Explicit axes says what to write instead."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = PartitionSpec("i")
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, spec))
        trace(lambda x: jax.shard_map(lambda x: jax.lax.psum(x, "i"), in_specs=spec, out_specs=PartitionSpec())(x), x)
        (op,) = trace(lambda x: jax.lax.with_sharding_constraint(x, spec), x).graph.ops
        assert constraint_spec(op) == (("i",), {"i": 8})
        assert "in place of jax.reshard" in error_of(lambda x: jax.reshard(x, spec), x)
        assert trace(lambda y: x + y, jax.ShapeDtypeStruct((16, 4), jnp.float32)).graph.constants  # captured with its Explicit type


def test_branches_for_no_device_are_gone():
    """Of `jnp.diagonal` only the branch that devices take is traced; a choice between devices stays one."""
    assert "cond" not in [op.primitive for op in trace(jnp.diagonal, x8).graph.walk()]
    by_device = functools.partial(jax.lax.platform_dependent, cpu=jnp.sin, tpu=jnp.cos)
    assert "cond" in [op.primitive for op in trace(by_device, x8).graph.walk()]


def test_mapped_loops_ask_all_and_keep_what_is_done():
    """A loop under `vmap` has one answer for all, and a body that selects."""
    doubled = jax.vmap(lambda x: jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: 2 * x, x))
    loop = trace(doubled, x8).graph.ops[0]
    condition, body = loop.bodies
    assert condition.ops[-1].primitive == "reduce_or" and body.ops[-1].primitive == "select_n"


def test_what_calls_and_loops_only_pass_on_is_read_where_it_enters():
    """Of a scan of checkpoints that return their weights and a key that is only carried, no trip makes either; what is made is returned."""

    def step(weights, x, key):
        def layer(carry, w):
            x, key = carry
            return (jnp.tanh(x @ w), key), (w, jnp.sum(x))

        (x, key), (weights, sums) = jax.lax.scan(jax.checkpoint(layer), (x, key), weights)
        return jax.jit(lambda *given: given)(weights, key, x, sums)

    args = jnp.ones((3, 4, 4)), jnp.ones((2, 4)), jnp.zeros(2)
    traced = trace(step, *args)
    weights, key, x, sums = traced.graph.results
    assert (weights, key) == (traced.graph.arguments[0], traced.graph.arguments[2])
    (loop,) = (op for op in traced.graph.ops if op.primitive == "scan")
    assert {x, sums} <= {*loop.results} and len(loop.bodies[0].outputs) == 2
    for one, other in zip(jaxpr_as_fun(traced.jaxpr)(*args), step(*args), strict=True):
        assert jnp.array_equal(one, other)


def test_pads_by_nothing_are_their_operands():
    """Of a transform to real numbers, whose frequencies JAX pads where there are too few, nothing is left but the transform."""
    traced = trace(lambda x: jnp.fft.irfft(x, n=16), jax.ShapeDtypeStruct((4, 9), jnp.complex64))
    assert [op.primitive for op in traced.graph.walk()] == ["fft"]


def test_reversals_are_made_once():
    """Reversed dimensions of size one are the operand itself, at any depth; what is reversed twice alike is one value."""

    def program(x):
        once, _ = jax.lax.scan(lambda c, y: (c + jax.lax.rev(y, (0,)), None), jnp.zeros((1, 4)), x)
        return jax.lax.rev(once, (0,)), jax.lax.rev(once, (1,)), jax.lax.rev(once, (0, 1)) * 2

    traced = trace(program, jax.ShapeDtypeStruct((3, 1, 4), jnp.float32))
    assert [op.params["dimensions"] for op in traced.graph.walk() if op.primitive == "rev"] == [(1,)]
    x = jnp.arange(12.0).reshape(3, 1, 4)
    for one, other in zip(jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, x), program(x), strict=True):
        assert (one == other).all()
