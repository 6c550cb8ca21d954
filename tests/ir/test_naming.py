"""Values are called what people know them by."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS, abstract

from autoshard.ir import naming
from autoshard.ir.naming import Names, itemsize
from autoshard.trace import trace


def names_of(fn, *args):
    """The names of a traced function's values, and the graph."""
    graph = trace(fn, *args).graph
    return Names(graph), graph


def test_arguments_go_by_their_path_and_the_rest_by_what_makes_it():
    """An argument is its path, also when it is only moved or cast; a result is that of its op."""
    names, graph = names_of(
        lambda p, x: jnp.tanh(x @ p["w"].T.astype(jnp.float32)), {"w": abstract((8, 16), jnp.bfloat16)}, abstract((4, 16))
    )
    found = {op.primitive: names.tensor(op.results[0]) for op in graph.walk()}
    assert names.tensor(graph.arguments[0]) == "p['w'] bfloat16[8,16]"
    assert found["transpose"] == "transpose of p['w'] bfloat16[16,8]"
    assert found["convert_element_type"] == "convert_element_type of transpose of p['w'] float32[16,8]"
    assert found["tanh"] == "the result of tanh float32[4,8]"


def test_what_enters_a_loop_is_named_by_what_is_outside():
    """A scanned slice and a constant of the body are known by their arguments, a carry that was computed by its loop."""

    def scanned(ws, x, b):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + b), None), jnp.sin(x), ws)[0]

    names, graph = names_of(scanned, abstract((3, 8, 8)), abstract((4, 8)), abstract((8,)))
    (loop,) = (op for op in graph.ops if op.bodies)
    assert {names.name(value) for value in loop.bodies[0].inputs} == {"a slice of ws", "what enters scan", "b"}


def test_gradients_are_told_from_what_is_computed_again():
    """A transposed product is a gradient; a checkpoint's second forward pass, and the arguments, are none."""

    def step(w, x):
        return jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w) @ w))(w).sum())(w)

    names, graph = names_of(step, abstract((8, 8)), abstract((4, 8)))
    products = [op.results[0] for op in graph.walk() if op.primitive == "dot_general"]
    gradients = [names.is_gradient(value) for value in products]
    assert True in gradients and False in gradients
    assert names.is_gradient(graph.results[0]) and not names.is_gradient(graph.arguments[0])


def test_every_value_of_every_program_has_a_name():
    """Loops, branches, checkpoints and captured constants included."""
    for make in PROGRAMS.values():
        fn, args = make()
        names, graph = names_of(fn, *args)
        assert all(names.name(value) for value in range(len(graph.values)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "uint8", "bool", "float8_e4m3fn", "complex64"])
def test_item_sizes_are_jaxs(dtype):
    """Bytes an element by a dtype's name are JAX's."""
    bits = {"int4": 4}.get(dtype, 8 * np.dtype(jnp.dtype(dtype)).itemsize)
    assert itemsize(dtype) == bits / 8


def test_examples_in_the_docstrings_hold():
    """The examples hold."""
    assert doctest.testmod(naming).failed == 0
