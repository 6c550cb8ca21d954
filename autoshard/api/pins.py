"""A strategy as the few lines of Python that make JAX do the same without autoshard."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from autoshard.api.structure import per_argument
from autoshard.ir import Origin, Spec
from autoshard.ir.naming import pattern
from autoshard.strategy import Record, TensorRecord
from autoshard.verify.pins import Fewest, Pin

SET_UP = """\
import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {n_axes})
"""

SHARDINGS = '''\
# By the ending of a leaf's path, [*] for any index; the longest ending counts, and a leaf without one is replicated.
SPECS = {{{specs}}}


def shardings(tree):
    """A sharding for each leaf."""

    def one(path, _):
        exact = jax.tree_util.keystr(path)
        starred = re.sub(r"\\[\\d+\\]", "[*]", exact)
        ending = max((end for end in SPECS if exact.endswith(end) or starred.endswith(end)), key=len, default=None)
        return NamedSharding(mesh, SPECS.get(ending, P()))

    return jax.tree_util.tree_map_with_path(one, tree)


arguments = {{{arguments}}}
placed = shardings(arguments)
in_shardings = tuple(placed[name] for name in arguments)
out_shardings = shardings({{"result": jax.eval_shape({function}, {called})}})["result"]
step = jax.jit({function}, in_shardings=in_shardings, out_shardings=out_shardings{donated})
'''

PIN = '''\
def pin(x, spec):
    """The array with its sharding fixed; jax.lax.with_sharding_constraint would fix its gradient's as well."""
    constrain = jax.custom_vjp(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
    constrain.defvjp(lambda x: (constrain(x), None), lambda _, gradient: (gradient,))
    return constrain(x)
'''

PIN_GRADIENT = '''\
def pin_gradient(x, spec):
    """The array itself, with the sharding of its gradient fixed."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, spec)),))
    return same(x)
'''

CONSTRAIN = '''\
def pin(x, spec):
    """The array with its sharding fixed."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
'''


_COMPONENT = re.compile(r"\['(?:[^'])*'\]|\[[^\]]*\]|\.?[^.\[\]]+")


@dataclass(frozen=True, slots=True)
class Pins:
    """The argument specs and ``with_sharding_constraint`` lines that make JAX's own propagation arrive at a strategy.

    Prints as Python to paste.

    Attributes:
        record: the strategy.
        found: the constraints and what was checked.
        differentiated: whether the program has a backward pass, which a constraint must not touch by accident.
        argument_names: the function's parameters.
        has_modules: whether arguments are Flax NNX objects.
    """

    record: Record
    found: Fewest
    differentiated: bool
    argument_names: tuple[str, ...]
    has_modules: bool

    @property
    def constraints(self) -> tuple[Pin, ...]:
        """The lines to add, in program order."""
        return self.found.pins

    @property
    def exact(self) -> bool:
        """Whether the program with these lines alone has the strategy's collectives."""
        return not self.found.differing

    def __str__(self) -> str:
        return "\n\n".join(part for part in (_comment(_verdict(self)), _jit(self), _helpers(self), _constraints(self.constraints)) if part)

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.35">{escape(str(self))}</pre>'


def _verdict(pins: Pins) -> list[str]:
    found, record = pins.found, pins.record
    n = len(found.pins)
    constraints = f"{sum(p.count for p in found.pins)} of the {found.n_constraints} constraints of autoshard's own lowering"
    lines = [
        f"{record.program.name} on mesh {record.mesh}: the specs of its arguments and results,",
        f"and {n} line{'' if n == 1 else 's'} inside it ({constraints}).",
    ]
    if pins.exact:
        lines.append("Verified: with these alone, Shardy's propagation inserts the strategy's collectives, all of them and no others.")
    else:
        lines.append("NOT the same program: with these alone, Shardy's collectives differ from the strategy's:")
        lines += [
            f"  {row.kind} over {', '.join(row.mesh_axes)}: {row.actual_count} of {row.actual_bytes:.6g} bytes in all, "
            f"not {row.predicted_count} of {row.predicted_bytes:.6g}"
            for row in found.differing
        ]
    if not found.minimal:
        lines.append(f"Fewer may do: the time was up after {found.trials} trials.")
    return lines


def _comment(lines: Iterable[str]) -> str:
    return "\n".join(f"# {line}" for line in lines)


# -- arguments and results ---------------------------------------------------------------------------------------------------


def _jit(pins: Pins) -> str:
    """The mesh, and the jitted function with its arguments' and results' shardings."""
    record, mesh = pins.record, pins.record.mesh
    set_up = SET_UP.format(sizes=mesh.sizes, names=mesh.names, n_axes=len(mesh.axes))
    if pins.has_modules:
        return f"{set_up}\n# Arguments are Flax NNX objects: place them with strategy.shard(...), and jit the function with nnx.jit.\n"
    leaves = iter(record.arguments)
    paths = [
        (f"[{name!r}]{next(leaves).path.removeprefix(name)}")
        for name, n in zip(pins.argument_names, per_argument(record.argument_structure), strict=True)
        for _ in range(n)
    ]
    paths += [f"['result']{tensor.path if tensor.path != 'result' else ''}" for tensor in record.results]
    tensors = (*record.arguments, *record.results)
    specs = "".join(f"\n    {path!r}: {_spec(spec)}," for path, spec in _endings(dict(zip(paths, tensors, strict=True))).items())
    return (
        set_up
        + "\n"
        + SHARDINGS.format(
            specs=f"{specs}\n" if specs else "",
            arguments=", ".join(f"{name!r}: {name}" for name in pins.argument_names),
            function=record.program.name,
            called=", ".join(pins.argument_names),
            donated=f", donate_argnums={record.donate_argnums!r}" if record.donate_argnums else "",
        )
    )


def _endings(tensors: Mapping[str, TensorRecord]) -> dict[str, Spec]:
    """Specs by the shortest endings of paths that tell them apart; see `SHARDINGS` for how they are looked up."""
    wanted = {path: _trimmed(tensor.spec) for path, tensor in tensors.items()}
    seen: dict[str, set[Spec]] = defaultdict(set)
    for path, spec in wanted.items():
        for text in {path, pattern(path)}:
            for ending in _path_endings(text):
                seen[ending].add(spec)
    found: dict[str, Spec] = {}
    for path, spec in wanted.items():
        if spec:
            found[next((end for end in (*_path_endings(pattern(path)), *_path_endings(path)) if len(seen[end]) == 1), path)] = spec
    # A path that is the ending of others speaks for them too, unless they speak for themselves.
    for path, spec in sorted(wanted.items(), key=lambda item: len(item[0])):
        ending = max((end for end in found if path.endswith(end) or pattern(path).endswith(end)), key=len, default="")
        if found.get(ending, ()) != spec:
            found[path] = spec
    return found


def _path_endings(path: str) -> Iterator[str]:
    """What the path ends with, from its last component to all of it."""
    parts = _COMPONENT.findall(path)
    for start in reversed(range(len(parts))):
        yield "".join(parts[start:])


def _trimmed(spec: Spec) -> Spec:
    """The spec without the dimensions at its end that nothing shards."""
    n = max((dim + 1 for dim, entry in enumerate(spec) if entry is not None), default=0)
    return spec[:n]


def _spec(spec: Spec) -> str:
    """``P('data', None)``."""
    return f"P({', '.join(map(repr, spec))})"


# -- constraints -------------------------------------------------------------------------------------------------------------


def _helpers(pins: Pins) -> str:
    forward = any(not p.backward for p in pins.constraints)
    back = any(p.backward for p in pins.constraints)
    parts = [(PIN if pins.differentiated else CONSTRAIN)] if forward else []
    return "\n\n".join(text.rstrip() + "\n" for text in (*parts, *([PIN_GRADIENT] if back else [])))


def _constraints(pins: Sequence[Pin]) -> str:
    """Per source line what to add there."""
    return "\n\n".join("\n".join(_at(origin, list(members))) for origin, members in groupby(_together(pins), key=lambda p: p.origin))


def _together(pins: Sequence[Pin]) -> Iterator[Pin]:
    """The lines with those of one source line next to each other, in the order of the first."""
    places: dict[Origin, list[Pin]] = defaultdict(list)
    for p in pins:
        places[p.origin].append(p)
    for members in places.values():
        yield from members


def _at(origin: Origin, pins: Sequence[Pin]) -> Iterator[str]:
    source = linecache.getline(origin.file, origin.line).strip()
    yield f"# {origin.file}:{origin.line} in {origin.function}" if origin.file else "# wherever it is made"
    if source:
        yield f"#     {source}"
    for p in pins:
        read = f", as {p.reader} reads it" if p.reader else ""
        whose = "its gradient is " if p.backward else ""
        times = f"; {p.count} times" if p.count > 1 else ""
        yield f"x = {'pin_gradient' if p.backward else 'pin'}(x, {_spec(p.spec)})  # {whose}{p.name} {p.type}{read}{times}"
