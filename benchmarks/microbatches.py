"""Does a step in microbatches compute what the whole batch does, and does what is found for little memory fit when it is compiled?

``python -m benchmarks.microbatches`` runs small train steps of every model in float32, whole and in 2, 4 and 8 microbatches, on one device.
Shown is the largest difference of any result, relative to its largest element, or the line by which a step is refused. Sums over the batch
round otherwise in another order, and those of convolutions over many pixels most: second moments are squares of them. In float64 ``codec``
and ``gan`` agree within 1e-14. ``--peaks`` searches larger steps with half of the memory that the fastest plan in one takes
(``microbatches="fit"``), compiles what is found for a TPU slice, without one, and shows its peak next to the predicted one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

import autoshard
from autoshard.cli.terminal import show
from autoshard.errors import AutoshardError, InfeasibleError, TraceError
from autoshard.ir.rewrites import Microbatches
from autoshard.render import Paragraph, Report, Table, format_bytes
from autoshard.rewrite import applied
from autoshard.trace import trace
from benchmarks.models import Program, dlrm, encoder_decoder, gpt, leaf, llama, lstm, mlp, moe, resnet, unet, vit
from benchmarks.models.step import _train_step
from benchmarks.other_models import graph_network, state_space, windows
from benchmarks.progress import progress_bar
from benchmarks.unseen_models import gan

SUMMARY = "Does a step in microbatches compute what the whole batch does, and does what is found for little memory fit when compiled?"
NUMBERS = (2, 4, 8)
TOLERANCE = 1e-6
CLUSTER, SHARE, CLOSE = "v5e:2x4", 0.5, 0.1
F32 = jnp.float32


def mixer(layers: int = 8, width: int = 512, patches: int = 256, batch: int = 512, dtype: Any = jnp.bfloat16) -> Program:
    """Layers that mix patches and then channels, with dropout by a key that comes with the batch."""

    def mixed(x: jax.Array, up: jax.Array, down: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(x @ up.astype(dtype))
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return jnp.where(kept, hidden / 0.9, 0) @ down.astype(dtype)

    def loss(weights: Any, x: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        for number, p in enumerate(weights["layers"]):
            keys = jax.random.split(jax.random.fold_in(key, number))
            turned = (x - x.mean(-1, keepdims=True)).swapaxes(1, 2)
            x = x + mixed(turned, p["patch_up"], p["patch_down"], keys[0]).swapaxes(1, 2)
            x = x + mixed(x, p["up"], p["down"], keys[1])
        logits = (x.mean(1) @ weights["head"].astype(dtype)).astype(F32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    layer = {"patch_up": leaf(patches, 2 * patches), "patch_down": leaf(2 * patches, patches), "up": leaf(width, 4 * width)}
    layer["down"] = leaf(4 * width, width)
    weights = {"layers": [layer] * layers, "head": leaf(width, 1024)}
    data = leaf(batch, patches, width, dtype=dtype), leaf(batch, dtype=jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    return _train_step(loss, weights, *data, params=F32)


def codec(channels: int = 64, side: int = 128, batch: int = 256, dtype: Any = jnp.bfloat16) -> Program:
    """Convolutions down to a code with noise and up again, and a loss of reconstruction and divergence."""

    def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1, spread: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = kernel.astype(dtype)
        if spread > 1:
            return jax.lax.conv_transpose(x, kernel, (spread, spread), "SAME", dimension_numbers=numbers)
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)

    def loss(weights: Any, images: jax.Array, noise: jax.Array) -> jax.Array:
        x = images
        for kernel in weights["down"]:
            x = jax.nn.silu(convolved(x, kernel, stride=2))
        mean, spread = convolved(x, weights["mean"]), convolved(x, weights["spread"])
        x = mean + jnp.exp(0.5 * spread) * noise
        for kernel in weights["up"]:
            x = jax.nn.silu(convolved(x, kernel, spread=2))
        wrong = (convolved(x, weights["out"]) - images).astype(F32)
        apart = (mean.astype(F32) ** 2 + jnp.exp(spread.astype(F32)) - spread.astype(F32) - 1).sum((1, 2, 3))
        return (wrong**2).sum((1, 2, 3)).mean() + 0.1 * apart.mean()

    sizes = [3, channels, 2 * channels, 4 * channels]
    weights = {
        "down": [leaf(3, 3, a, b) for a, b in pairwise(sizes)],
        "mean": leaf(1, 1, 4 * channels, 16),
        "spread": leaf(1, 1, 4 * channels, 16),
        "up": [leaf(3, 3, 16, 4 * channels), leaf(3, 3, 4 * channels, 2 * channels), leaf(3, 3, 2 * channels, channels)],
        "out": leaf(3, 3, channels, 3),
    }
    data = leaf(batch, side, side, 3, dtype=dtype), leaf(batch, side // 8, side // 8, 16, dtype=dtype)
    return _train_step(loss, weights, *data, params=F32)


_GPT: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "batch": 16, "length": 16, "dtype": F32}
_LLAMA: dict[str, Any] = _GPT | {"kv_heads": 1, "ffn": 64}
SMALL: dict[str, Callable[[], Program]] = {
    "gpt": partial(gpt, **_GPT),
    "gpt_one_hot": partial(gpt, **_GPT, gathers=False),
    "gpt_untied": partial(gpt, **_GPT, tied=False),
    "gpt_remat": partial(gpt, **_GPT, remat=True),
    "gpt_scan": partial(gpt, **_GPT, scan=True),
    "gpt_scan_remat": partial(gpt, **_GPT, scan=True, remat=True),
    "llama": partial(llama, **_LLAMA),
    "llama_scan": partial(llama, **_LLAMA, scan=True),
    "moe": partial(moe, **_GPT, experts=4),
    "moe_sorted": partial(moe, **_GPT, experts=4, sorts=True),
    "moe_scan": partial(moe, **_GPT, experts=4, scan=True),
    "t5": partial(encoder_decoder, **_GPT),
    "vit": partial(vit, layers=2, width=32, heads=2, batch=16, side=32, dtype=F32),
    "mlp": partial(mlp, layers=2, width=16, hidden=32, batch=64, dtype=F32),
    "dlrm": partial(dlrm, tables=3, rows=50, width=16, batch=64, dtype=F32),
    "resnet": partial(resnet, channels=8, classes=16, batch=16, side=32, dtype=F32),
    "resnet_groups": partial(resnet, channels=8, classes=16, batch=16, side=32, groups=4, dtype=F32),
    "unet": partial(unet, channels=8, batch=16, side=16, groups=4, dtype=F32),
    "unet_resize": partial(unet, channels=8, batch=16, side=16, groups=4, resizes=True, dtype=F32),
    "lstm": partial(lstm, width=16, vocabulary=32, batch=16, length=8, dtype=F32),
    "gan": partial(gan, channels=8, noise=8, batch=16, dtype=F32),
    "windows": partial(windows, width=16, heads=2, batch=16, side=14, dtype=F32),
    "state_space": partial(state_space, layers=2, width=16, states=4, batch=16, length=16, dtype=F32),
    "graph_network": partial(graph_network, layers=2, width=16, nodes=64, edges=128, dtype=F32),
    "mixer": partial(mixer, layers=2, width=16, patches=8, batch=16, dtype=F32),
    "codec": partial(codec, channels=8, side=16, batch=16, dtype=F32),
}
LARGE: dict[str, Callable[[], Program]] = {
    "gpt": partial(gpt, 2, batch=64),
    "gpt_remat": partial(gpt, 3, batch=64, remat=True),
    "gpt_scan_remat": partial(gpt, 4, batch=64, scan=True, remat=True),
    "llama": partial(llama, 2, 1024, 8, 4, 2816, 32_768, batch=64, length=1024, remat=False),
    "moe": partial(moe, 2, batch=64),
    "t5": partial(encoder_decoder, 2, batch=64),
    "vit": partial(vit, 4, batch=512),
    "mlp": partial(mlp, 4, 2048, 8192, batch=65_536),
    "unet": partial(unet, batch=256, side=64),
    "resnet_groups": partial(resnet, batch=512, groups=8),
    "mixer": mixer,
    "codec": partial(codec, batch=2048),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A step in so many microbatches: the largest difference of a result, relative to its largest element; or why it is refused."""

    program: str
    n: int
    difference: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is found with half of the memory: the microbatches, peaks in bytes, and seconds of both searches; or why nothing is found."""

    program: str
    n: int
    limit_bytes: float
    predicted_bytes: float
    compiled_bytes: float
    plain_seconds: float
    seconds: float
    refused: str = ""


def filled(kind: jax.ShapeDtypeStruct, key: jax.Array, path: str) -> jax.Array:
    """An array of a type; second moments are not negative."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        return jax.random.key(3)
    if jnp.issubdtype(kind.dtype, jnp.integer):
        return jax.random.randint(key, kind.shape, 0, 8).astype(kind.dtype) if kind.ndim else jnp.zeros((), kind.dtype)
    found = (jax.random.normal(key, kind.shape) * 0.3).astype(kind.dtype)
    return jnp.abs(found) if "nu" in path else found


def compare(name: str) -> list[Compared]:
    """Runs a small step whole and in microbatches."""
    function, args = SMALL[name]()
    traced = trace(function, *args)
    leaves = jax.tree.leaves(args)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    inputs = [filled(*each) for each in zip(leaves, keys, traced.graph.argument_paths, strict=True)]
    expected = [np.asarray(x, np.float64) for x in jax.jit(jaxpr_as_fun(traced.jaxpr))(*inputs)]
    found = []
    for n in NUMBERS:
        try:
            results = jax.jit(jaxpr_as_fun(applied(Microbatches(n), traced).jaxpr))(*inputs)
        except TraceError as error:
            found.append(Compared(name, n, None, str(error)))
            continue
        pairs = zip(expected, (np.asarray(x, np.float64) for x in results), strict=True)
        found.append(Compared(name, n, max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-30)) for a, b in pairs if a.size)))
    return found


def fit(name: str) -> Fitted:
    """Searches a step with half of the memory of its fastest plan, and compiles what is found."""
    function, args = LARGE[name]()
    asked = {"cluster": CLUSTER, "mesh": {"data": 8}, "donate_argnums": 0}
    started = time.process_time()
    plain = autoshard.search(function, *args, **asked, microbatches=None, memory_limit_bytes=1e15)
    plain_seconds, started = time.process_time() - started, time.process_time()
    limit = SHARE * plain.cost.peak_bytes
    try:
        found = autoshard.search(function, *args, **asked, memory_limit_bytes=limit)
    except InfeasibleError as error:
        return Fitted(name, 0, limit, 0.0, 0.0, plain_seconds, time.process_time() - started, str(error))
    seconds = time.process_time() - started
    compiled = autoshard.verify(found, function, *args, target="tpu").actual_peak_bytes or 0.0
    return Fitted(name, found.microbatches, limit, found.cost.peak_bytes, compiled, plain_seconds, seconds)


def report(compared: Sequence[Compared], fitted: Sequence[Fitted]) -> Report:
    """Both tables."""
    rows = tuple((each.program, str(each.n), f"{each.difference or 0.0:.1e}" * (not each.refused), each.refused) for each in compared)
    parts: list[Table | Paragraph] = []
    if compared:
        more = sum(each.difference is not None and each.difference > TOLERANCE for each in compared)
        parts.append(Table(("program", ">microbatches", ">difference", "refused"), rows))
        parts.append(Paragraph(f"{more} differ by more than {TOLERANCE:.0e}."))
    if fitted:
        peaks, times = (">limit", ">predicted peak", ">compiled", ">ratio"), (">search", ">of a plain one's")
        parts.append(Table(("program", ">microbatches", *peaks, *times, "refused"), tuple(map(_row, fitted))))
        found = [each for each in fitted if each.n]
        near = sum(abs(each.compiled_bytes / each.predicted_bytes - 1) <= CLOSE for each in found)
        parts.append(Paragraph(f"{near} of {len(found)} compiled peaks are within {CLOSE:.0%} of the predicted ones."))
    return Report("Steps in microbatches", tuple(parts))


def _row(each: Fitted) -> tuple[str, ...]:
    times = f"{each.seconds:.1f} s", f"{each.seconds / each.plain_seconds:.1f} x"
    if not each.n:
        return each.program, "", format_bytes(each.limit_bytes), "", "", "", *times, each.refused
    peaks = format_bytes(each.limit_bytes), format_bytes(each.predicted_bytes), format_bytes(each.compiled_bytes)
    return each.program, str(each.n), *peaks, f"{each.compiled_bytes / each.predicted_bytes:.3f}", *times, ""


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.microbatches", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=tuple(dict.fromkeys((*SMALL, *LARGE))), help="some programs only")
    parser.add_argument("--peaks", action="store_true", help="compile larger steps for a TPU slice instead, minutes each")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    names = [name for name in (LARGE if options.peaks else SMALL) if not options.programs or name in options.programs]
    compared: list[Compared] = []
    fitted: list[Fitted] = []
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(names))
        try:
            for name in names:
                progress.update(task, description=name)
                if options.peaks:
                    fitted.append(fit(name))
                else:
                    compared += compare(name)
                progress.advance(task)
        except AutoshardError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"interrupted after {len({each.program for each in (*compared, *fitted)})} of {len(names)} programs", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(each) for each in (*compared, *fitted)], indent=1))
    else:
        show(report(compared, fitted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
