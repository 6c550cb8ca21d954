"""The rules of a function's kernels against the kernels themselves, run in parts and whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import PartitionSpec

from autoshard.errors import RuleError
from autoshard.ir import Mesh, Op, Origin, Rule, factor_names, result_layout
from autoshard.ir.layout import layout_to_spec
from autoshard.lower.interpret import Interpreter, Path, bind, ops_by_path
from autoshard.lower.mesh import jax_mesh
from autoshard.lower.shards import Sharded
from autoshard.rules import rules_of
from autoshard.rules.declared import declared_of
from autoshard.trace import trace
from autoshard.trace.origin import shown
from autoshard.trace.structure import around, opened, subjaxprs

TOLERANCE = 2.0**-6
"""Of the largest element, for bfloat16; finer types have as many times less as they have more digits."""


def check_kernel_rule(fn: Callable[..., Any], *args: Any) -> None:
    """Checks that every kernel of a function, run in parts along each factor that its rule lets through, gives the whole kernel's results.

    Pallas kernels run in interpret mode. Each factor is cut into as many parts as its least divisor, one a device, so that two devices do
    for even sizes. Use small sizes.

    Args:
        fn, args: a function that calls kernels outside of loops; abstract arguments are filled with random numbers.

    Raises:
        RuleError: the results differ, by the kernel's line and factor; there is no kernel with a rule; or there are too few devices.

    >>> from autoshard import kernel_rule
    >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> check_kernel_rule(kernel_rule(jnp.tanh, "([i, j])->([i, j])"), x)
    >>> check_kernel_rule(kernel_rule(jax.nn.softmax, "([i, j])->([i, j])"), x)
    Traceback (most recent call last):
        ...
    autoshard.errors.RuleError: a kernel's shards compute the whole kernel's results: ...
    """
    traced = trace(fn, *args)
    checked = _Checked(ops_by_path(traced.graph), rules_of(traced.graph))
    leaves = [filled(x, seed) for seed, x in enumerate(jax.tree.leaves(traced.split(args)))]
    checked.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, leaves)
    if not checked.number:
        raise RuleError(
            "check_kernel_rule runs kernels with a rule outside of loops, and found none in "
            f"{traced.graph.name!r}. Pass the function that calls the kernel."
        )


class _Checked(Interpreter):
    """A run of a program in which each kernel is run in parts, too.

    Attributes:
        number: of kernels that were checked.
    """

    def __init__(self, ops: Mapping[Path, Op], rules: Sequence[Rule | None]):
        super().__init__(ops, differentiable=False)
        self.rules = rules
        self.number = 0

    def region(self) -> _Checked:
        return _Checked(self.ops, self.rules)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        rule = self.rules[op.index]
        if op.kernel is None or rule is None or any(isinstance(x, Tracer) for x in operands):
            return super().op(op, eqn, operands)
        self.number += 1

        def bound(*operands: Any, **replaced: Any) -> list[Any]:
            if op.primitive == "custom_partitioning":
                return jaxpr_as_fun(op.params["call"])(*operands)
            return bind(eqn, operands, **replaced)

        whole = ran(bound, operands)
        for factor, each in enumerate(rule.factors):
            if each.shardable:
                _compare(op, rule, factor, whole, in_parts(op, rule, _parts(op, rule, factor), bound, operands, whole))
        return whole


def _parts(op: Op, rule: Rule, factor: int) -> dict[int, int]:
    """Into how many parts a factor is cut, after its majors in the same dimension: each of these wholly.

    Raises:
        RuleError: these are more than there are devices.
    """
    majors = [f for dims in (*rule.operands, *rule.results) for dim in dims if factor in dim for f in dim[: dim.index(factor)]]
    parts = {f: rule.factors[f].size for f in majors} | {factor: least_divisor(rule.factors[factor].size)}
    if (n := math.prod(parts.values())) > len(jax.devices()):
        raise RuleError(
            f"check_kernel_rule runs each part on a device of its own: {_factor(op, rule, factor)} at {place_of(op)} takes {n}, "
            f"and there are {len(jax.devices())}. Use smaller sizes, or set XLA_FLAGS=--xla_force_host_platform_device_count={n}."
        )
    return parts


def in_parts(
    op: Op,
    rule: Rule,
    parts: Mapping[int, int],
    bound: Callable[..., Any],
    operands: Sequence[Any],
    whole: Sequence[Any],
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """The results of a kernel of which each device computes a part.

    Args:
        parts: per factor into how many parts it is cut.
        bound: the whole kernel.
        whole: its results.
        devices: those that compute; None: JAX's own.
    """
    axes = {f"part{k}": f for k, f in enumerate(parts)}
    mesh = Mesh(tuple((name, parts[f]) for name, f in axes.items()))
    choice = tuple((f, -1) for f in axes.values())
    shapes = [tuple(np.shape(x) for x in side) for side in (operands, whole)]
    sharded = Sharded(op.primitive, op.params, bound, rule, choice, mesh, *shapes)

    def specs(layouts: Sequence[Any], side: Sequence[Any]) -> tuple[PartitionSpec, ...]:
        pairs = zip(layouts, side, strict=True)
        return tuple(PartitionSpec(*layout_to_spec(layout, mesh.names, np.ndim(x))) for layout, x in pairs)

    leaving = [result_layout(rule, choice, k) for k in range(len(whole))]
    mapped = jax.shard_map(
        lambda *shards: tuple(sharded.run(shards)),
        mesh=jax_mesh(mesh, devices),
        in_specs=specs(sharded.entering, operands),
        out_specs=specs(leaving, whole),
        check_vma=False,
    )
    return ran(mapped, operands)


def ran(function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a function with its Pallas kernels in interpret mode."""
    return jax.jit(jaxpr_as_fun(_interpreted(jax.make_jaxpr(function)(*operands))))(*operands)


def _interpreted(body: Any) -> Any:
    """A program with its Pallas kernels in interpret mode."""
    jaxpr, consts = opened(body)
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            eqns.append(eqn.replace(params=eqn.params | {"interpret": eqn.params["interpret"] or True}))
        elif eqn.primitive.name == "shard_map":
            eqns.append(eqn.replace(params=eqn.params | {"jaxpr": _interpreted(eqn.params["jaxpr"])}))
        else:
            eqns.append(around(eqn, [opened(_interpreted(inner))[0] for inner in subjaxprs(eqn)]))
    new = jaxpr.replace(eqns=eqns)
    return ClosedJaxpr(new, consts) if isinstance(body, ClosedJaxpr) else new


def _compare(op: Op, rule: Rule, factor: int, whole: Sequence[Any], parts: Sequence[Any]) -> None:
    """Raises where results differ by more than rounding."""
    for number, (wanted, found) in enumerate(zip(whole, parts, strict=True)):
        if op.kernel is not None and number in op.kernel.unread:
            continue
        differs, scale, allowed = difference(wanted, found)
        if not differs <= allowed:
            advice = "List that factor under need_replication" if _declared(op) else "Declare one with autoshard.kernel_rule"
            raise RuleError(
                f"a kernel's shards compute the whole kernel's results: at {place_of(op)} result {number} differs by {differs:.3g}, of at "
                f"most {scale:.3g}, when {_factor(op, rule, factor)} is split. {advice}."
            )


def difference(wanted: Any, found: Any) -> tuple[float, float, float]:
    """The largest difference of two arrays, the largest element, and the difference that rounding makes."""
    exact = not jnp.issubdtype(wanted.dtype, jnp.inexact)
    digits = 0.0 if exact else float(jnp.finfo(wanted.dtype).eps) / float(jnp.finfo(jnp.bfloat16).eps)
    a, b = (np.asarray(lax.convert_element_type(x, x.dtype if exact else np.float32)).astype(float) for x in (wanted, found))
    scale = float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a)))
    with np.errstate(invalid="ignore"):
        differs = np.abs(b - a)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(alike, 0.0, np.where(np.isnan(differs), np.inf, differs)), initial=0.0)), scale, TOLERANCE * scale * digits


def filled(x: Any, seed: int) -> Any:
    """An array; of a type alone random numbers, and ones as integers, which are lengths and positions that there are."""
    if isinstance(x, jax.Array | np.ndarray):
        return jnp.asarray(x)
    numbers = np.random.default_rng(seed).standard_normal(x.shape)
    return jnp.asarray(numbers, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.ones(x.shape, x.dtype)


def _declared(op: Op) -> Any:
    """The rule that the user wrote; None of one that was read."""
    return getattr(op.params.get("partition"), "declared", None) or declared_of(op.primitive, op.params)


def place_of(op: Op) -> str:
    """The source line of a call; that of the function where it is called from nowhere else."""
    code = getattr(getattr(op.params.get("partition"), "function", None), "__code__", None)
    if op.origin.file or code is None:
        return str(op.origin)
    return str(Origin(shown(code.co_filename), code.co_firstlineno, code.co_name))


def _factor(op: Op, rule: Rule, factor: int) -> str:
    """A factor as the user named it, or with a dimension that has it."""
    if (declared := _declared(op)) is not None:
        return f"{declared.names(rule).get(factor, factor_names(rule)[factor])} of {declared}"
    sides = [("result", rule.results), ("operand", rule.operands)]
    places = ((what, n, d) for what, tensors in sides for n, dims in enumerate(tensors) for d, dim in enumerate(dims) if factor in dim)
    what, n, d = next(places)
    return f"{factor_names(rule)[factor]} of {rule} (dimension {d} of {what} {n})"


def least_divisor(size: int) -> int:
    return next(n for n in range(2, size + 1) if size % n == 0)
