"""Random programs: functions of arrays, and steps that return new state."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fuzz.block import ODD_SIZES, SIZES, Block, Shared, Unfit, Var, random_spec
from fuzz.nested import NESTED
from fuzz.program import Program
from fuzz.statements import SIMPLE


def random_program(rng: random.Random, odd: bool = False) -> Program:
    """A program of a few statements, as a function of arrays or as a step that returns new state.

    Args:
        odd: whether its sizes are such that the devices do not divide them.
    """
    while True:
        try:
            return _random_program(rng, ODD_SIZES if odd else SIZES)
        except Unfit:  # what was made has no scalar to be a loss: another one
            continue


def _random_program(rng: random.Random, sizes: Sequence[int]) -> Program:
    shared = Shared(rng, {**SIMPLE, **NESTED}, SIMPLE, sizes)
    block = Block(shared)
    block.argument("f32", *(rng.choice(sizes) for _ in range(rng.randint(1, 3))))
    step = rng.random() < 0.25
    if step:
        block.differentiated = True
    block.statements(rng.randint(1, 6))
    state = [var for var, text in shared.arguments if text.startswith("f32")] if step else []
    if step:
        arguments, lines, leaves = _step(block, state)
    else:
        arguments = [(var.name, text) for var, text in shared.arguments]
        made = [var for var in block.vars if var.name in block.own]
        chosen = [var.name for var in made[:-1] if rng.random() < 0.25] + [var.name for var in made[-1:]]
        lines = [*block.lines, f"return {', '.join(chosen) or shared.arguments[0][0].name}"]
        leaves = [(var.name, var) for var, _ in shared.arguments]
    pins = [(path, random_spec(rng, var.shape)) for path, var in leaves if rng.random() < 0.15]
    given = [(path, random_spec(rng, var.shape)) for path, var in leaves if rng.random() < 0.7]
    return Program(tuple(arguments), tuple(lines), tuple(pins), tuple(given))


def _step(block: Block, state: list[Var]) -> tuple[list[tuple[str, str]], list[str], list[tuple[str, Var]]]:
    """Arguments, lines and argument leaves of a train step whose loss is the block; its float arguments are the state."""
    texts = {var.name: text for var, text in block.shared.arguments}
    kept = {var.name for var in state}
    others = [var for var, _ in block.shared.arguments if var.name not in kept]
    lines = [
        "def loss(state):",
        *(f"    {var.name} = state['{var.name}']" for var in state),
        *(f"    {line}" for line in block.lines),
        f"    return {block.scalar() if block.own else f'jnp.sum({state[0].name} ** 2)'}",
        "value, gradients = jax.value_and_grad(loss)(state)",
        "return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value",
    ]
    whole = "{" + ", ".join(f"'{var.name}': {texts[var.name]}" for var in state) + "}"
    leaves = [(f"state['{var.name}']", var) for var in state] + [(var.name, var) for var in others]
    return [("state", whole), *((var.name, texts[var.name]) for var in others)], lines, leaves
