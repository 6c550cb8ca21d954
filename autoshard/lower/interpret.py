"""An interpreter of closed jaxprs, equation by equation, whose subclasses decide how each op of the graph is evaluated.

``jit`` is inlined. Loops, branches and checkpoints are bound again around bodies that are interpreted the same way, which
preserves rematerialisation and everything else their primitives mean. So are functions with custom derivatives where the
result may be differentiated; otherwise they are inlined, too, so that their bodies share copies with the code around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.source_info_util import current_name_stack, user_context

from autoshard.ir import Graph, Op
from autoshard.ir.naming import OP_SCOPE
from autoshard.primitives import has_custom_rule, is_inlined, is_placement
from autoshard.trace.mapped import MAPPED
from autoshard.trace.origin import calls_library
from autoshard.trace.structure import called_with, opened, subjaxprs, types_of, with_bodies

Path = tuple[int, ...]


class Interpreter:
    """The interpreter of a region of a program: its top level, or one body.

    Subclasses override `op`, `control_flow`, `enter` and `leave`; `region` makes the interpreter of a body.

    Attributes:
        ops: per path of an equation, its op.
        differentiable: whether the result may be differentiated, or mapped, once more.
        is_final: whether what it makes is lowered as it is: the scope of an equation then ends with the number of its op.
        called: the traceback of the call of a library's function around this region, whose own lines say nothing to a user.
    """

    called: Any = None
    is_final = False

    def __init__(self, ops: Mapping[Path, Op], differentiable: bool = True):
        self.ops = ops
        self.differentiable = differentiable

    def region(self) -> Interpreter:
        """The interpreter of a control-flow op's body."""
        return type(self)(self.ops, self.differentiable)

    def derived(self) -> Interpreter:
        """The interpreter of the primal body of a function with custom derivatives, which is traced separately but part of this region."""
        return self.region()

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an op without bodies."""
        return apply(eqn, operands)

    def dead(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an unread equation: of no meaning, except where a derivative reads them. Its operands may be parts of arrays."""
        return apply(eqn, operands) if self.differentiable else [unread(variable) for variable in eqn.outvars]

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an op with bodies."""
        return self.rebound(op, eqn, operands)

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The results of a user's shard_map, whose body is opaque unless a subclass opens it."""
        return apply(eqn, operands)

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a body of ``op`` as its equations read them; called on the body's interpreter."""
        return arguments

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> Sequence[Any]:
        """The results of a body of ``op`` as it returns them; called on the body's interpreter."""
        return results

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], path: Path = ()) -> list[Any]:
        """The results of a jaxpr whose equations' paths begin with ``path``."""
        arrays: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Var | Literal) -> Any:
            return atom.val if isinstance(atom, Literal) else arrays[atom]

        for position, eqn in enumerate(jaxpr.eqns):
            names = current_name_stack() + eqn.source_info.name_stack
            if self.is_final and (found := self.ops.get((*path, position))) is not None:
                names = names.extend(f"{OP_SCOPE}{found.index}")
            with user_context(self.called or eqn.source_info.traceback, name_stack=names), self.context(eqn):
                results = self._equation(eqn, [read(atom) for atom in eqn.invars], (*path, position))
            arrays.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def remade(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """A whole program as it is evaluated."""
        return jax.make_jaxpr(lambda *arguments: self.run(jaxpr.jaxpr, jaxpr.consts, arguments))(*types_of(jaxpr.jaxpr.invars))

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        if has_custom_rule(eqn.primitive.name) and self.differentiable:
            return self._custom(eqn, operands, path)
        if is_inlined(eqn.primitive.name):
            return self._inlined(eqn, operands, path)
        if eqn.primitive.name == MAPPED:
            return self.mapped(eqn, operands, path)
        op = self.found(eqn, path)
        if op is None:
            return self.dead(eqn, operands)
        return self.control_flow(op, eqn, operands) if op.bodies else self.op(op, eqn, operands)

    def _inlined(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        (body,), around = subjaxprs(eqn), self.called
        if around is None and calls_library(eqn):
            self.called = eqn.source_info.traceback
        try:
            return self.run(*opened(body), operands, (*path, 0))
        finally:
            self.called = around

    def _custom(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The results of the call, bound again around its interpreted primal body with the same derivative rule."""
        (body,), inner = subjaxprs(eqn), self.derived()

        def function(*arguments: Any) -> Sequence[Any]:
            return inner.run(*opened(body), arguments, (*path, 0))

        new, _ = retraced(eqn.primitive.name, function, types_of(opened(body)[0].invars))
        return bind(eqn, operands, **with_bodies(eqn, [body], [new]))

    def found(self, eqn: JaxprEqn, path: Path) -> Op | None:
        """The op of an equation; None for dead code."""
        return self.ops.get(path)

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """The JAX context of the equation; none where that has a mesh, which may be the trace's placeholder."""
        return eqn.ctx.manager if eqn.ctx.cur_abstract_mesh.empty else nullcontext()

    def types(self, op: Op, number: int, body: Jaxpr) -> list[jax.ShapeDtypeStruct]:
        """The types of the arguments for which a body of ``op`` is traced."""
        return types_of(body.invars)

    def rebound(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The results of a control-flow op, bound again around its interpreted bodies."""

        def evaluate(number: int, body: ClosedJaxpr | Jaxpr):
            def function(*arguments: Any) -> Sequence[Any]:
                inner = self.region()
                inner.called = self.called
                entered = inner.enter(op, number, arguments)
                return inner.leave(op, number, inner.run(*opened(body), entered, (*op.path, number)))

            return function

        bodies = subjaxprs(eqn)
        if eqn.primitive.name == "custom_linear_solve" and not self.differentiable:  # bound, it has results of its right-hand sides' types
            read = called_with(eqn.primitive.name, eqn.params, len(operands))
            return list(evaluate(0, bodies[0])(*(operands[k] for k in read)))
        new, constants = [], []
        for number, body in enumerate(bodies):
            jaxpr, leading = retraced(eqn.primitive.name, evaluate(number, body), self.types(op, number, opened(body)[0]))
            new.append(jaxpr)
            constants += leading
        return bind(eqn, [*constants, *operands], **with_bodies(eqn, bodies, new))


class AsItIs(Interpreter):
    """Evaluates a program unchanged, the user's sharding constraints included; subclasses evaluate the top level otherwise."""

    def __init__(self, ops: Mapping[Path, Op]):
        super().__init__(ops, differentiable=False)

    def region(self) -> Interpreter:
        return AsItIs(self.ops)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return bind(eqn, operands)


def ops_by_path(graph: Graph) -> dict[Path, Op]:
    """The graph's ops by the paths of their equations."""
    return {op.path: op for op in graph.walk()}


def unread(variable: Any) -> Any:
    """An array that stands for one that nothing reads."""
    if jax.numpy.issubdtype(variable.aval.dtype, jax.dtypes.extended):
        return jax.random.split(jax.random.key(0, impl=variable.aval.dtype.name[4:-1]), variable.aval.shape)
    return np.zeros(variable.aval.shape, variable.aval.dtype)


def apply(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The equation's results; the user's sharding constraints are identities, since they are part of the assignment."""
    return list(operands) if eqn.primitive.name == "sharding_constraint" else bind(eqn, operands)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The results of the equation's primitive on these operands, with some parameters replaced."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params({**eqn.params, **replaced}))
    return list(results) if eqn.primitive.multiple_results else [results]


def bind_unplaced(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The equation's results on one device: it has no sharding parameters, which are those of whole arrays, nor partitions itself."""
    if eqn.primitive.name == "custom_partitioning":
        return jaxpr_as_fun(eqn.params["call"])(*operands)
    written = {name: None for name in ("sharding", "out_sharding") if eqn.params.get(name) is not None}
    return bind(eqn, operands, **written, **replaced)


def bind_part(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The equation's results on parts of its operands: without its sharding parameters, unless placing arrays is all that it does."""
    return (bind if is_placement(eqn.primitive.name) else bind_unplaced)(eqn, operands, **replaced)


def product(eqn: JaxprEqn, operands: Sequence[Any], swapped: bool) -> Any:
    """The result of a ``dot_general``; ``swapped``: with its operands, and so their dimensions of the result, in swapped order."""
    if not swapped:
        return bind(eqn, operands)[0]
    (contracted, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    replaced = {"dimension_numbers": (contracted[::-1], batch[::-1])}
    if isinstance(precision, tuple):
        replaced["precision"] = precision[::-1]
    return bind(eqn, operands[::-1], **replaced)[0]


def retraced(
    primitive: str, function: Callable[..., Sequence[Any]], types: Sequence[jax.ShapeDtypeStruct]
) -> tuple[ClosedJaxpr | Jaxpr, list[Any]]:
    """The jaxpr of ``function`` for these types, as a body of ``primitive``, and the constants to pass it as leading arguments.

    A checkpoint's body has no constants, so it gets them as arguments; other bodies keep theirs.
    """
    new = jax.make_jaxpr(function)(*types)
    if primitive != "remat2":
        return new, []
    n = len(new.consts)
    if n:
        passed_in = jax.make_jaxpr(lambda *given: jaxpr_as_fun(ClosedJaxpr(new.jaxpr, given[:n]))(*given[n:]))
        return passed_in(*new.consts, *types).jaxpr, list(new.consts)
    return new.jaxpr, []


def manual_context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The JAX context of an equation, with the mesh of the manual computation."""
    context = eqn.ctx
    usual = context.threefry_partitionable == jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if usual and context.compute_type is None and not context.xla_metadata:
        return nullcontext()
    stack, mesh = ExitStack(), jax.sharding.get_abstract_mesh()
    stack.enter_context(context.manager)
    stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    return stack
