"""The layer and the pass of each operation, from what JAX records of its origin: named scopes, or the function that it is written in.

No model is known here. Where there are scopes (of `jax.named_scope`, Linen's modules, and those of NNX and Equinox, which tracing names), a
layer is the path of those, with a star for every number, so that the layers of a stack are one. Elsewhere it is the function of the line.
"""

from __future__ import annotations

import re
from functools import lru_cache

from autoshard.ir import Op, Origin
from autoshard.ir.naming import is_backward

_WRAPPED = re.compile(r"^[A-Za-z_]\w*\((.*)\)$")  # jvp(...), transpose(...), vmap(...)
_SCOPE = re.compile(r"[A-Za-z_][\w\-.*\[\]']*")
_DIGITS = re.compile(r"\d+")
_STRUCTURE = frozenset(
    ("while", "body", "cond", "scan", "checkpoint", "remat", "rematted_computation", "closed_call", "pjit", "jit")
    + ("custom_jvp", "custom_vjp", "shard_map")
)
"""Names that JAX itself puts on the stack."""

PASSES = ("forward", "backward", "recomputed", "update")


def pass_of(op: Op) -> str:
    """The pass of a train step that an op belongs to, one of `PASSES`; what is not differentiated is the update, or all there is."""
    if "rematted_computation" in op.origin.name_stack:
        return "recomputed"
    if is_backward(op):
        return "backward"
    return "forward" if "jvp(" in op.origin.name_stack else "update"


def layer_of(origin: Origin) -> str:
    """The layer of an origin.

    >>> layer_of(Origin("gpt.py", 7, "Block.__call__", "transpose(jvp(GPT))/h_3/attn"))
    'GPT/h_*/attn'
    >>> layer_of(Origin("gpt.py", 7, "moe.<locals>.experts_of", "jvp(bsd,dchk->bschk)"))
    'experts_of'
    """
    return _layer(origin.name_stack, origin.function)


@lru_cache(maxsize=4096)
def _layer(name_stack: str, function: str) -> str:
    scopes = _once([scope for part in _parts(name_stack) if (scope := _scope(part))])
    if scopes:
        return "/".join(_DIGITS.sub("*", scope) for scope in scopes)
    named = [part for part in function.split(".") if part not in ("<locals>", "<lambda>")]
    methods = named[-2:] if len(named) > 1 and f"{named[-2]}.<locals>" not in function else named[-1:]
    return ".".join(methods) or "unknown source"


def _once(scopes: list[str]) -> list[str]:
    """The scopes without a path that is on the stack twice, one after the other, as that of a block which is computed again.

    >>> _once(["M", "h_0", "M", "h_0", "attn"])
    ['M', 'h_0', 'attn']
    """
    for n in range(len(scopes) // 2, 0, -1):
        if scopes[:n] == scopes[n : 2 * n]:
            return _once(scopes[n:])
    return scopes


def _parts(name_stack: str) -> list[str]:
    """The components of a name stack, split at slashes outside parentheses."""
    found, depth = [""], 0
    for letter in name_stack:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [inner for part in found for inner in _unwrapped(part)]


def _unwrapped(part: str) -> list[str]:
    """What a transformation is of: ``transpose(jvp(GPT/h_0))`` is of ``GPT`` and ``h_0``."""
    match = _WRAPPED.match(part)
    return _parts(match[1]) if match else [part]


def _scope(part: str) -> str:
    """A scope of the program's own; empty for JAX's, and for the equations of `einsum`."""
    is_own = _SCOPE.fullmatch(part) and part not in _STRUCTURE and not part.startswith("branch_")
    return part if is_own else ""


def line_of(origin: Origin) -> str:
    """The source line of an origin, its folders cut: ``gpt.py:41 (loss)``."""
    if not origin.file:
        return "unknown source"
    function = origin.function.replace(".<locals>", "")
    return f"{origin.place} ({function})" if function else origin.place
