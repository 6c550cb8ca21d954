"""Random JAX programs as Python text, and the check that each is sharded without a change of numbers or an unplanned collective.

A `Program` is the body of a function, line by line, with the types of its arguments and the user's pins: it prints as a regression
test that can be pasted. `random_program` writes one, statement by statement: a *statement* function looks at the variables in scope and
writes a line or a block (the body of a loop, a branch, a differentiated function), whose results' types JAX itself infers.

Numbers stay well conditioned: floats are kept within a few units, nothing divides or takes logarithms of what may vanish, and what
rounding could tip (comparisons, positions, casts to integers) is only asked of *exact* variables: arguments, and what merely moves them.
"""

from __future__ import annotations

import math
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from problems import eager_cluster
from programs import concrete
from random_assignments import random_assignment

import autoshard
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Collective, Mesh, divides, layout_to_spec, layouts, replicated, result_layouts
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh, manual_program, to_named_sharding
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace
from autoshard.verify import compare, explicit_collectives

MESH = Mesh.of({"x": 2, "y": 4})
SEARCHERS = ("recursive_programming", "data_parallel", "fully_sharded")

# --- what programs are written with ---------------------------------------------------------------------------------------


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


# --- the check ---------------------------------------------------------------------------------------------------------------


class Mismatch(AssertionError):
    """A program that computes otherwise sharded than unsharded, or sends what nobody predicted."""


def check(
    fn: Callable,
    *args: Any,
    pins: dict[str, P] | None = None,
    in_specs: dict[str, P] | None = None,
    searchers: Sequence[Any] = SEARCHERS,
    seeds: Sequence[int] = (0,),
    run: bool = True,
    only: str | None = None,
) -> None:
    """Raises `Mismatch`, or whatever autoshard raises, unless every sharding of the program keeps its numbers and predictions.

    Args:
        seeds: of random legal assignments that are lowered besides those that are searched.
        run: whether to compile and compare numbers; else collectives alone are compared.
        only: the one sharding to check: a searcher's name, ``"evaluate"`` or ``"random assignment 0"``.
    """
    if only is not None:
        searchers = [searcher for searcher in searchers if str(searcher) == only]
        seeds = [seed for seed in seeds if f"random assignment {seed}" == only]
        in_specs = in_specs if only == "evaluate" else None
    cluster, mesh = eager_cluster(), dict(MESH.axes)
    wanted = _plain(fn, concrete(args)) if run else None
    found: dict[str, tuple[jax.stages.Lowered, tuple]] = {}
    for searcher in searchers:
        strategy = autoshard.search(fn, *args, cluster=cluster, searcher=searcher, mesh=mesh, pins=pins)
        found[str(searcher)] = _reloaded(strategy).apply(fn).lower(*args), strategy.cost.collectives
    if in_specs is not None:
        strategy = autoshard.evaluate(fn, *args, cluster=cluster, mesh=mesh, in_specs=in_specs)
        found["evaluate"] = strategy.apply(fn).lower(*args), strategy.cost.collectives
    traced = trace(fn, *args, axis_names=MESH.names)
    rules, model = rules_of(traced.graph), CostModel(cluster, MESH)
    problem = Problem(program_facts(traced.graph, rules, compiler_of(model.cluster)), model)
    for seed in seeds:
        assignment = random_assignment(traced.graph, rules, MESH, seed)
        predicted = problem.evaluate(assignment).cost.collectives
        found[f"random assignment {seed}"] = _lowered(traced, rules, assignment, model), predicted
    if run:
        ran: set[str] = set()
        for label, (lowered, _) in found.items():
            text = lowered.as_text()
            if text not in ran:
                ran.add(text)
                _same_numbers(label, wanted, _placed(lowered, concrete(args)))
    for label, (lowered, predicted) in found.items():
        _same_collectives(label, predicted, lowered)


def _plain(fn: Callable, args: tuple) -> Any:
    """What the function computes on one device."""
    one = jax.make_mesh((1,) * len(MESH.axes), MESH.names, axis_types=(AxisType.Auto,) * len(MESH.axes), devices=jax.devices()[:1])
    with jax.sharding.set_mesh(one):
        return jax.jit(fn)(*args)


def _reloaded(strategy: autoshard.Strategy) -> autoshard.Strategy:
    """The strategy, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strategy.json"
        strategy.save(path)
        loaded = autoshard.load(path)
    if loaded != strategy:
        raise Mismatch("a saved strategy comes back as another one")
    return loaded


def _lowered(traced: Traced, rules: tuple, assignment: Assignment, model: CostModel) -> jax.stages.Lowered:
    """The program lowered by an assignment that nobody searched."""
    graph, mesh = traced.graph, jax_mesh(MESH)

    def sharding(layout, value):
        found = graph.values[value]
        return to_named_sharding(layout if found.size else replicated(MESH), found.rank, mesh)

    flat = manual_program(traced.jaxpr, graph, rules, assignment, mesh, model.reshard_paths(graph.values))
    entering = tuple(sharding(assignment.layout(value), value) for value in graph.arguments)
    leaving = [sharding(layout, value) for layout, value in zip(result_layouts(graph, assignment), graph.results, strict=True)]
    jitted = jax.jit(
        lambda *args: traced.pack(flat(*jax.tree.leaves(args))),
        in_shardings=traced.in_tree.unflatten(entering),
        out_shardings=traced.pack(leaving),
    )
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in traced.jaxpr.in_avals]
    return jitted.lower(*traced.in_tree.unflatten(avals))


def _placed(lowered: jax.stages.Lowered, args: tuple) -> Any:
    """What the lowered program computes on all devices."""
    compiled = lowered.compile()
    return compiled(*jax.tree.map(jax.device_put, args, compiled.input_shardings[0]))


def _same_collectives(label: str, predicted: Sequence[Collective], lowered: jax.stages.Lowered) -> None:
    rows = compare(predicted, explicit_collectives(lowered, MESH))
    wrong = [row for row in rows if not row.agrees or row.predicted_count != row.actual_count]
    if wrong:
        text = "; ".join(
            f"{row.kind} over {row.mesh_axes}: predicted {row.predicted_count} of {row.predicted_bytes:g} bytes, "
            f"Shardy has {row.actual_count} of {row.actual_bytes:g}"
            for row in wrong
        )
        raise Mismatch(f"collectives of {label}: {text}")


def _same_numbers(label: str, wanted: Any, got: Any) -> None:
    for position, (a, b) in enumerate(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)):
        a, b = (np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v) for v in (a, b))
        coarse = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(wanted))
        if not np.issubdtype(a.dtype, np.floating) and a.dtype != jnp.bfloat16:
            same = np.array_equal(a, b)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = np.abs(a).max(initial=0.0)
            same = bool(np.all(np.abs(a - b) <= (5e-2 if coarse else 1e-3) * scale + 1e-5)) and bool(np.isfinite(b).all())
        if not same:
            raise Mismatch(f"numbers of {label}: result {position} is {_short(b)}, unsharded {_short(a)}")


def _short(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=6, threshold=4) + (f" and {array.size - 4} more" if array.size > 4 else "")


# --- writing programs ---------------------------------------------------------------------------------------------------------

SIZES = (2, 4, 8, 8, 8, 16, 16, 4, 8, 3, 1)
MAX_RANK, MAX_SIZE = 4, 2048


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


class Shared:
    """What all blocks of a program share: the source of randomness, the arguments, the next name."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.arguments: list[tuple[Var, str]] = []
        self.n_names = 0

    def name(self, prefix: str = "v") -> str:
        self.n_names += 1
        return f"{prefix}{self.n_names - 1}"


class Unfit(Exception):
    """A statement finds nothing in scope to work on."""


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
                names = list(STATEMENTS if self.depth < 2 else SIMPLE)
                statement = self.rng.choices(names, [STATEMENTS[s] for s in names])[0]
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


def random_program(rng: random.Random) -> Program:
    """A program of a few statements, as a function of arrays or as a step that returns new state."""
    while True:
        try:
            return _random_program(rng)
        except Unfit:  # what was made has no scalar to be a loss: another one
            continue


def _random_program(rng: random.Random) -> Program:
    shared = Shared(rng)
    block = Block(shared)
    block.argument("f32", *(rng.choice(SIZES) for _ in range(rng.randint(1, 3))))
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


# --- statements: what a line or a block may be ---------------------------------------------------------------------------------


def unary(b: Block) -> None:
    x = b.any()
    smooth = ["jnp.tanh({})", "jnp.sin({})", "jax.nn.gelu({})", "jax.nn.sigmoid({})", "jnp.exp(-{} * {})", "jnp.log1p({} * {})"]
    smooth += ["doubled({})", "halved({})", "jnp.sqrt({} * {} + 1)"]
    simple = ["-{}", "jnp.abs({})", "jax.nn.relu({})", "{} * 0.5"]
    exact = x.exact and b.rng.random() < 0.5
    text = b.rng.choice([*simple, "jnp.clip({}, -0.1, 0.1)", "jnp.round({} * 8)"] if exact else [*smooth, *simple])
    b.write(text.replace("{}", x.name), exact)


def binary(b: Block) -> None:
    x = b.any()
    fit = [var for var in b.vars if var.kind == "float" and var is not x and _broadcast(x.shape, var.shape)]
    y = b.rng.choice(fit) if fit and b.rng.random() < 0.7 else b.argument("f32", *_part(b, x.shape))
    texts = ["{x} + {y}", "{x} - {y}", "jnp.tanh({x} * {y})", "jnp.maximum({x}, {y})", "jnp.minimum({x}, {y})", "{x} / (1 + {y} * {y})"]
    b.write(b.rng.choice(texts).format(x=x.name, y=y.name))


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    try:
        return math.prod(np.broadcast_shapes(left, right)) <= MAX_SIZE
    except ValueError:
        return False


def _part(b: Block, shape: tuple[int, ...]) -> list[int]:
    """The trailing dimensions of a shape, some of them one."""
    start = b.rng.randint(0, len(shape))
    return [n if b.rng.random() < 0.8 else 1 for n in shape[start:]]


def einsum(b: Block) -> None:
    """A contraction of two or three operands, repeated ones and repeated letters included."""
    letters, sizes = iter("ijklmnopqrstuvwxyz"), {}
    operands = [b.full()]
    for _ in range(b.rng.choices([0, 1, 2], [1, 8, 1])[0]):
        operands.append(b.full() if b.rng.random() < 0.4 else b.argument("f32", *_matching(b, operands[0].shape)))
    terms = []
    for operand in operands:
        term = ""
        for n in operand.shape:
            known = [letter for letter, size in sizes.items() if size == n and letter not in term]
            repeated = [letter for letter in term if sizes[letter] == n]
            letter = b.rng.choice(known) if known and b.rng.random() < 0.8 else next(letters)
            if repeated and b.rng.random() < 0.15:
                letter = b.rng.choice(repeated)
            sizes[letter] = n
            term += letter
        terms.append(term)
    out = [letter for letter in sizes if b.rng.random() < 0.6][:MAX_RANK]
    b.rng.shuffle(out)
    contracted = math.prod(n for letter, n in sizes.items() if letter not in out)
    scale = "" if contracted < 4 else f" * {1 / math.sqrt(contracted):.3g}"
    b.write(f"jnp.einsum('{','.join(terms)}->{''.join(out)}', {', '.join(var.name for var in operands)}){scale}")


def _matching(b: Block, shape: tuple[int, ...]) -> list[int]:
    """A shape that shares some sizes with another."""
    found = [n for n in shape if b.rng.random() < 0.6]
    found += [b.rng.choice(SIZES) for _ in range(b.rng.randint(0, 2))]
    b.rng.shuffle(found)
    return found[:3] or [shape[-1]]


def matmul(b: Block) -> None:
    x = b.full()
    w = b.argument("f32", x.shape[-1], b.rng.choice(SIZES))
    b.write(f"{x.name} @ {w.name}")


def reshape(b: Block) -> None:
    """Merges, splits, or any factorisation of the size."""
    x = b.any(rank=1)
    shape = list(x.shape)
    match b.rng.randrange(5):
        case 0 if x.rank > 1:
            d = b.rng.randrange(x.rank - 1)
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        case 1:
            d = b.axis(x)
            shape[d : d + 1] = _factors(b, shape[d])
        case 2:
            shape = [math.prod(shape)]
        case 3:
            shape.insert(b.rng.randint(0, x.rank), 1)
        case _:
            shape = [part for part in _factors(b, math.prod(shape)) for part in _factors(b, part)]
            b.rng.shuffle(shape)
    b.write(f"{x.name}.reshape({', '.join(map(str, shape))})", x.exact)


def _factors(b: Block, n: int) -> list[int]:
    divisors = [k for k in range(1, n + 1) if n % k == 0] or [1]
    k = b.rng.choice(divisors)
    return [k, n // k]


def transpose(b: Block) -> None:
    x = b.any(rank=2)
    order = list(range(x.rank))
    b.rng.shuffle(order)
    b.write(f"{x.name}.transpose({', '.join(map(str, order))})", x.exact)


def reduction(b: Block) -> None:
    """A reduction by any operator over any axes; sums are scaled to stay near one."""
    x = b.full()
    axes = tuple(d for d in range(x.rank) if b.rng.random() < 0.6) or (b.axis(x),)
    n = math.prod(x.shape[d] for d in axes)
    keep = b.rng.choice(["", ", keepdims=True"])
    where = f"{axes if len(axes) > 1 else axes[0]}{keep}"
    texts = [
        f"jnp.sum({{}}, {where}) * {1 / math.sqrt(n):.3g}",
        f"jnp.mean({{}}, {where})",
        f"jnp.max({{}}, {where})",
        f"jnp.min({{}}, {where})",
        f"jnp.prod(jnp.cos({{}}), {where})",
        f"jax.nn.logsumexp({{}}, {where})",
        f"jnp.var({{}}, {where})",
    ]
    number = b.rng.randrange(len(texts))
    b.write(texts[number].format(x.name), x.exact and number in (2, 3))


def logical(b: Block) -> None:
    x = b.any("bool", 1)
    if 0 in x.shape:
        raise Unfit
    b.write(f"jnp.{b.rng.choice(['any', 'all', 'sum'])}({x.name}, {b.axis(x)})", True)


def softmax(b: Block) -> None:
    x = b.full()
    b.write(f"jax.nn.{b.rng.choice(['softmax', 'log_softmax'])}({x.name}, axis={b.axis(x)})")


def norm(b: Block) -> None:
    x = b.full()
    axis = b.axis(x)
    b.write(f"{x.name} * lax.rsqrt(jnp.mean({x.name} ** 2, {axis}, keepdims=True) + 0.1)")


def gather(b: Block) -> None:
    """Rows by index, elements along an axis, or a slice at a computed place."""
    x = b.full()
    d = b.axis(x)
    n = x.shape[d]
    match b.rng.randrange(5):
        case 0:
            b.write(f"{x.name}[{b.index(*_index_shape(b))} % {x.shape[0]}]", x.exact)
        case 1:
            b.write(f"jnp.take({x.name}, {b.index(*_index_shape(b))} % {n}, axis={d})", x.exact)
        case 2:
            shape = [b.rng.choice([1, n, 4]) if k == d else size for k, size in enumerate(x.shape)]
            b.write(f"jnp.take_along_axis({x.name}, {b.index(*shape)} % {n}, axis={d})", x.exact)
        case 3:
            m = b.rng.randint(1, n)
            b.write(f"lax.dynamic_slice_in_dim({x.name}, {b.index()} % {n}, {m}, {d})", x.exact)
        case _ if x.rank > 1:
            rows, shape = _rows(b, x)
            b.write(f"{x.name}[{rows}, {b.index(*shape)} % {x.shape[1]}]", x.exact)


def _rows(b: Block, x: Var) -> tuple[str, list[int]]:
    """Indices of an array's first dimension, and their shape: any, or all rows in order."""
    if b.rng.random() < 0.5:
        return f"jnp.arange({x.shape[0]})", [x.shape[0]]
    shape = _index_shape(b)
    return f"{b.index(*shape)} % {x.shape[0]}", shape


def _index_shape(b: Block) -> list[int]:
    return [b.rng.choice(SIZES) for _ in range(b.rng.randint(0, 2))]


def scatter(b: Block) -> None:
    """Updates at computed places: ``at[].add`` and its like, or a slice written over."""
    x = b.full()
    d, n = b.axis(x), x.shape[0]
    match b.rng.randrange(4):
        case 0:
            rows = b.index(*_index_shape(b))
            b.write(f"{x.name}.at[{rows} % {n}].{b.rng.choice(['add', 'max', 'min', 'set', 'multiply'])}(0.5)")
        case 1:
            rows = b.argument("i32", b.rng.choice(SIZES))
            y = b.argument("f32", *rows.shape, *x.shape[1:])
            b.write(f"{x.name}.at[{rows.name} % {n}].{b.rng.choice(['add', 'max', 'min', 'add'])}({y.name})")
        case 2 if x.rank > 1:
            rows, shape = _rows(b, x)
            b.write(f"{x.name}.at[{rows}, {b.index(*shape)} % {x.shape[1]}].{b.rng.choice(['add', 'max'])}(0.25)")
        case _:
            m = b.rng.randint(1, x.shape[d])
            y = b.argument("f32", *(m if k == d else size for k, size in enumerate(x.shape)))
            b.write(f"lax.dynamic_update_slice_in_dim({x.name}, {y.name}.astype({x.name}.dtype), {b.index()} % {x.shape[d]}, {d})")


def ordering(b: Block) -> None:
    x = b.any(rank=1, where=lambda var: 0 not in var.shape)
    d = b.axis(x)
    match b.rng.randrange(5):
        case 0:
            b.write(f"jnp.sort({x.name}, axis={d})", x.exact)
        case 1:
            b.write(f"lax.top_k({x.name}, {b.rng.randint(1, x.shape[-1])})[0]", x.exact)
        case 2:
            b.write(f"jnp.cumsum({x.name}, axis={d}) * {1 / math.sqrt(x.shape[d]):.3g}")
        case 3:
            b.write(f"lax.cummax({x.name}, axis={d})", x.exact)
        case _ if x.exact:
            b.write(f"jnp.{b.rng.choice(['argmax', 'argmin', 'argsort'])}({x.name}, axis={d})", True)


def joining(b: Block) -> None:
    """Concatenation, padding, slices, repetition, reversal."""
    x = b.any(rank=1)
    d = b.axis(x)
    match b.rng.randrange(8):
        case 0:
            fit = [var for var in b.vars if var.kind == "float" and var.rank == x.rank and _but(var.shape, d) == _but(x.shape, d)]
            y = b.rng.choice(fit)
            b.write(f"jnp.concatenate([{x.name}, {y.name}], axis={d})", x.exact and y.exact)
        case 1:
            widths = [(b.rng.choice([0, 0, 1, 4]), b.rng.choice([0, 0, 2, 4])) for _ in x.shape]
            b.write(f"jnp.pad({x.name}, {tuple(widths)})", x.exact)
        case 2:
            n = x.shape[d]
            start, stop, step = b.rng.choice([0, 0, 1, n // 2]), b.rng.choice([n, n, n // 2]), b.rng.choice([1, 1, 2])
            cuts = [":"] * x.rank
            cuts[d] = f"{start}:{stop}:{step}" if step > 1 else f"{start}:{stop}"
            b.write(f"{x.name}[{', '.join(cuts)}]", x.exact)
        case 3:
            b.write(f"jnp.flip({x.name}, {d})", x.exact)
        case 4:
            b.write(f"jnp.roll({x.name}, 1, {d})", x.exact)
        case 5:
            b.write(f"jnp.stack([{x.name}, {x.name} * 0.5], {b.rng.randint(0, x.rank)})", x.exact)
        case 6:
            b.write(f"jnp.tile({x.name}, {tuple(b.rng.choice([1, 2]) for _ in x.shape)})", x.exact)
        case _:
            b.write(f"jnp.repeat({x.name}, 2, axis={d})", x.exact)


def _but(shape: tuple[int, ...], d: int) -> tuple[int, ...]:
    return shape[:d] + shape[d + 1 :]


def convolution(b: Block) -> None:
    x = b.any(rank=3, where=lambda var: 0 not in var.shape and var.aval.dtype == jnp.float32)
    spatial = x.rank - 2
    kernel = b.argument("f32", *([b.rng.choice([1, 2, 3])] * spatial), x.shape[-1], b.rng.choice([4, 8, 3]))
    names = "HW"[:spatial]
    numbers = f"('N{names}C', '{names}IO', 'N{names}C')"
    strides, padding = (b.rng.choice([1, 1, 2]),) * spatial, b.rng.choice(["SAME", "VALID"])
    b.write(f"lax.conv_general_dilated({x.name}, {kernel.name}, {strides}, '{padding}', dimension_numbers={numbers}) * 0.5")


def pooling(b: Block) -> None:
    x = b.any(rank=1, where=lambda var: 0 not in var.shape and var.aval.dtype == jnp.float32)
    window = tuple(b.rng.choice([1, 2]) for _ in x.shape)
    strides = b.rng.choice([window, (1,) * x.rank])
    start, operator = b.rng.choice([("-jnp.inf", "lax.max"), ("0.0", "lax.add")])
    b.write(f"lax.reduce_window({x.name}, {start}, {operator}, {window}, {strides}, '{b.rng.choice(['VALID', 'SAME'])}')")


def selection(b: Block) -> None:
    x = b.any()
    mask = [var for var in b.vars if var.kind == "bool" and _broadcast(x.shape, var.shape)]
    m = b.rng.choice(mask) if mask else b.argument("b1", *_part(b, x.shape))
    b.write(f"jnp.where({m.name}, {x.name}, {b.rng.choice(['0.0', f'-{x.name}'])})", x.exact)


def casting(b: Block) -> None:
    match b.rng.randrange(6):
        case 0:
            b.write(f"{b.any().name}.astype(jnp.bfloat16)")
        case 1:
            b.write(f"{b.any(where=lambda var: var.aval.dtype == jnp.bfloat16).name}.astype(jnp.float32)")
        case 2:
            b.write(f"{b.any(where=lambda var: var.exact).name} > 0.05", True)
        case 3:
            b.write(f"({b.any(where=lambda var: var.exact).name} * 20).astype(jnp.int32)", True)
        case 4:
            b.write(f"{b.any('int').name}.astype(jnp.float32) * 0.05", True)
        case _:
            b.write(f"{b.any('bool').name}.astype(jnp.float32)", True)


def drawing(b: Block) -> None:
    """Random numbers of a typed key."""
    keys = [var for var in b.vars if var.kind == "key" and not var.shape]
    k = b.rng.choice(keys) if keys else b.argument("key")
    x = b.any()
    match b.rng.randrange(6):
        case 0:
            b.write(f"jax.random.normal({k.name}, {x.shape})")
        case 1:
            b.write(f"jnp.where(jax.random.bernoulli({k.name}, 0.5, {x.shape}), {x.name}, 0.0)", x.exact)
        case 2:
            b.write(f"jax.random.fold_in({k.name}, {b.index()})", True)
        case 3:
            b.write(f"jax.random.split({k.name}, {b.rng.choice(SIZES)})", True)
        case 4:
            b.write(f"{x.name} + jax.random.uniform({k.name}, {x.shape[-1:]})")
        case _:
            many = b.any("key", 1)
            b.write(f"jax.vmap(lambda k: jax.random.uniform(k, ({b.rng.choice(SIZES)},)))({many.name})")


def constraint(b: Block) -> None:
    x = b.any(rank=1)
    b.write(f"lax.with_sharding_constraint({x.name}, {random_spec(b.rng, x.shape)})", x.exact)


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


SIMPLE: dict[Callable[[Block], None], float] = {
    unary: 3, binary: 3, einsum: 4, matmul: 4, reshape: 3, transpose: 1.5, reduction: 3, logical: 0.5, softmax: 1, norm: 1, gather: 2.5,
    scatter: 2, ordering: 1.5, joining: 2.5, convolution: 1, pooling: 0.7, selection: 1, casting: 1.5, drawing: 1.2, constraint: 1.2,
}  # fmt: skip
STATEMENTS = SIMPLE | {scan: 2, loop: 1, branch: 1, call: 1.5, gradient: 3}


# --- shrinking -------------------------------------------------------------------------------------------------------------------


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: fewer results, lines, pins; variables become arguments. Greedy, to a fixed point."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if len(str(smaller)) < len(str(program)) and fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something less, those that lose most first."""
    lines = program.lines
    for i in range(len(program.pins)):
        yield replace(program, pins=program.pins[:i] + program.pins[i + 1 :])
    for i in range(len(program.in_specs)):
        yield replace(program, in_specs=program.in_specs[:i] + program.in_specs[i + 1 :])
    for i, line in enumerate(lines):
        match = re.fullmatch(r"(v\d+) = .*", line)
        if match:  # a variable is passed in
            yield from _as_argument(program, i, match[1])
        if line.lstrip().startswith("return "):  # one of several results, or one of several terms
            indent, returned = line[: _indent(line)], line.lstrip().removeprefix("return ")
            for separator in (", ", " + "):
                for part in returned.split(separator) if separator in returned else ():
                    yield _swept(replace(program, lines=(*lines[:i], f"{indent}return {part}", *lines[i + 1 :])))
    for start in range(len(lines) - 1):  # a line, or a function with its body
        yield _swept(replace(program, lines=lines[:start] + lines[_end(lines, start) :]))
    for i, line in enumerate(lines):  # a variable is one of those it was made of
        match = re.fullmatch(r" *(v\d+) = (.*)", line)
        for name in dict.fromkeys(re.findall(r"\b[a-z]\d*\b", match[2])) if match else ():
            rest = [re.sub(rf"\b{match[1]}\b", name, other) for other in lines[i + 1 :]]
            yield _swept(replace(program, lines=(*lines[:i], *rest)))
    if program.arguments and program.arguments[0][0] == "state":  # a part of the state
        entries = program.arguments[0][1].strip("{}").split(", '")
        for i, entry in enumerate(entries):
            name = entry.strip("'")[0]
            kept = "{" + ", '".join(entries[:i] + entries[i + 1 :]).lstrip("'").join(["'", ""]) + "}" if len(entries) > 1 else "{}"
            cut = tuple(line for line in lines if line.strip() != f"{name} = state['{name}']")
            yield _swept(replace(program, arguments=(("state", kept), *program.arguments[1:]), lines=cut))


def _end(lines: Sequence[str], start: int) -> int:
    """Where the statement that starts on a line ends: a function with its body."""
    stop = start + 1
    while lines[start].lstrip().startswith("def ") and stop < len(lines) and _indent(lines[stop]) > _indent(lines[start]):
        stop += 1
    return stop


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _as_argument(program: Program, i: int, name: str) -> Iterator[Program]:
    """The program with the variable of a top-level line passed in."""
    block = re.compile(rf"\b{name}\b")
    try:
        aval = _type_of(program, i, name)
    except Exception:
        return
    kind = {"float32": "f32", "int32": "i32", "bool": "b1"}.get(str(aval.dtype))
    if kind is None or not any(block.search(line) for line in program.lines[i + 1 :]):
        return
    argument = (name, f"{kind}({', '.join(map(str, aval.shape))})")
    yield _swept(replace(program, arguments=(*program.arguments, argument), lines=program.lines[:i] + program.lines[i + 1 :]))


def _type_of(program: Program, i: int, name: str) -> Any:
    cut = replace(program, lines=(*program.lines[: i + 1], f"return {name}"))
    return abstract_eval(lambda args: cut.function()(*args), cut.args())


def _swept(program: Program) -> Program:
    """The program without functions, lines and arguments that nothing reads."""
    lines = list(program.lines)
    while True:
        for i, line in enumerate(lines[:-1]):
            made = re.match(r"\s*(?:def )?(\w+)(?: = |\()", line)
            if made and "return" not in line and not any(re.search(rf"\b{made[1]}\b", other) for other in lines[:i] + lines[i + 1 :]):
                del lines[i : _end(lines, i)]
                break
        else:
            break
    program = replace(program, lines=tuple(lines))
    for i in reversed(range(len(program.arguments))):
        if not any(re.search(rf"\b{program.arguments[i][0]}\b", line) for line in lines):
            program = _without(program, i)
    return program


def _without(program: Program, i: int) -> Program:
    name = program.arguments[i][0]
    kept = {entries: tuple(e for e in getattr(program, entries) if e[0] != name) for entries in ("pins", "in_specs")}
    return replace(program, arguments=program.arguments[:i] + program.arguments[i + 1 :], **kept)
