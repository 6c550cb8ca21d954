"""The process in which XLA's auto-sharding runs: ``python -m benchmarks.xla_auto_child FOLDER``, for `benchmarks.xla_auto` alone.

It runs in an environment of its own with the last JAX that has auto-sharding, so it imports nothing of autoshard. It reads ``request.json``
from the folder; XLA leaves the compiled program there as it dumps it, this process ``failure`` where there is none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import pjit, topologies

from benchmarks import models


def main(folder: Path) -> None:
    """Compiles the program that the folder's request names, its shardings left to XLA's auto-sharding."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = json.loads((folder / "request.json").read_text())
    jax.config.update("jax_use_shardy_partitioner", False)  # with Shardy, AUTO replicates everything without a word (jax 0.10.0)
    try:
        compile_auto(request)
    except Exception as error:  # whatever it is, the parent says it
        (folder / "failure").write_text(str(error))
        return


def compile_auto(request: dict[str, Any]) -> jax.stages.Compiled:
    """The program that a request names, with donated state, its inputs' and outputs' shardings found by XLA."""
    function, args = models.MODELS[request["model"]].make(**request["sizes"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"], **request["options"])
    devices = np.empty(len(topology.devices), object)
    devices[:] = sorted(topology.devices, key=_coordinates)
    names, sizes = zip(*request["mesh"], strict=True)
    mesh = jax.sharding.Mesh(devices.reshape(sizes), names)
    auto = pjit.AUTO(mesh)  # pyright: ignore[reportAttributeAccessIssue]  # gone from jax 0.10.1
    return jax.jit(function, in_shardings=auto, out_shardings=auto, donate_argnums=0).lower(*args).compile()


def _coordinates(device: Any) -> tuple[int, ...]:
    """Where a device is in its slice, outermost dimension first, as `autoshard.lower.jax_mesh` orders them."""
    return (getattr(device, "slice_index", None) or 0, *device.coords, device.core_on_chip)


def _end_with_parent() -> None:
    """Waits for the pipe to close, which the parent does only after it ended this process, or by dying."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
