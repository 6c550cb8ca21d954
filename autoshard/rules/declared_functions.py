"""Functions with a rule of their own: each device calls them with its shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning

from autoshard.rules.declared import Declared, Tensor


def on_shards(target: Callable[..., Any], declared: Declared) -> Callable[..., Any]:
    """The function with its rule; mapped by `jax.vmap` it has the rule of independent calls."""
    made = custom_partitioning(lambda *args: target(*args))  # which takes no defaults
    made.def_partition(partition=OnShards(target, declared), sharding_rule=partial(_in_jax, declared))
    called = custom_vmap(lambda *args: made(*args))

    @called.def_vmap
    def _(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        axes = tuple(jax.tree.map(lambda on: 0 if on else None, mapped))
        many = on_shards(jax.vmap(target, in_axes=axes), declared.mapped(size, jax.tree.leaves(mapped)))
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

    function: Callable[..., Any]
    declared: Declared

    def __call__(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
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
