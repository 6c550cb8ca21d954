"""Fingerprints of programs: equal for equal programs, independent of names, source lines and process."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.ir import Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.trace.build import Program
from autoshard.trace.constraints import mesh_shape
from autoshard.trace.structure import opened, subjaxprs

# Parameters that are names, or the mesh of the trace.
_NAMES = frozenset({"name", "context_mesh", "name_and_src_info", "debug_info", "debug"})
# Parameters that only Explicit axes give a meaning, and that JAX 0.10 sets under Auto axes, too; those of a user's constraint aside.
_OF_EXPLICIT_AXES = ("sharding", "out_sharding")


def fingerprint(program: Program, aliases: Sequence[tuple[int, int]]) -> str:
    """The fingerprint of a program, 32 hexadecimal digits; linear in the program's size."""
    canonical = Canonical()
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update("|".join(map(str, parts)).encode())
        digest.update(b"\n")

    def add_ops(ops: Iterable[Op]) -> None:
        for op in ops:
            params = () if not op.params else canonical.params(op.params, without_bodies=bool(op.bodies))
            add(op.primitive, op.operands, op.results, params)
            for body in op.bodies:
                add("body", body.inputs, body.outputs, body.trips)
                add_ops(body.ops)
                add("end")

    add("values", *((value.shape, value.dtype) for value in program.values))
    add_ops(program.ops)
    add("literals", *((number, canonical.of(written)) for number, written in zip(program.literals, program.written, strict=True)))
    add("ends", program.constants, program.arguments, program.results, tuple(aliases))
    return digest.hexdigest()[:32]


class Canonical:
    """Parameters as text that is equal in every process, without addresses."""

    def params(self, params: Any, without_bodies: bool = False) -> str:
        if "ft_in" in params:  # as JAX before 0.11 writes it
            counts = {"num_consts": num_consts(params), "num_carry": num_carry(params)}
            params = {name: value for name, value in params.items() if name not in ("ft_in", "ft_out")} | counts
        kept = sorted(name for name in params if name not in _NAMES and not (without_bodies and _is_jaxpr(params[name])))
        unused = () if "unconstrained_dims" in params else _OF_EXPLICIT_AXES
        return ",".join(f"{name}={self.of(None if name in unused else params[name])}" for name in kept)

    def of(self, x: Any) -> str:
        if x is None or (isinstance(x, bool | int | float | complex | str | bytes) and not isinstance(x, enum.Enum)):
            return repr(x) if type(x) in _PLAIN else f"{type(x).__name__}:{x!s}"
        if isinstance(x, PartitionSpec):
            return str(tuple(str(entry) if entry is PartitionSpec.UNCONSTRAINED else entry for entry in x))
        if isinstance(x, NamedSharding):
            mesh = x.mesh if isinstance(x.mesh, Mesh) else None  # an abstract one is that in force, or a placeholder
            return f"sharding({self.of(x.spec)} on {self.of(mesh)})"
        if isinstance(x, Mesh | AbstractMesh):
            return str(mesh_shape(x))
        if isinstance(x, tuple | list):
            name = type(x).__name__ if hasattr(x, "_fields") else ""
            return f"{name}({','.join(map(self.of, x))})"
        if isinstance(x, dict):
            return "{" + ",".join(sorted(f"{self.of(k)}:{self.of(v)}" for k, v in x.items())) + "}"
        if isinstance(x, set | frozenset):
            return "{" + ",".join(sorted(map(self.of, x))) + "}"
        if isinstance(x, enum.Enum):
            return f"{type(x).__name__}.{x.name}"
        if isinstance(x, Jaxpr | ClosedJaxpr):
            return self._jaxpr(x)
        return self._other(x)

    def _other(self, x: Any) -> str:
        if isinstance(x, jax.Array) and not x.shape and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            x = np.asarray(x)  # a scalar by value, larger captured arrays by shape
        if isinstance(x, np.ndarray | np.generic):
            return f"array({x.dtype},{x.shape},{hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()})"
        if isinstance(x, np.dtype) or type(x).__name__.endswith("DType"):
            return str(x)
        if isinstance(x, type) or callable(x):
            return getattr(x, "__qualname__", type(x).__qualname__)
        if dataclasses.is_dataclass(x):
            fields = [f for f in dataclasses.fields(x) if f.compare and f.name not in _NAMES]
            return f"{type(x).__name__}({','.join(f'{f.name}={self.of(getattr(x, f.name))}' for f in fields)})"
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{x.dtype}{tuple(x.shape)}"  # an array, or an abstract one
        return type(x).__qualname__

    def _jaxpr(self, x: Jaxpr | ClosedJaxpr) -> str:
        """The structure of a jaxpr, variables numbered in order of appearance."""
        jaxpr, consts = opened(x)
        numbers: dict[Any, int] = {}

        def atom(a: Any) -> str:
            return f"={self.of(a.val)}" if isinstance(a, Literal) else f"{numbers.setdefault(a, len(numbers))}:{a.aval.str_short()}"

        lines = [f"in({','.join(map(atom, (*jaxpr.constvars, *jaxpr.invars)))})", *(self.of(const) for const in consts)]
        for eqn in jaxpr.eqns:
            call = f"{eqn.primitive.name}({','.join(map(atom, eqn.invars))})({','.join(map(atom, eqn.outvars))})"
            bodies = ",".join(map(self._jaxpr, subjaxprs(eqn)))
            lines.append(f"{call}[{self.params(eqn.params, without_bodies=bool(bodies))}]{{{bodies}}}")
        lines.append(f"out({','.join(map(atom, jaxpr.outvars))})")
        return ";".join(lines)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _is_jaxpr(x: Any) -> bool:
    """Whether a parameter is a jaxpr, or a tuple of jaxprs."""
    return isinstance(x, Jaxpr | ClosedJaxpr) or (isinstance(x, tuple) and bool(x) and all(map(_is_jaxpr, x)))
