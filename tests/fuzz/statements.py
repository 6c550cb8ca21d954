"""Statements of one line: what a program may compute without a function of its own."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from fuzz.block import MAX_RANK, MAX_SIZE, Block, Statements, Unfit, Var, random_spec


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
    found += [b.rng.choice(b.shared.sizes) for _ in range(b.rng.randint(0, 2))]
    b.rng.shuffle(found)
    return found[:3] or [shape[-1]]


def matmul(b: Block) -> None:
    x = b.full()
    w = b.argument("f32", x.shape[-1], b.rng.choice(b.shared.sizes))
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
    return [b.rng.choice(b.shared.sizes) for _ in range(b.rng.randint(0, 2))]


def scatter(b: Block) -> None:
    """Updates at computed places: ``at[].add`` and its like, or a slice written over."""
    x = b.full()
    d, n = b.axis(x), x.shape[0]
    match b.rng.randrange(4):
        case 0:
            rows = b.index(*_index_shape(b))
            b.write(f"{x.name}.at[{rows} % {n}].{b.rng.choice(['add', 'max', 'min', 'set', 'multiply'])}(0.5)")
        case 1:
            rows = b.argument("i32", b.rng.choice(b.shared.sizes))
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
            b.write(f"jax.random.split({k.name}, {b.rng.choice(b.shared.sizes)})", True)
        case 4:
            b.write(f"{x.name} + jax.random.uniform({k.name}, {x.shape[-1:]})")
        case _:
            many = b.any("key", 1)
            b.write(f"jax.vmap(lambda k: jax.random.uniform(k, ({b.rng.choice(b.shared.sizes)},)))({many.name})")


def constraint(b: Block) -> None:
    x = b.any(rank=1)
    b.write(f"lax.with_sharding_constraint({x.name}, {random_spec(b.rng, x.shape)})", x.exact)


SIMPLE: Statements = {
    unary: 3, binary: 3, einsum: 4, matmul: 4, reshape: 3, transpose: 1.5, reduction: 3, logical: 0.5, softmax: 1, norm: 1, gather: 2.5,
    scatter: 2, ordering: 1.5, joining: 2.5, convolution: 1, pooling: 0.7, selection: 1, casting: 1.5, drawing: 1.2, constraint: 1.2,
}  # fmt: skip
