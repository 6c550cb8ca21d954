"""A user's module, as the command line finds it in the current folder."""

import jax
import jax.numpy as jnp

print("this module talks while it is imported")


def train_step(state, batch):
    print("and the function while it is traced")

    def loss(w):
        return ((jnp.tanh(batch["x"] @ w["up"]) @ w["down"] - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)}, value


def example_args():
    return args_of(64)


def args_of(rows):
    x = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    params = {"up": jax.ShapeDtypeStruct((32, 128), jnp.float32), "down": jax.ShapeDtypeStruct((128, 32), jnp.float32)}
    return {"params": params}, {"x": x, "y": x}


ARGS = example_args()


def other_args():
    return {"params": {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}}, {"x": jnp.ones((64, 32)), "y": jnp.ones((64, 32))}


def list_args():
    return list(ARGS)


def raises_while_traced(state, batch):
    raise ValueError("no luck today")


def args_that_raise():
    return 1 / 0


def branches_on_values(state, batch):
    return 1 if state["params"]["up"][0, 0] > 0 else 2


donating_step = jax.jit(train_step, donate_argnums=0)


def placed_args():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    specs = {"up": jax.P(None, "model"), "down": jax.P("model")}
    (state, batch), placed = example_args(), {}
    for name, shape in state["params"].items():
        placed[name] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=jax.NamedSharding(mesh, specs[name]))
    return {"params": placed}, batch
