"""Rules of kernels that users declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.rules.declared import DECLARED, Amount, Declared, Tensor


def kernel_rule(target: Any, rule: str, flops: Amount = None, bytes: Amount = None) -> Any:
    """The function with a sharding rule of its own; nothing for a name or a primitive, whose rule holds from then on.

    For kernels that cannot be read: foreign functions, Pallas kernels whose index maps are computed, whole functions. Each device calls the
    kernel on its shards, along the factors that the rule lets through; it is the caller's promise that the results are those of the whole
    (`autoshard.testing.check_kernel_rule`). Derivatives are the caller's too: put `jax.custom_vjp` around it.

    Args:
        target: a function of arrays, which is called with shards; the target name of a `jax.ffi.ffi_call`; or a primitive, whose parameters
            hold for shards as they are.
        rule: the factors of each dimension, ``"([b, h, q, d], [b, h, k, d])->([b, h, q, d]) need_replication={q}"``. A factor that is not
            in every result, or in no operand, is not split. A dimension of several factors names them from major to minor, ``[b, k g]``,
            with sizes in ``{g=4}``. Results of shards along ``reduction={row}`` are added up, as a weight's gradient is over rows.
        flops: floating point operations of a whole call, or a function of the operands' shapes.
        bytes: bytes to and from memory, alike; by default each array once.

    Raises:
        RuleError: the rule is written otherwise, or the target is none of these; in a call, arrays contradict the rule.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> scaled = kernel_rule(lambda x, by: x / jnp.max(x, -1, keepdims=True) * by, "([i, j], [])->([i, j]) need_replication={j}")
    >>> options = {"cluster": "cpu:8", "mesh": {"data": 8}, "pins": {"x": jax.P("data")}, "searcher": "manual"}
    >>> autoshard.search(scaled, jnp.ones((512, 64)), jnp.ones(()), **options).out_specs == jax.P("data", None)
    True
    """
    declared = Declared.parse(rule, flops, bytes)
    if isinstance(target, str | Primitive):
        DECLARED[target if isinstance(target, str) else target.name] = declared
        return None
    if not callable(target):
        raise RuleError(
            f"a kernel's rule is for a function, a foreign function's name or a primitive; got {target!r:.60}. Pass one of these."
        )
    return update_wrapper(_on_shards(target, declared), target)


def _on_shards(target: Callable, declared: Declared) -> Callable:
    """The function with its rule; mapped by `jax.vmap` it has the rule of independent calls."""
    made = custom_partitioning(lambda *args: target(*args))  # which takes no defaults
    made.def_partition(partition=OnShards(target, declared), sharding_rule=partial(_in_jax, declared))
    called = custom_vmap(lambda *args: made(*args))

    @called.def_vmap
    def _(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        axes = tuple(jax.tree.map(lambda on: 0 if on else None, mapped))
        many = _on_shards(jax.vmap(target, in_axes=axes), declared.mapped(size, jax.tree.leaves(mapped)))
        results = many(*args)
        return results, jax.tree.map(lambda _: True, results)

    def checked(*args: Any) -> Any:
        read, written = jax.eval_shape(lambda *x: x, *args), jax.tree.leaves(jax.eval_shape(target, *args))
        names = [f"{name}{jax.tree_util.keystr(path)}" for name, x in _named(target, read) for path, _ in jax.tree.leaves_with_path(x)]
        declared.rule([x.shape for x in jax.tree.leaves(read)], [x.shape for x in written], "float32", names)
        return called(*args)

    return checked


def _named(target: Callable, args: tuple) -> list[tuple[str, Any]]:
    """The arguments with the names of a function's parameters, as far as it has any."""
    try:
        return [*inspect.signature(target).bind(*args).arguments.items()]
    except (TypeError, ValueError):
        return []


@dataclass(frozen=True)
class OnShards:
    """The callback of a function with a declared rule: each device calls the function itself. JAX keeps weak references to it."""

    function: Callable
    declared: Declared

    def __call__(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, Callable, Any, Any]:
        shardings = [jax.tree.map(lambda each: each.sharding, side) for side in (results, operands)]
        return mesh, self.function, *shardings


def _in_jax(declared: Declared, *_: Any) -> tuple[str, dict[str, Any]]:
    """The rule as JAX reads it, with the sizes that it wants."""
    text = " -> ".join(", ".join(map(_words, side)) for side in (declared.operands, declared.results))
    order = dict.fromkeys(name for tensor in (*declared.operands, *declared.results) for dim in tensor for name in dim)
    alone = {dim[0] for tensor in (*declared.operands, *declared.results) for dim in tensor if len(dim) == 1}
    sizes = {name: size for name, size in declared.sizes if name not in alone}
    return text, {"need_replication_factors": tuple(name for name in order if name in declared.whole | declared.summed), **sizes}


def _words(tensor: Tensor) -> str:
    return " ".join(" ".join(dim) if len(dim) == 1 else f"({' '.join(dim)})" for dim in tensor)
