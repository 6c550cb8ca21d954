"""What is in the padding of each dimension, and which operands are masked: those that an operation mixes with what is no padding.

Of a dimension the content of its padding is known to be one value, or to be what is in the rest of the dimension as well, or it is not
known. Before an operation combines the elements of a dimension, its padding is overwritten with the value that changes nothing, such as 0
before a sum or -inf before a maximum; not where it has that value already. In a product the padding of both operands is 0, since 0 times
what is not known may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.ir import Op, Rule
from autoshard.primitives import primitive
from autoshard.rewrite.extents import Extents
from autoshard.rewrite.padding_rules import dim_of
from autoshard.rules.exact_functions import EXACT


@dataclass(frozen=True, slots=True)
class Content:
    """What is in the padding of a dimension.

    Attributes:
        value: the one value that all of it has, if that is known.
        uniform: whether it repeats along the dimension what is elsewhere in it.
    """

    value: Any = None
    uniform: bool = False

    def joined(self, other: Content) -> Content:
        """What is known where it is either."""
        return Content(self.value if same(self.value, other.value) else None, self.uniform and other.uniform)


UNKNOWN, ZERO = Content(), Content(0)

Contents = tuple[Content, ...]
"""The content of each dimension's padding; of no meaning where there is none."""

Masks = tuple[tuple[int, int, Any], ...]
"""Which paddings are overwritten: the position of the operand, its dimension, and the value."""


def same(one: Any, other: Any) -> bool:
    """Whether two values are known and equal; zeros of either sign are."""
    return one is not None and other is not None and bool(one == other)


def identity(operator: str, dtype: str) -> Any:
    """The value that changes nothing where an operator combines it with others of this type.

    >>> identity("sum", "float32"), identity("max", "float32"), identity("min", "int8"), identity("and", "bool")
    (0, -inf, 127, True)
    """
    if operator in ("sum", "xor"):
        return 0
    if operator == "prod":
        return 1
    if dtype == "bool":
        return operator in ("and", "min")
    if jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        return {"and": -1, "or": 0, "max": int(limits.min), "min": int(limits.max)}[operator]
    return -np.inf if operator == "max" else np.inf


@dataclass(frozen=True, slots=True)
class Reading:
    """An operation with padded operands.

    Attributes:
        reads, makes: the extents of its operands and results.
        contents: what is in the padding of its operands.
        written: per operand the value that all its elements have, if it is written in the program.
        dtypes: of its operands.
    """

    op: Op
    rule: Rule
    reads: Sequence[Extents]
    makes: Sequence[Extents]
    contents: Sequence[Contents]
    written: Sequence[Any]
    dtypes: Sequence[str]

    def padded(self, tensor: int) -> list[int]:
        """The operand's dimensions with padding."""
        return [dim for dim, of in enumerate(self.reads[tensor]) if of]

    def content(self, tensor: int, factor: int) -> Content:
        """What is in an operand where a factor is in its padding."""
        dim = dim_of(self.rule.operands[tensor], factor)
        if dim is None:
            return Content(self.written[tensor], True)
        found = self.contents[tensor][dim]
        alone = len(self.rule.operands[tensor][dim]) == 1
        return found if alone else Content(found.value)

    def is_tame(self, tensor: int) -> bool:
        """Whether all padding of an operand is as finite as the rest of it."""
        return all(self.contents[tensor][dim].uniform or is_finite(self.contents[tensor][dim].value) for dim in self.padded(tensor))


def is_finite(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def after(contents: Sequence[Contents], extents: Sequence[Extents], masks: Masks) -> list[Contents]:
    """What is in the padding of operands that are masked, one dimension after the other."""
    found = [list(each) for each in contents]
    for tensor, dim, value in masks:
        for other, of in enumerate(extents[tensor]):
            if of and other != dim and not same(found[tensor][other].value, value):
                found[tensor][other] = Content(None, found[tensor][other].uniform)
        found[tensor][dim] = Content(value)
    return [tuple(each) for each in found]


def made(reading: Reading, before: Sequence[Contents]) -> list[Contents]:
    """What is in the padding of an operation's results.

    Args:
        reading: with what is in its operands once these are masked.
        before: the same without masks, of which a reduction's other dimensions keep more.
    """
    results = []
    for number, extents in enumerate(reading.makes):
        dims = reading.rule.results[number]
        results.append(tuple(_dim(reading, before, dims[dim], number) if of else UNKNOWN for dim, of in enumerate(extents)))
    return results


def _dim(reading: Reading, before: Sequence[Contents], factors: Sequence[int], number: int) -> Content:
    """The content of a result's dimension that is made of some factors: a value is known where it is that of each that is padded."""
    padded = [f for f in factors if _is_padded(reading, f, number)]
    rule = _RULES.get(reading.op.primitive) or _RULES_OF_KIND.get(primitive(reading.op.primitive).kind)
    if rule is None or not padded:
        return UNKNOWN
    found = [rule(reading, before, f, number) for f in padded]
    whole = found[0]
    for each in found[1:]:
        whole = whole.joined(each)
    return whole if len(factors) == 1 else Content(whole.value)


def _is_padded(reading: Reading, factor: int, number: int) -> bool:
    """Whether the factor may be padded: all dimensions of operands that have it are, or its own in the result."""
    places = [(reading.reads[k], dim_of(dims, factor)) for k, dims in enumerate(reading.rule.operands)]
    inside = [bool(extents[dim]) for extents, dim in places if dim is not None]
    return all(inside) if inside else dim_of(reading.rule.results[number], factor) is not None


def _elementwise(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    name = reading.op.primitive
    contents = [reading.content(k, factor) for k in range(len(reading.reads))]
    value, uniform = None, all(content.uniform for content in contents)
    values = [content.value for content in contents]
    if name == "select_n":
        value = _selected(values)
    elif name in _ABSORBING and (value := _absorbed(reading, values)) is not None:
        pass
    elif name in _EXACT and all(each is not None for each in values):
        value = _evaluated(reading, values)
    elif name == "integer_pow" and same(values[0], 0) and reading.op.params["y"] > 0:
        value = 0
    elif name in _FIXED and values[0] is not None:
        value = next((after for at, after in _FIXED[name] if same(values[0], at)), None)
    return Content(value, uniform)


def _selected(values: Sequence[Any]) -> Any:
    which, *cases = values
    if which is not None:
        return cases[int(which)]
    return cases[0] if all(same(cases[0], each) for each in cases) else None


def _absorbed(reading: Reading, values: Sequence[Any]) -> Any:
    """The result where one operand decides it, whatever the others are as long as they are finite."""
    name = reading.op.primitive
    absorbing = {"and": 0, "or": 1}.get(name, 0)
    exact = reading.dtypes[0] == "bool" or (name == "mul" and jnp.issubdtype(reading.dtypes[0], np.integer))
    if name in ("and", "or") and not exact:
        return None
    for k, value in enumerate(values):
        if same(value, absorbing) and (name != "div" or k == 0):
            others = [other for other in range(len(values)) if other != k]
            if exact or all(reading.is_tame(other) for other in others):
                return value
    return None


_ABSORBING = frozenset({"mul", "div", "and", "or"})

_EXACT: Mapping[str, Callable[..., Any]] = {
    **EXACT,
    "add_any": np.add,
    "square": np.square,
    "convert_element_type": np.positive,
}
"""Operations whose results NumPy has as well, bit by bit."""

_FIXED: Mapping[str, tuple[tuple[float, float], ...]] = {
    **dict.fromkeys(("tanh", "sin", "tan", "sinh", "asin", "atan", "asinh", "atanh", "erf", "expm1", "log1p", "sqrt", "cbrt"), ((0, 0),)),
    **dict.fromkeys(("ceil", "floor", "round", "real", "imag", "conj"), ((0, 0),)),
    "exp": ((0, 1), (-np.inf, 0)),
    "exp2": ((0, 1), (-np.inf, 0)),
    "cos": ((0, 1),),
    "log": ((1, 0),),
    "logistic": ((-np.inf, 0),),
    "is_finite": ((0, True),),
    "reduce_precision": ((0, 0), (1, 1)),
}
"""Values at which functions are exact."""


def _evaluated(reading: Reading, values: Sequence[Any]) -> Any:
    name = reading.op.primitive
    dtype = reading.op.equation.outvars[0].aval.dtype
    read = [np.asarray(value).astype(each) for value, each in zip(values, reading.dtypes, strict=True)]
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if not (jnp.issubdtype(dtype, np.inexact) or np.isfinite(read[0])) or read[0].dtype.kind == "c":
                return None
            found = read[0].astype(dtype)
        else:
            found = np.asarray(_EXACT[name](*read)).astype(dtype)
    return None if found != found else found[()]


def _carried(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    """Of operations that move elements of one operand."""
    return reading.content(min(number, len(reading.reads) - 1) if reading.op.primitive in _PARALLEL else 0, factor)


_PARALLEL = frozenset({"sort", "optimization_barrier"})
"""Operations each of whose results has the elements of one operand."""


def _all(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    """Of operations that put together elements of several operands."""
    found = [reading.content(k, factor) for k in range(len(reading.reads))]
    whole = found[0]
    for each in found[1:]:
        whole = whole.joined(each)
    return whole


def _reduced(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    name = reading.op.primitive
    dim = dim_of(reading.rule.operands[0], factor)
    found, operator = before[0][dim] if dim is not None else UNKNOWN, primitive(name).operator
    keeps = {"sum": (0,), "prod": (1,), "max": (found.value,), "min": (found.value,), "and": (found.value,), "or": (found.value,)}
    value = found.value if any(same(found.value, kept) for kept in keeps.get(operator, ())) else None
    return Content(value, found.uniform)


def _product(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    if reading.rule.factors[factor].kind != "pass_through":
        return UNKNOWN
    for k in (0, 1):
        dim = dim_of(reading.rule.operands[k], factor)
        if dim is not None and same(reading.contents[k][dim].value, 0) and reading.is_tame(1 - k):
            return ZERO
    return UNKNOWN


def _summed_up(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    is_axis = dim_of(reading.rule.operands[0], factor) == reading.op.params["axis"]
    return ZERO if not is_axis and reading.op.primitive == "cumsum" and same(reading.content(0, factor).value, 0) else UNKNOWN


def _looked_up(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    """Of a gather that fills nothing: what is in its operand."""
    fills = "FILL" in str(reading.op.params["mode"])
    in_operand = dim_of(reading.rule.operands[0], factor) is not None and dim_of(reading.rule.operands[1], factor) is None
    return reading.content(0, factor) if in_operand and not fills else UNKNOWN


def _scattered(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    """Of a scatter: its operand's value, where updates do not reach it or have it too, as zeros that are added."""
    value = reading.content(0, factor).value
    if value is None or dim_of(reading.rule.operands[1], factor) is not None:
        return UNKNOWN
    if dim_of(reading.rule.operands[2], factor) is None:
        return Content(value)
    update, operator = reading.content(2, factor).value, primitive(reading.op.primitive).operator
    keeps = same(update, value) and (operator in ("", "max", "min") or (operator == "sum" and same(value, 0)))
    return Content(value if keeps else None)


def _updated(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    value = reading.content(0, factor).value
    if dim_of(reading.rule.operands[1], factor) is None:
        return Content(value)
    return Content(value if same(reading.content(1, factor).value, value) else None)


def _counted(reading: Reading, before: Sequence[Contents], factor: int, number: int) -> Content:
    return Content(None, dim_of(reading.rule.results[0], factor) != reading.op.params["dimension"])


_Rule = Callable[[Reading, Sequence[Contents], int, int], Content]

_RULES: Mapping[str, _Rule] = {
    "broadcast_in_dim": _carried,
    "tile": _carried,
    "concatenate": _all,
    "pad": _all,
    "stack": _all,
    "dynamic_update_slice": _updated,
    "gather": _looked_up,
    "iota": _counted,
    "argmax": lambda *_: UNKNOWN,
    "argmin": lambda *_: UNKNOWN,
    "reduce": lambda *_: UNKNOWN,
    "bitcast_convert_type": lambda *_: UNKNOWN,
    "unstack": _carried,
    "device_put": _carried,
    "sharding_constraint": _carried,
}

_RULES_OF_KIND: Mapping[str, _Rule] = {
    "elementwise": _elementwise,
    "identity": _carried,
    "rearrangement": _carried,
    "slice": _carried,
    "reversal": _carried,
    "reduction": _reduced,
    "cumulative": _summed_up,
    "product": _product,
    "scatter": _scattered,
    "sort": lambda reading, before, factor, number: Content(reading.content(number, factor).value),
}
