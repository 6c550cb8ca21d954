"""A random program as text, and the names that its lines may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fuzz.checking import check


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def b1(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


@jax.custom_vjp
def doubled(x):
    """A sine whose gradient is twice its own."""
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@jax.custom_jvp
def halved(x):
    """A sine whose tangent is half its own."""
    return jnp.sin(x)


halved.defjvps(lambda t, ans, x: 0.5 * t * jnp.cos(x))

NAMES = {"jax": jax, "jnp": jnp, "lax": jax.lax, "P": P, "f32": f32, "i32": i32, "b1": b1, "key": key, "doubled": doubled, "halved": halved}


@dataclass(frozen=True, slots=True)
class Program:
    """A random program.

    Attributes:
        arguments: names and types, the latter as text.
        lines: the function's body, its return included.
        pins: argument paths and specs, the latter as text.
        in_specs: a spec for each argument leaf, for `autoshard.evaluate`, as text.
    """

    arguments: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    pins: tuple[tuple[str, str], ...] = ()
    in_specs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The program as a regression test."""
        header = f"    def program({', '.join(name for name, _ in self.arguments)}):"
        body = [f"        {line}" for line in self.lines]
        call = f"    check(program, {', '.join(kind for _, kind in self.arguments)}"
        for name, entries in (("pins", self.pins), ("in_specs", self.in_specs)):
            if entries:
                call += f", {name}={{{', '.join(f'{path!r}: {spec}' for path, spec in entries)}}}"
        return "\n".join(["def test_name():", header, *body, call + ")"])

    def function(self) -> Callable:
        names: dict[str, Any] = dict(NAMES)
        text = "\n    ".join([f"def program({', '.join(name for name, _ in self.arguments)}):", *self.lines])
        exec(compile(text, "<fuzz>", "exec"), names)
        return names["program"]

    def args(self) -> tuple:
        return tuple(eval(kind, dict(NAMES)) for _, kind in self.arguments)

    def specs(self, entries: tuple[tuple[str, str], ...]) -> dict[str, P]:
        return {path: eval(spec, dict(NAMES)) for path, spec in entries}

    def check(self, **options: Any) -> None:
        check(self.function(), *self.args(), pins=self.specs(self.pins), in_specs=self.specs(self.in_specs), **options)
