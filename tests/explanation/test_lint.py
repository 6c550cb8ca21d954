"""Each rule finds what it is for and nothing in a sharding that has it not, with line, cost and advice."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ShardingError
from autoshard.explanation.lint import RULES


def step(params, x):
    h = jnp.tanh(x @ params["up"])
    return jnp.mean((h @ params["down"]) ** 2)


def shapes(batch=4096):
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"up": leaf(1024, 4096), "down": leaf(4096, 1024)}, leaf(batch, 1024)


@cache
def found(**specs):
    specs = {name: P(*spec) for name, spec in specs.items()}
    return autoshard.lint(step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs={**{"x": P("data")}, **specs})


def rules(lint):
    return {each.rule for each in lint.findings}


def test_the_batch_split_and_weights_whole_leaves_weights_unsharded():
    """Whole weights are found with their bytes, and no work is repeated."""
    lint = found()
    assert rules(lint) == {"unsharded-parameter"}
    assert {each.where: each.bytes for each in lint.findings} == {"params['up']": 4 * 2**22, "params['down']": 4 * 2**22}
    assert all("dim 0 of size" in each.advice for each in lint.findings)


def test_sharded_weights_that_are_gathered_are_meant_so():
    """Nothing is found where weights are gathered for a split batch."""
    lint = found(**{"*up*": ("data",), "*down*": ("data",)})
    assert lint.findings == () and "Nothing was found" in str(lint)


def test_a_whole_batch_repeats_work_and_replicates_activations():
    """Both are found at the line of the product, with the seconds that splitting would save at most."""
    lint = autoshard.lint(step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs=P())
    assert rules(lint) >= {"repeated-work", "replicated-activation", "unsharded-parameter"}
    first, *others = lint.findings
    assert (first.rule, first.where) == ("unsharded-batch", "x") and "dim 0 of size 4096" in first.what
    assert all(each.rule == "repeated-work" for each in others[-2:]) and "unsharded-batch" not in {each.rule for each in others}
    lines = {each.where for each in lint.findings if each.rule == "replicated-activation"}
    assert lines and all(line.startswith("test_lint.py:") and "(step)" in line for line in lines)
    repeated = sum(each.seconds for each in lint.findings if each.rule == "repeated-work")
    assert repeated == pytest.approx(lint.strategy.cost.compute_seconds * 7 / 8, rel=0.05)
    assert first.causes_seconds == pytest.approx(repeated, rel=0.05)


@pytest.mark.parametrize(("spec", "nbytes"), [(P(), 2**26), (P(None, "model"), 2**25), (P("data", "model"), None)])
def test_a_constraint_that_gathers_an_activation_is_found_first(spec, nbytes):
    """At its line, with the bytes that a device then holds, the seconds of its gathers, and those of what is repeated because of it.

    A constraint that gathers a weight, cast or not, is meant so.
    """

    def train(params, x):
        def loss(params):
            down = jax.lax.with_sharding_constraint(params["down"].astype(jnp.bfloat16), P())
            h = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["up"]), spec)
            return jnp.mean((jnp.sin(h) @ down) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    specs = {"x": P("data"), "*up*": P(None, "model"), "*down*": P("model")}
    lint = autoshard.lint(train, *shapes(), cluster="v5e:2x4", mesh={"data": 4, "model": 2}, in_specs=specs)
    constrained = [each for each in lint.findings if "with_sharding_constraint gathers" in each.what]
    assert len(constrained) == bool(nbytes) and lint.findings[: len(constrained)] == tuple(constrained)
    for each in constrained:
        line = train.__code__.co_firstlineno + 3
        assert each.where.startswith(f"test_lint.py:{line} (") and each.rule == "replicated-activation"
        assert each.bytes == nbytes and each.seconds > 0 and each.causes_seconds > 0


def test_an_activation_that_changes_its_sharding_is_found():
    """The collective that nobody asked for is found, and one that a constraint asks for is not."""

    def resharded(x, w, constrained=False):
        h = jnp.tanh(x)
        if constrained:
            h = jax.lax.with_sharding_constraint(h, P())
        return h @ w

    def lint(fn):
        args = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2
        return autoshard.lint(fn, *args, cluster="v5e:2x4", mesh={"data": 8}, in_specs=(P(None, "data"), P(None, "data")))

    silent = [each for each in lint(resharded).findings if each.rule == "silent-resharding"]
    assert silent and silent[0].seconds > 0 and silent[0].bytes > 0 and "all_gather over data" in silent[0].what
    asked = lint(lambda x, w: resharded(x, w, True))
    assert not asked.failing(["silent-resharding"])


def test_what_the_mesh_does_not_divide_is_found_once_for_equal_layers():
    """Arguments of one pattern are one finding, with their padding in bytes, and the rest is checked without."""

    def layers(params, x):
        return sum(jnp.sum(x @ w) for w in params)

    args = [jax.ShapeDtypeStruct((1024, 12), jnp.float32)] * 3, jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    lint = autoshard.lint(layers, *args, cluster="v5e:2x4", mesh={"data": 8}, in_specs=([P(None, "data")] * 3, P("data")))
    (uneven,) = [each for each in lint.findings if each.rule == "uneven-padding"]
    assert (uneven.where, uneven.bytes) == ("params[*]", 3 * 4 * 1024 * 4) and "Pad it to 16" in uneven.advice


def test_a_weight_that_is_split_unevenly_is_one_finding():
    """It is evaluated whole, which is no finding beside its padding; a weight that nothing splits still is one."""
    args = {"w": jax.ShapeDtypeStruct((1024, 1003), jnp.float32), "v": jax.ShapeDtypeStruct((1003, 1024), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    specs = {"x": P("data"), "*w*": P(None, "data")}
    options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "in_specs": specs}
    lint = autoshard.lint(lambda params, x: jnp.sum(x @ params["w"] @ params["v"]), args, x, **options)
    found = [(each.rule, each.where) for each in lint.findings if each.where.startswith("params")]
    assert found == [("uneven-padding", "params['w']"), ("unsharded-parameter", "params['v']")]


def test_shardings_of_arguments_are_checked():
    """Without specs the shardings that arguments have count, on the mesh that they are on; without any the mesh is asked for."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = shapes()
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
    lint = autoshard.lint(step, params, x, cluster="cpu:8")
    assert rules(lint) == {"unsharded-parameter"} and lint.strategy.mesh_shape == {"data": 8}
    with pytest.raises(ShardingError, match="mesh="):
        autoshard.lint(step, *shapes(), cluster="cpu:8")


def test_rules_are_checked():
    """A rule that fails a build is one of the table's, or any."""
    assert found().failing(["any"]) == found().failing("any") == found().findings and not found().failing(["repeated-work"])
    with pytest.raises(ShardingError, match="unsharded-parameter"):
        found().failing(["unsharded"])
    assert rules(found()) <= set(RULES)


def test_a_constraint_costs_what_leaving_it_out_saves():
    """What is found only because of it says that it goes away without it, and comes after it."""

    def loss(params, x, constrained):
        h = jnp.tanh(x @ params["up"])
        h = jax.lax.with_sharding_constraint(h, P()) if constrained else h
        return jnp.mean((jnp.sin(h) @ params["down"]) ** 2)

    def lint(constrained):
        options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "in_specs": {"x": P("data")}}
        return autoshard.lint(lambda params, x: jax.grad(loss)(params, x, constrained), *shapes(), **options)

    with_it, without = lint(True), lint(False)
    first = with_it.findings[0]
    saved = with_it.strategy.cost.makespan_seconds - without.strategy.cost.makespan_seconds
    assert "with_sharding_constraint gathers" in first.what and saved > 0
    assert first.seconds + first.causes_seconds == pytest.approx(saved)
    there = {(each.rule, each.where) for each in without.findings}
    caused = [each for each in with_it.findings[1:] if (each.rule, each.where) not in there]
    assert caused and all(each.advice == f"It goes away without the constraint at {first.where}." for each in caused)
    assert caused == [*with_it.findings[-len(caused) :]]


def test_a_kernel_that_cannot_be_split_says_why():
    """It is found at its line, with the reason of each axis of its grid; one that the batch would split is a consequence of the batch."""

    def kernel(x, o):
        o[...] = jnp.dot(x[...], x[...].T) * pl.program_id(0).astype(jnp.float32)

    def step(x, rows):
        block = pl.BlockSpec((512, 512), lambda i: (i, 0))
        numbered = pl.pallas_call(kernel, grid=(len(x) // 512,), in_specs=[block], out_specs=block, out_shape=x)(x)
        return jnp.sum(numbered) + jnp.sum(rows)

    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    lint = autoshard.lint(step, x, x, cluster="v5e:2x4", mesh={"data": 8}, in_specs=P("data"))
    (one,) = lint.failing("whole-kernel")
    assert one.where.startswith("test_lint.py:") and "pl.program_id" in one.what and "kernel_rule" in one.advice and one.seconds > 0


def test_a_size_that_devices_do_not_divide_is_named():
    """The largest dimension of a product that an axis leaves whole, if it is one that the axis does not divide; else it is a choice."""

    def step(x, w):
        return jnp.mean(x @ w)

    def found(size):
        args = jax.ShapeDtypeStruct((4096, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, size), jnp.float32)
        mesh = {"data": 2, "model": 4}
        return autoshard.lint(step, *args, cluster="v5e:2x4", mesh=mesh, in_specs={"x": P("data"), "w": P()})

    (one,) = (each for each in found(10257).failing("undivided-dimension") if "dot_general" in each.what)
    assert "of size 10,257, which does not divide by 4" in one.what and "such as 10,260" in one.advice
    assert not found(10240).failing("undivided-dimension") and found(10240).failing("repeated-work")
