"""Rules of kernels that users declare."""

from __future__ import annotations

from functools import update_wrapper
from typing import Any

from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.rules.declared import DECLARED, Amount, Declared
from autoshard.rules.declared_functions import on_shards


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
    return update_wrapper(on_shards(target, declared), target)
