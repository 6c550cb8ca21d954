"""Kernels of JAX's own libraries whose bodies do not tell how they can be split: they copy blocks by themselves, or sum in a loop.

Their rules are written here. A call is found by the source of its function, and is replaced by the public function with its rule, which
each device calls with its shards; so it needs the arguments that were no arrays. They are read from what was traced, and hold where the
function, traced again with them, has the same kernel. A call with others, or of another release of JAX, stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from autoshard.rules.avals import aval_of
from autoshard.rules.declared import Declared
from autoshard.rules.declared_functions import on_shards
from autoshard.trace.structure import as_call, opened, types_of

MOST_TRIES = 64  # of arguments that were no arrays; each traces a kernel
_PALLAS = "jax.experimental.pallas.ops."

Try = Callable[..., Any]
_T = TypeVar("_T", bound=Try)


def known_kernel(eqn: JaxprEqn) -> JaxprEqn:
    """A call of the library's function with its rule in place of a call of one of these kernels; another equation itself."""
    name, file = source_of(eqn)
    for module, function, rule_of, tries in _KNOWN:
        if name == function and file.endswith(_PALLAS + module):
            found = same(eqn, tries(eqn, import_module(_PALLAS + module)), eqn.invars)
            return eqn if found is None else as_call(eqn, on_shards(found, rule_of(eqn)), eqn.invars)
    return eqn


def source_of(eqn: JaxprEqn) -> tuple[str, str]:
    """The name of the function that an equation calls, and its file as a dotted path without the extension; empty for other equations."""
    body = eqn.params.get("jaxpr")
    debug = None if body is None else getattr(opened(body)[0], "debug_info", None)
    name, _, place = str(getattr(debug, "func_src_info", "")).partition(" at ")
    return name, place.rpartition(":")[0].replace("\\", "/").removesuffix(".py").replace("/", ".")


def same(eqn: JaxprEqn, tries: Iterator[_T], operands: Sequence[Any]) -> _T | None:
    """The first function that has the kernels of an equation, of such operands."""
    wanted, types = [*map(_text, _kernels(eqn))], types_of(operands)
    for function in itertools.islice(tries, MOST_TRIES):
        try:
            traced = jax.make_jaxpr(function)(*types)
        except Exception:  # of another release, or arguments that do not go together
            continue
        if [_text(kernel) for each in traced.jaxpr.eqns for kernel in _kernels(each)][-len(wanted) :] == wanted:
            return function
    return None


def _kernels(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The kernels that an equation is or calls."""
    if eqn.primitive.name == "pallas_call":
        return [eqn]
    return [kernel for inner in jaxprs_in_params(eqn.params) for each in inner.eqns for kernel in _kernels(each)]


def _text(kernel: JaxprEqn) -> tuple[Any, str]:
    """The grid and the body of a kernel."""
    return kernel.params["grid_mapping"].grid, str(kernel.params["jaxpr"])


def _written(body: Jaxpr) -> Iterator[float]:
    """The numbers that are written in a body."""
    for eqn in body.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Literal) and not np.shape(atom.val):
                yield atom.val.item() if hasattr(atom.val, "item") else atom.val
        for inner in jaxprs_in_params(eqn.params):
            yield from _written(inner)


def _options(**choices: Any) -> Iterator[Mapping[str, Any]]:
    """All combinations, those first that differ from the first in one argument."""
    every = sorted(itertools.product(*(range(len(some)) for some in choices.values())), key=lambda each: sum(n > 0 for n in each))
    for each in every:
        yield {name: some[n] for (name, some), n in zip(choices.items(), each, strict=True)}


# -- attention over pages -----------------------------------------------------------------------------------------------------


def _paged_rule(eqn: JaxprEqn) -> Declared:
    """Examples and key heads are independent; the pages of all examples are read. Work is that of examples whose pages are full."""
    (batch, heads, width), (shared, _, size, _) = (aval_of(eqn.invars[k]).shape for k in (0, 1))
    pages = ", ".join(["[k, page, row, d]"] * 2 if len(eqn.invars) == 5 else ["[k, page, row, d]", "[k, page, row, one]"] * 2)
    text = f"([b, k g, d], {pages}, [b], [b, n])->([b, k g, d]) {{g={heads // shared}}} need_replication={{g, d}}"
    read = batch * aval_of(eqn.invars[-1]).shape[1] * size
    return Declared.parse(text, 4.0 * read * heads * width, 2.0 * read * shared * width * aval_of(eqn.invars[1]).dtype.itemsize)


def _paged(eqn: JaxprEqn, module: Any) -> Iterator[Try]:
    (kernel,) = (each for each in eqn.params["jaxpr"].jaxpr.eqns if each.primitive.name == "pallas_call")
    mapping, scalars = kernel.params["grid_mapping"], len(kernel.params["grid_mapping"].scratch_avals)
    if mapping.grid[0] != 1 or not scalars:  # two cores share a grid axis
        return
    numbers = sorted({x for x in _written(kernel.params["jaxpr"]) if isinstance(x, float)})
    block = mapping.scratch_avals[0].shape[1]
    for some in _options(mask_value=[module.DEFAULT_MASK_VALUE, *numbers], attn_logits_soft_cap=[None, *numbers]):
        options = {"pages_per_compute_block": block, "inline_seq_dim": len(mapping.grid) == 3, **some}

        def function(q: Any, *rest: Any, options: Mapping[str, Any] = options) -> Any:
            if len(rest) == 4:
                return module.paged_attention(q, *rest, **options)
            keys, values = (module.quantization_utils.QuantizedTensor(*rest[k : k + 2]) for k in (0, 2))
            return module.paged_attention(q, keys, values, *rest[4:], **options)

        yield function


def _ragged_rule(eqn: JaxprEqn) -> Declared:
    """Key heads are independent; a page has keys and values in turn. Work is that of sequences whose pages are full."""
    (tokens, heads, width), (_, size, both, _), (_, pages) = (aval_of(eqn.invars[k]).shape for k in (0, 1, 3))
    text = "([t, k g, d], [page, row, k two, d], [s], [s, n], [ends], [one])->([t, k g, d])"
    text += f" {{k={both // 2}, g={heads // (both // 2)}, two=2}} need_replication={{t, g, d}}"
    read = aval_of(eqn.invars[3]).shape[0] * pages * size * both * width * aval_of(eqn.invars[1]).dtype.itemsize
    return Declared.parse(text, 4.0 * tokens * pages * size * heads * width, float(read))


def _ragged(eqn: JaxprEqn, module: Any) -> Iterator[Try]:
    (kernel,) = (each for each in eqn.params["jaxpr"].jaxpr.eqns if each.primitive.name == "pallas_call")
    mapping = kernel.params["grid_mapping"]
    written = set(_written(kernel.params["jaxpr"]))
    numbers = sorted(x for x in written if isinstance(x, float))
    whole = sorted(x for x in written if isinstance(x, int) and not isinstance(x, bool) and x > 1)
    known = {
        "num_queries_per_block": mapping.block_mappings[0].block_shape[0].block_size,
        "num_kv_pages_per_block": mapping.scratch_avals[0].shape[1],
        "vmem_limit_bytes": kernel.params["compiler_params"].vmem_limit_bytes,
    }
    some = {"sm_scale": [1.0, *numbers], "soft_cap": [None, *numbers], "sliding_window": [None, *whole]}
    for each in _options(**some):
        yield partial(module.ragged_paged_attention, **known, **each)


# -- gradients of norms -------------------------------------------------------------------------------------------------------


def _norm_rule(eqn: JaxprEqn) -> Declared:
    """Each row adds to the gradients of scale and bias."""
    rows = ", ".join("[row]" for _ in eqn.invars[4:])
    return Declared.parse(f"([row, w], [w], [w], [row, w], {rows})->([w], [w]) reduction={{row}} need_replication={{w}}")


def _norm(backward: str) -> Callable[[JaxprEqn, Any], Iterator[Try]]:
    def tries(eqn: JaxprEqn, module: Any) -> Iterator[Try]:
        def function(x: Any, scale: Any, bias: Any, to: Any, *saved: Any) -> Any:
            return getattr(module, backward)(None, None, 0.0, "triton", eqn.params["interpret"], (x, scale, bias, *saved), to)[1:]

        yield function

    return tries


_KNOWN = (
    ("tpu.paged_attention.paged_attention_kernel", "paged_attention", _paged_rule, _paged),
    ("tpu.ragged_paged_attention.kernel", "ragged_paged_attention", _ragged_rule, _ragged),
    ("gpu.layer_norm", "ln_backward_dw_db", _norm_rule, _norm("layer_norm_backward")),
    ("gpu.rms_norm", "ln_backward_dw_db", _norm_rule, _norm("rms_norm_backward")),
)
"""Module, function, its rule and the functions that it may be, of each kernel."""
