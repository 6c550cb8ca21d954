"""What `evaluate` says of a sharding is what plain JAX makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import convnet, gpt, gpt_scan, mlp

import autoshard
from autoshard.ir import Mesh
from autoshard.verify import explicit_collectives

MESH = {"data": 2, "model": 4}


def data_parallel(args):
    return (P(), *(P("data") for _ in args[1:]))


def split_weights(args):
    """Every matrix of the parameters on its last dimension, whatever that means, so that much has to be moved."""
    state = jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "model") if leaf.ndim > 1 and leaf.shape[-1] % 4 == 0 else P(), args[0])
    return (state, *(P("data") for _ in args[1:]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("specs", [data_parallel, split_weights])
@pytest.mark.parametrize("program", [mlp, gpt, gpt_scan, convnet])
def test_evaluation_predicts_what_plain_jit_does(program, specs):
    """The evaluated collectives are those that Shardy inserts into the jitted function: equal gathers once, since XLA merges them."""
    fn, args = program()
    strategy = autoshard.evaluate(fn, *args, cluster="cpu:8", mesh=MESH, in_specs=specs(args))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda x: isinstance(x, P))

    jitted = jax.jit(fn, in_shardings=placed(strategy.in_specs), out_shardings=placed(strategy.out_specs))
    actual = explicit_collectives(jitted.lower(*args), Mesh.of(MESH))
    predicted, actual = ({(c.kind, c.mesh_axes, c.bytes) for c in collectives} for collectives in (strategy.cost.collectives, actual))
    assert predicted == actual


def test_a_replicated_constraint_gathers_a_value_whose_readers_are_split():
    """XLA gathers the value at the constraint, although its reader takes only a shard: so does the cost."""

    def constrained(up, down, x):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), P(None, None))
        return h @ down

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (512, 256), (1024, 256))]
    specs = (P(), P(), P("data"))
    strategy = autoshard.evaluate(constrained, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    assert [(each.kind, each.bytes, each.count) for each in strategy.cost.collectives] == [("all_gather", 1024 * 512 * 4, 1)]


def test_one_spec_is_that_of_all_arguments():
    """As a tuple of it is."""
    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    options = {"cluster": "cpu:8", "mesh": {"data": 8}}
    one, each = (autoshard.evaluate(jnp.matmul, *args, **options, in_specs=specs) for specs in (P("data"), (P("data"), P("data"))))
    assert one.in_specs == each.in_specs == (P("data", None), P("data", None))
    with pytest.raises(autoshard.ShardingError, match="one PartitionSpec for all arguments, or a tuple"):
        autoshard.evaluate(jnp.matmul, *args, **options, in_specs=[P("data")])
