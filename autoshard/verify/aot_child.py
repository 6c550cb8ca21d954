"""The compiler process of `autoshard.verify.aot`: ``python -m autoshard.verify.aot_child FOLDER``.

It reads ``module`` and ``request`` from the folder, and writes ``compiled.json`` or ``failure`` next to XLA's dumps.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jaxlib import xla_client
from jaxlib.mlir import ir

from autoshard.ir import Mesh
from autoshard.lower import jax_mesh
from autoshard.verify.aot import Options
from autoshard.verify.topology import Topology


def main(folder: Path) -> None:
    """Compiles the module of the folder for the requested devices."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    topology, mesh, given = pickle.loads((folder / "request").read_bytes())
    try:
        compiled = _compile(folder / "module", topology, mesh, given)
    except Exception as error:  # the parent reports it
        (folder / "failure").write_text(str(error))
        return
    memory = compiled.get_compiled_memory_stats()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    found = {"hlo": compiled.hlo_modules()[0].to_string(), "peak_bytes": memory.peak_memory_in_bytes, "needed_bytes": held}
    (folder / "compiled.json").write_text(json.dumps(found))


def _compile(module: Path, topology: Topology, mesh: Mesh, given: Options):
    """The executable of a module in MLIR bytecode; `jax.jit` would need the devices, and so the compiler, in the process that lowers."""
    devices = jax_mesh(mesh, _devices(topology, mesh)).devices
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, mesh.size
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices.flat]]))
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    options.env_option_overrides = list(given.items())
    # The context of a module that JAX made has all of JAX's dialects registered.
    with jax.jit(lambda: 0.0).trace().lower(lowering_platforms=(topology.platform,)).compiler_ir("stablehlo").context:  # pyright: ignore
        parsed = ir.Module.parse(module.read_bytes())
        client = devices.flat[0].client
        # XLA:CPU compiles only for devices of this process (jaxlib 0.10.2).
        compile_module = client.compile_and_load if topology.platform == "cpu" else client.compile
        return compile_module(parsed, xla_client.DeviceList(tuple(devices.flat)), options)


def _devices(topology: Topology, mesh: Mesh):
    """The topology's devices; for CPUs as many virtual ones as the mesh has."""
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", mesh.size)
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=topology.platform, topology_name=topology.name, **topology.options).devices


def _end_with_parent(folder: Path) -> None:
    """Ends this process and removes its folder when the pipe closes: a living parent kills this process before it closes the pipe."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
