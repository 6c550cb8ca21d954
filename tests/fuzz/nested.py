"""Statements with functions of their own: loops, branches, calls and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fuzz.block import Block, Statements, Var


def scan(b: Block) -> None:
    carry, xs = b.any(), b.any(rank=1, where=lambda var: 0 not in var.shape)
    given = b.rng.random() < 0.7
    parameters = [("c", carry.aval, False), *([("x", _slice(xs), xs.exact)] if given else [])]
    stacked = b.rng.random() < 0.5

    def finish(inner: Block) -> str:
        return f"{inner.last(carry.aval)}, {inner.made()[0].name if stacked else None}"

    name, lines = b.function(parameters, finish)
    if not given:
        lines[0] = lines[0].replace("):", ", _):")
    what = xs.name if given else f"None, length={b.rng.choice([1, 2, 3])}"
    reverse = b.rng.choice(["", ", reverse=True"])
    result = f"lax.scan({name}, {carry.name}, {what}{reverse})"
    if stacked and b.rng.random() < 0.6:
        b.write(f"{result}[1]", lines=lines)
    else:
        b.write(f"{result}[0]", lines=lines)


def _slice(var: Var) -> Any:
    return jax.ShapeDtypeStruct(var.shape[1:], var.aval.dtype)


def loop(b: Block) -> None:
    """A `fori_loop`, or a `while_loop` where nobody differentiates."""
    carry = b.any()
    name, lines = b.function([("c", carry.aval, False)], lambda inner: inner.last(carry.aval))
    n = b.rng.choice([1, 2, 3])
    if b.differentiated or b.rng.random() < 0.5:
        b.write(f"lax.fori_loop(0, {n}, lambda _, c: {name}(c), {carry.name})", lines=lines)
    else:
        b.write(f"lax.while_loop(lambda s: s[0] < {n}, lambda s: (s[0] + 1, {name}(s[1])), (0, {carry.name}))[1]", lines=lines)


def branch(b: Block) -> None:
    x = b.any()
    n = b.rng.choice([2, 2, 3])
    made = [b.function([("c", x.aval, x.exact)], lambda inner: inner.last(x.aval)) for _ in range(n)]
    lines = [line for _, some in made for line in some]
    if n == 2:
        text = f"lax.cond({b.index()} > 3, {made[0][0]}, {made[1][0]}, {x.name})"
    else:
        text = f"lax.switch({b.index()} % {n}, [{', '.join(name for name, _ in made)}], {x.name})"
    b.write(text, lines=lines)


def call(b: Block) -> None:
    """A function under `jit`, `checkpoint` or `vmap`."""
    kind = b.rng.choice(["jit", "checkpoint", "checkpoint", "vmap"])
    x = b.any(rank=1, where=lambda var: 0 not in var.shape)
    aval = _slice(x) if kind == "vmap" else x.aval

    def finish(inner: Block) -> str:
        return [var for var in inner.vars if var.name in inner.own][-1].name

    name, lines = b.function([("c", aval, x.exact)], finish, mapped=kind == "vmap")
    b.write(f"jax.{kind}({name})({x.name})", lines=lines)


def gradient(b: Block) -> None:
    """Reverse or forward differentiation of a function."""
    x = b.any(where=lambda var: var.aval.dtype == jnp.float32)
    match b.rng.randrange(5):
        case 0:
            name, lines = b.function([("c", x.aval, False)], lambda inner: inner.last(x.aval))
            b.write(f"jax.jvp({name}, ({x.name},), ({x.name} * 0.5,))[1]", lines=lines)
        case 1:
            name, lines = b.function([("c", x.aval, False)], lambda inner: inner.last(x.aval), differentiated=True)
            b.write(f"jax.vjp({name}, {x.name})[1]({x.name})[0]", lines=lines)
        case 2:
            name, lines = b.function([("c", x.aval, False)], Block.scalar, differentiated=True)
            b.write(f"jax.value_and_grad({name})({x.name})[{b.rng.randrange(2)}]", lines=lines)
        case _:
            name, lines = b.function([("c", x.aval, False)], Block.scalar, differentiated=True)
            b.write(f"jax.grad({name})({x.name})", lines=lines)


NESTED: Statements = {scan: 2, loop: 1, branch: 1, call: 1.5, gradient: 3}
