"""A strategy as the few lines of Python that make JAX do the same without autoshard."""

from __future__ import annotations

import ast
import linecache
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from autoshard.ir import Origin, Spec
from autoshard.ir.naming import pattern
from autoshard.ir.words import array_type, spec_words
from autoshard.run.structure import per_argument
from autoshard.strategy import Record, TensorRecord
from autoshard.verify.pins import Fewest, Pin

SET_UP = """\
import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

{mesh}
"""

MADE = "mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {n_axes})"

PLACED = """\
# Each mesh axis on the links that it was predicted to have.
devices = np.array(sorted(jax.devices(), key=lambda device: getattr(device, "coords", ()))).reshape({topology})
devices = devices.transpose({dims}).reshape({laid}).transpose({back}){given}
mesh = jax.sharding.Mesh(devices, {names}, axis_types=(AxisType.Auto,) * {n_axes})"""

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

MODULES = '''\
# By the words of a leaf's path; a leaf without a spec is replicated.
SPECS = {{{specs}}}


def place(name, tree):
    """The argument with every leaf where its spec says; a module or an optimizer is changed in place."""

    def put(path, x):
        words = re.findall(r"\\w+", name + jax.tree_util.keystr(path))
        spec = SPECS.get(" ".join(words), SPECS.get(" ".join(words[:-1]), P()))  # some versions end a variable's path with "value"
        return jax.device_put(x, NamedSharding(mesh, spec))

    is_module = isinstance(tree, nnx.Pytree)
    placed = jax.tree_util.tree_map_with_path(put, nnx.state(tree) if is_module else tree)
    if is_module:
        nnx.update(tree, placed)
    return tree if is_module else placed


# Once, before training; nnx.jit then keeps what lies where:
{placing}
step = nnx.jit({function})
'''

CONSTRAIN = '''\
def constrain(x, spec):
    """The array with its sharding fixed, and its gradient's."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
'''

FORWARD = '''\
def constrain_forward(x, spec):
    """The array with its sharding fixed, and its gradient left as it is."""
    same = jax.custom_vjp(lambda x: constrain(x, spec))
    same.defvjp(lambda x: (same(x), None), lambda _, gradient: (gradient,))
    return same(x)
'''

BACKWARD = '''\
def constrain_gradient(x, spec):
    """The array as it is, with its gradient's sharding fixed."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, gradient: (constrain(gradient, spec),))
    return same(x)
'''

INSIDE = "# Inside the program, at the lines that are named:"

_NUMBER = re.compile(r"\[[\d*]+\]")
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
        return not self.found.differing and not self.found.per_shard

    def to_json(self) -> dict[str, Any]:
        """What was found, as JSON values; the text to paste is among them."""
        found = self.found
        return {
            "exact": self.exact,
            "minimal": found.minimal,
            "constraints_in_all": found.n_constraints,
            "constraints": [asdict(pin) for pin in found.pins],
            "per_shard": list(found.per_shard),
            "differing": [asdict(row) for row in found.differing],
            "python": str(self),
        }

    def __str__(self) -> str:
        return "\n\n".join(part for part in (_comment(_verdict(self)), _mesh(self), _helpers(self), _jit(self), _constraints(self)) if part)

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.35">{escape(str(self))}</pre>'


def _verdict(pins: Pins) -> list[str]:
    found, record = pins.found, pins.record
    n = len(re.findall(r"^(?!#).|^# \d+\. ", _constraints(pins), re.MULTILINE))
    constraints = f"{sum(p.count for p in found.pins)} of the {found.n_constraints} constraints of autoshard's own lowering"
    lines = [
        f"{record.program.name} on mesh {record.mesh}: the specs of its arguments and results,",
        f"and {n} line{'' if n == 1 else 's'} inside it ({constraints}).",
    ]
    if found.differing:
        lines.append("NOT the same program: with these alone, Shardy's collectives differ from the strategy's:")
        lines += [
            f"  {row.kind} over {', '.join(row.mesh_axes)}: {row.actual_count} of {row.actual_bytes:.6g} bytes in all, "
            f"not {row.predicted_count} of {row.predicted_bytes:.6g}"
            for row in found.differing
        ]
    else:
        lines.append("Verified: with these alone, Shardy's propagation inserts the strategy's collectives, all of them and no others.")
    if found.per_shard:
        lines.append("NOT expressed: autoshard runs these inside jax.shard_map, for which a compiler may gather their operands:")
        lines += [f"  {operation}" for operation in found.per_shard]
    if not found.minimal:
        lines.append(f"Fewer may do: the time was up after {found.trials} trials.")
    return lines


def _comment(lines: Iterable[str]) -> str:
    return "\n".join(f"# {line}" for line in lines)


# -- arguments and results ---------------------------------------------------------------------------------------------------


def _mesh(pins: Pins) -> str:
    mesh = pins.record.mesh
    placement = mesh.placement
    sizes = tuple(size for _, size in mesh.shape)
    if placement is None:
        made = MADE.format(sizes=sizes, names=mesh.all_names, n_axes=len(sizes))
    else:
        made = PLACED.format(
            topology=placement.topology,
            dims=placement.dims,
            laid=tuple(mesh.sizes[axis] for axis in placement.axes),
            back=tuple(map(placement.axes.index, mesh.order)),
            given="" if len(sizes) == len(mesh.axes) else f".reshape({sizes})",
            names=mesh.all_names,
            n_axes=len(sizes),
        )
    text = SET_UP.format(mesh=made)
    text = text if placement is None else text.replace("import jax\n", "import jax\nimport numpy as np\n", 1)
    return text.replace("import jax\n", "import jax\nfrom flax import nnx\n", 1) if pins.has_modules else text


def _jit(pins: Pins) -> str:
    """The jitted function with its arguments' and results' shardings."""
    record = pins.record
    if pins.has_modules:
        return _placed_modules(pins)
    leaves = iter(record.arguments)
    paths = [
        (f"[{name!r}]{next(leaves).path.removeprefix(name)}")
        for name, n in zip(pins.argument_names, per_argument(record.argument_structure), strict=True)
        for _ in range(n)
    ]
    paths += [f"['result']{tensor.path if tensor.path != 'result' else ''}" for tensor in record.results]
    tensors = (*record.arguments, *record.results)
    specs = "".join(f"\n    {path!r}: {spec_words(spec)}," for path, spec in _endings(dict(zip(paths, tensors, strict=True))).items())
    return SHARDINGS.format(
        specs=f"{specs}\n" if specs else "",
        arguments=", ".join(f"{name!r}: {name}" for name in pins.argument_names),
        function=_function(record),
        called=", ".join(pins.argument_names),
        donated=f", donate_argnums={record.donate_argnums!r}" if record.donate_argnums else "",
    )


def _placed_modules(pins: Pins) -> str:
    """What puts Flax NNX objects, and other arguments, where they belong."""
    record = pins.record
    wanted = {" ".join(re.findall(r"\w+", tensor.path)): _trimmed(tensor.spec) for tensor in record.arguments}
    specs = "".join(f"\n    {words!r}: {spec_words(spec)}," for words, spec in wanted.items() if spec)
    placing = "\n".join(f"{name} = place({name!r}, {name})" for name in pins.argument_names)
    return MODULES.format(specs=f"{specs}\n" if specs else "", placing=placing, function=_function(record))


def _function(record: Record) -> str:
    return record.program.name if record.program.name.isidentifier() else "function"


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
    """What the path ends with, from its last name to all of it."""
    parts = _COMPONENT.findall(path)
    last_name = max((at for at, part in enumerate(parts) if not _NUMBER.fullmatch(part)), default=0)
    for start in reversed(range(last_name + 1)):
        yield "".join(parts[start:])


def _trimmed(spec: Spec) -> Spec:
    """The spec without the dimensions at its end that nothing shards."""
    n = max((dim + 1 for dim, entry in enumerate(spec) if entry is not None), default=0)
    return spec[:n]


# -- constraints -------------------------------------------------------------------------------------------------------------


def _helpers(pins: Pins) -> str:
    """The functions that the lines call."""
    calls = {call for call, _ in _calls(pins.constraints, pins.differentiated)}
    texts = {"constrain": CONSTRAIN, "constrain_forward": FORWARD, "constrain_gradient": BACKWARD}
    return "\n\n".join(text for name, text in texts.items() if calls and name in {*calls, "constrain"})


def _constraints(pins: Pins) -> str:
    """Per source line what to add there."""
    places: dict[Origin, list[Pin]] = defaultdict(list)
    for pin in pins.constraints:
        places[pin.origin].append(pin)
    lines = ["\n".join(_at(origin, members, pins.differentiated)) for origin, members in places.items()]
    return "\n\n".join([INSIDE, *lines]) if lines else ""


def _at(origin: Origin, pins: Sequence[Pin], differentiated: bool) -> Iterator[str]:
    """The lines to add at a source line, which is shown where it can be read; a tensor's constraints are one expression."""
    source = linecache.getline(origin.file, origin.line).strip()
    yield f"# {origin.file}:{origin.line} in {origin.function}" if origin.file else "# wherever it is made"
    if source:
        yield f"#     {source}"
    tensors: dict[tuple, list[tuple[str, Pin]]] = defaultdict(list)
    for call, pin in _calls(pins, differentiated):
        tensors[pin.name, pin.dtype, pin.shape, pin.backward].append((call, pin))
    names = [_name(source, members[-1][1]) for members in tensors.values()]
    for number, (members, written) in enumerate(zip(tensors.values(), names, strict=True), 1):
        _, last = members[-1]
        text = written or "..."
        for call, pin in reversed(members) if last.backward else members:  # a gradient meets the outermost call first
            text = f"{call}({text}, {spec_words(pin.spec)})"
        what = f"its gradient is {last.name}" if last.backward else last.name
        read = f", as {last.reader} reads it" if last.reader else ""
        times = f"; {last.count} times" if last.count > 1 else ""
        described = f"{what} {array_type(last.dtype, last.shape)}{read}{times}"
        if written is None or names.count(written) > 1:
            where = "where that is" if written else "of what this line has no name for:"
            yield f"# {number}. {text}, {where} {described}"
        elif written.isidentifier():
            yield f"{written} = {text}  # {described}"
        else:
            yield f"{text}  # in place of {written}: {described}"


def _name(source: str, pin: Pin) -> str | None:
    """What a constraint on the tensor takes its place of; None where the source has no name for it."""
    if pin.backward:
        return _expression(pin)
    return (_written(source, pin.name) if pin.origin.file else pin.name if pin.name.isidentifier() else None) or _expression(pin)


def _expression(pin: Pin) -> str | None:
    """What the source writes for the tensor where it stands in the pin's expression, on one line; None where that cannot be told."""
    origin = pin.origin
    if pin.operand is None or not origin.columns or not (lines := linecache.getlines(origin.file)[origin.line - 1 : origin.columns[1]]):
        return None
    start, _, end = origin.columns
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    text = f"({b''.join(encoded).decode(errors='replace')})"
    try:
        whole = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    match whole:
        case _ if pin.operand < 0:
            found = whole
        case ast.BinOp() if pin.operand < 2:
            found = (whole.left, whole.right)[pin.operand]
        case ast.Call(args=[only]) | ast.Call(func=ast.Attribute(value=only), args=[]) if pin.operand == 0:
            found = only
        case ast.UnaryOp() if pin.operand == 0:
            found = whole.operand
        case _:
            return None
    written = ast.get_source_segment(text, found) if found.lineno == found.end_lineno else ast.unparse(found)
    return None if isinstance(found, ast.Constant) else written


def _written(source: str, name: str) -> str | None:
    """How a source line writes the tensor of this name, an argument or a slice of one; None where it is not to be seen."""
    path = name.removeprefix("a slice of ")
    last = re.search(r"(\w+)(?:'\])?$", path)
    if last is None or " of " in path:
        return None
    found = set()
    for text in (source, f"{source} pass"):  # the head of a compound statement parses with a body only
        try:
            nodes = ast.walk(ast.parse(text))
        except SyntaxError:
            continue
        for node in nodes:
            match node:
                case ast.Name(id=key) if path.isidentifier():
                    pass
                case ast.Attribute(attr=key) | ast.Subscript(slice=ast.Constant(value=key)):
                    pass
                case _:
                    continue
            if key == last[1]:
                found.add(ast.get_source_segment(text, node))
        break
    return found.pop() if len(found) == 1 else None


def _calls(pins: Sequence[Pin], differentiated: bool) -> Iterator[tuple[str, Pin]]:
    """Each pin with the function that fixes it; a tensor's and its gradient's on one line are one call."""
    gradients = [pin for pin in pins if pin.backward]
    for pin in pins:
        if pin.backward:
            continue
        own = next((gradient for gradient in gradients if differentiated and _is_gradient(gradient, pin)), None)
        if own is not None:
            gradients.remove(own)
        yield "constrain" if own is not None or not differentiated else "constrain_forward", pin
    yield from (("constrain_gradient", pin) for pin in gradients)


def _is_gradient(gradient: Pin, pin: Pin) -> bool:
    """Whether the one looks like the other's gradient: from the same line, of the same shape, or its transpose where nothing is sharded."""
    if (gradient.origin, gradient.spec) != (pin.origin, pin.spec):
        return False
    whole = all(entry is None for entry in pin.spec)
    return sorted(gradient.shape) == sorted(pin.shape) if whole else gradient.shape == pin.shape
