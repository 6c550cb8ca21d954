"""Scopes of operations by the module that computes them, where modules are among the arguments: ``blocks[*].att``.

Flax NNX and Equinox name no scopes, but the methods of their modules are on the call stack of each equation. The module of a method is the
one of its class below the module whose method called it. Where there are several, such as the two linear layers of a block, the block is
taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard.ir.naming import starred
from autoshard.primitives import is_inlined
from autoshard.trace.origin import calls_library
from autoshard.trace.structure import opened, subjaxprs

MOST = 20_000  # objects of the arguments that are looked at
OTHERS = (type, FunctionType, ModuleType, jax.sharding.Mesh)  # objects with attributes that are no modules of a model

Paths = Mapping[str, frozenset[str]]
"""By the names of classes, as their methods' have them, the paths of modules; numbers in paths are stars."""


def module_paths(args: Sequence[Any]) -> Paths:
    """The paths of the modules among the arguments, those of an argument itself being empty.

    >>> from types import SimpleNamespace as Model
    >>> sorted(module_paths([Model(layers=[Model(), Model()])])["SimpleNamespace"])
    ['', 'layers[*]']
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path, module in _modules(args):
        for each in type(module).__mro__[:-1]:
            found[each.__qualname__].add(starred(path))
    return {name: frozenset(paths) for name, paths in found.items()}


def _modules(args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Objects with attributes, and their paths, each once."""
    left, seen = [("", x) for x in reversed(args)], set()
    while left and len(seen) < MOST:
        path, x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, list | tuple):
            children = [(f"{path}[{k}]", child) for k, child in enumerate(x)]
        elif isinstance(x, dict):
            children = [(f"{path}[{key!r}]", child) for key, child in x.items()]
        elif isinstance(x, OTHERS) or hasattr(x, "shape") or callable(getattr(x, "__wrapped__", None)):
            continue
        elif (attributes := getattr(x, "__dict__", None)) is not None:
            yield path, x
            attributes = {_index(name): child for name, child in attributes.items() if not str(name).startswith("_")}
            children = [(f"{path}{'' if name[0] == '[' or not path else '.'}{name}", child) for name, child in attributes.items()]
        else:
            continue
        left.extend(reversed(children))


def _index(name: str) -> str:
    """An attribute's name; a list of modules has numbers for these."""
    return f"[{name}]" if name.isdecimal() else name


def scoped(closed: ClosedJaxpr, args: Sequence[Any]) -> ClosedJaxpr:
    """The program, each equation under the scope of the module that computes it; the same object where arguments have no modules."""
    paths = module_paths(args)
    if not any(path for each in paths.values() for path in each):
        return closed
    return ClosedJaxpr(_Scopes(paths).jaxpr(closed.jaxpr), closed.consts)


class _Scopes:
    def __init__(self, paths: Paths):
        self._paths = paths
        self._found: dict[Any, str] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns = [self._equation(eqn) for eqn in jaxpr.eqns]
        return jaxpr.replace(eqns=eqns) if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        if subjaxprs(eqn) and not (is_inlined(eqn.primitive.name) and calls_library(eqn)):
            return eqn.replace(params={name: self._param(param) for name, param in eqn.params.items()})
        source = eqn.source_info
        scope = self._scope(source.traceback)
        if not scope:
            return eqn
        return eqn.replace(source_info=source.replace(name_stack=source.name_stack.extend(scope)))

    def _param(self, param: Any) -> Any:
        """A parameter with the bodies among it under scopes."""
        if isinstance(param, tuple):
            return tuple(map(self._param, param))
        if not isinstance(param, ClosedJaxpr | Jaxpr):
            return param
        jaxpr, consts = opened(param)
        new = self.jaxpr(jaxpr)
        return param if new is jaxpr else ClosedJaxpr(new, consts) if isinstance(param, ClosedJaxpr) else new

    def _scope(self, trace: Any) -> str:
        if trace is None:
            return ""
        found = self._found.get(trace)
        if found is None:
            codes, _ = trace.raw_frames()
            found = self._found[trace] = self._path([self._owner(code.co_qualname) for code in reversed(codes)])
        return found

    def _owner(self, function: str) -> str:
        """The class whose method a function is, or is written in; empty where it is no module's."""
        while function and function not in self._paths:
            function = function.rpartition(".")[0]
        return function

    def _path(self, owners: Sequence[str]) -> str:
        """The path of the innermost module whose methods are called, by the classes of the called methods, outermost first."""
        here, started = "", False
        for owner in owners:
            paths = self._paths.get(owner)
            if paths is None or (started and here in paths):
                continue
            below = [path for path in paths if not here or path.startswith((f"{here}.", f"{here}["))]
            least = min((len(_steps(path)) for path in below), default=0)
            nearest = [path for path in below if len(_steps(path)) == least]
            if len(nearest) == 1:
                here, started = nearest[0], True
        return here


def _steps(path: str) -> list[str]:
    return path.replace("[", ".[").split(".")
