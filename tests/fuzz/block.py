"""A function body that is being written, and the variables that its lines may name."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from autoshard.ir import divides, layout_to_spec, layouts
from fuzz.checking import MESH
from fuzz.program import NAMES

SIZES = (2, 4, 8, 8, 8, 16, 16, 4, 8, 3, 1)
ODD_SIZES = (3, 5, 7, 7, 7, 13, 13, 5, 7, 9, 1)  # which the devices do not divide
MAX_RANK, MAX_SIZE = 4, 2048


class Unfit(Exception):
    """A statement finds nothing in scope to work on."""


@dataclass(frozen=True, slots=True)
class Var:
    """A variable in scope: its name and type, and whether rounding cannot have touched it."""

    name: str
    aval: Any
    exact: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def rank(self) -> int:
        return len(self.aval.shape)

    @property
    def kind(self) -> str:
        """``float``, ``int``, ``bool`` or ``key``."""
        dtype = self.aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return "key"
        return "bool" if dtype == jnp.bool_ else "int" if jnp.issubdtype(dtype, jnp.integer) else "float"


Statements = Mapping[Callable[["Block"], None], float]


class Shared:
    """What all blocks of a program share: the source of randomness, the arguments, the next name, and what may be written.

    Attributes:
        statements, simple: statements and how often each is written, with blocks of their own and without.
        sizes: those of dimensions, the more often the likelier.
    """

    def __init__(self, rng: random.Random, statements: Statements, simple: Statements, sizes: Sequence[int] = SIZES):
        self.rng, self.statements, self.simple, self.sizes = rng, statements, simple, sizes
        self.arguments: list[tuple[Var, str]] = []
        self.n_names = 0

    def name(self, prefix: str = "v") -> str:
        self.n_names += 1
        return f"{prefix}{self.n_names - 1}"


class Block:
    """A function body that is being written.

    Attributes:
        vars: what the lines may name, outer variables included.
        own: names of the block's parameters and of what its lines made.
        differentiated: whether reverse-mode differentiation goes through it.
        mapped: whether it is inside a `vmap`.
    """

    def __init__(self, shared: Shared, outer: Block | None = None, differentiated: bool = False, mapped: bool = False):
        self.shared, self.rng, self.outer = shared, shared.rng, outer
        self.vars: list[Var] = list(outer.vars) if outer else [var for var, _ in shared.arguments]
        self.own: set[str] = set()
        self.lines: list[str] = []
        self.depth: int = outer.depth + 1 if outer else 0
        self.differentiated = differentiated or (outer is not None and outer.differentiated)
        self.mapped = mapped or (outer is not None and outer.mapped)

    # what statements ask for

    def argument(self, kind: str, *shape: int) -> Var:
        """An argument of the program of this type: an old one, or a new one."""
        text = f"{kind}({', '.join(map(str, shape))})"
        same = [var for var, have in self.shared.arguments if have == text]
        if same and self.rng.random() < 0.4:
            return self.rng.choice(same)
        var = Var("abcdefghijklmnopqrstuvwxyz"[len(self.shared.arguments)], eval(text, dict(NAMES)), True)
        self.shared.arguments.append((var, text))
        block: Block | None = self
        while block is not None:
            block.vars.append(var)
            block = block.outer
        return var

    def any(self, kind: str = "float", rank: int = 0, where: Callable[[Var], bool] = lambda var: True) -> Var:
        """A variable in scope, a recent one of this block rather than others."""
        fit = [var for var in self.vars if var.kind == kind and var.rank >= rank and where(var)]
        if not fit:
            raise Unfit
        own = [var for var in fit if var.name in self.own]
        if own and self.rng.random() < 0.75:
            return self.rng.choice(own[-3:])
        return self.rng.choice(fit)

    def full(self, rank: int = 1) -> Var:
        """A float array that is not empty."""
        return self.any(rank=rank, where=lambda var: 0 not in var.shape)

    def index(self, *shape: int) -> str:
        """Text of integers of this shape."""
        fit = [var for var in self.vars if var.kind == "int" and var.shape == shape]
        if fit and self.rng.random() < 0.7:
            return self.rng.choice(fit).name
        if len(shape) == 1 and self.rng.random() < 0.3:
            return f"jnp.arange({shape[0]})"
        return self.argument("i32", *shape).name

    def axis(self, var: Var) -> int:
        return self.rng.randrange(var.rank)

    # what they write

    def infer(self, text: str, lines: Sequence[str] = ()) -> Any:
        """The type of an expression, after the lines."""
        env = {var.name: var.aval for var in self.vars}

        def run(env: dict[str, Any]) -> Any:
            names = {**NAMES, **env}
            exec("\n".join([*lines, f"_ = {text}"]), names)
            return names["_"]

        return abstract_eval(run, env)

    def write(self, text: str, exact: bool = False, lines: Sequence[str] = ()) -> Var:
        """The variable of a new line ``name = text``, after the lines."""
        try:
            aval = self.infer(text, lines)
        except Exception as error:  # JAX itself has no such program
            raise Unfit(text) from error
        if len(aval.shape) > MAX_RANK or math.prod(aval.shape) > MAX_SIZE:
            raise Unfit
        var = Var(self.shared.name(), aval, exact)
        self.lines += [*lines, f"{var.name} = {text}"]
        self.vars.append(var)
        self.own.add(var.name)
        return var

    def statements(self, n: int) -> None:
        """Writes up to ``n`` statements."""
        for _ in range(n):
            for _ in range(8):
                allowed = self.shared.statements if self.depth < 2 else self.shared.simple
                statement = self.rng.choices(list(allowed), list(allowed.values()))[0]
                before = len(self.lines), len(self.vars), set(self.own)
                try:
                    statement(self)
                    break
                except Unfit:
                    self.lines, self.vars, self.own = self.lines[: before[0]], self._known(before[1]), before[2]

    def _known(self, n: int) -> list[Var]:
        """The variables there were before a statement gave up, and arguments made since."""
        arguments = {var.name for var, _ in self.shared.arguments}
        return self.vars[:n] + [var for var in self.vars[n:] if var.name in arguments]

    def function(self, parameters: Sequence[tuple[str, Any, bool]], finish: Callable[[Block], str], **kind: bool) -> tuple[str, list[str]]:
        """The name and the lines of a function of parameters ``(prefix, type, exact)``; ``finish`` gives what it returns."""
        inner = Block(self.shared, self, **kind)
        name = self.shared.name("f")
        for prefix, aval, exact in parameters:
            var = Var(self.shared.name(prefix), aval, exact)
            inner.vars.append(var)
            inner.own.add(var.name)
        names = [var.name for var in inner.vars[len(inner.vars) - len(parameters) :]]
        inner.statements(self.rng.randint(1, 3))
        returned = finish(inner)
        return name, [f"def {name}({', '.join(names)}):", *(f"    {line}" for line in inner.lines), f"    return {returned}"]

    def made(self, kind: str = "float") -> list[Var]:
        """The variables that the block's own lines made, the latest first; its parameters after them."""
        return [var for var in reversed(self.vars) if var.name in self.own and var.kind == kind]

    def last(self, aval: Any) -> str:
        """Text of a float value of this type, made of the latest variables that allow it."""
        own = self.made()
        alike = [var for var in own if var.shape == aval.shape and var.aval.dtype == aval.dtype]
        if not alike:
            raise Unfit
        if alike[0] is own[0]:
            return alike[0].name
        return f"{alike[0].name} + (jnp.sum({own[0].name}) * 0.01).astype(jnp.{aval.dtype})"

    def scalar(self) -> str:
        """Text of a float32 loss of the block's latest floats."""
        if not (floats := self.made()):
            raise Unfit
        terms = [f"jnp.sum({_to_f32(var)} ** 2) * 0.1" for var in floats[: self.rng.randint(1, 2)]]
        return " + ".join(terms)


def abstract_eval(run: Callable, env: Any) -> Any:
    """The types that a function of one pytree gives, where constraints may name the mesh's axes."""
    with jax.sharding.use_abstract_mesh(AbstractMesh(MESH.sizes, MESH.names, axis_types=(AxisType.Auto,) * 2)):
        return jax.eval_shape(run, env)


def _to_f32(var: Var) -> str:
    return var.name if var.aval.dtype == jnp.float32 else f"{var.name}.astype(jnp.float32)"


def random_spec(rng: random.Random, shape: Sequence[int]) -> str:
    """The text of a legal `PartitionSpec` of a shape, often one that shards nothing of it."""
    options = [layout for layout in layouts(len(shape), 2) if divides(layout, shape, MESH.sizes)]
    spec = layout_to_spec(rng.choice(options), MESH.names, len(shape))
    return f"P({', '.join(map(repr, spec))})"
