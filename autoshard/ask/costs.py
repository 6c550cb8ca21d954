"""What single things cost on a cluster, for those who want to look at the cost model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from autoshard.cluster import Cluster
from autoshard.cost.collectives import COLLECTIVES
from autoshard.cost.compute import Roofline
from autoshard.errors import ShardingError
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel


def collective_seconds(
    kind: str,
    nbytes: float | np.ndarray,
    *,
    cluster: Cluster | str | Path,
    mesh: Mapping[str, int] | None = None,
    axes: str | Sequence[str] | None = None,
) -> float | np.ndarray:
    """The seconds that one collective is predicted to take.

    Args:
        kind: ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all`` or ``collective_permute``.
        nbytes: the larger of a device's operand and result; an array of sizes gives an array of seconds.
        cluster: the devices, as a `Cluster` or in its string form.
        mesh: axis sizes by name, outermost first; one axis over all devices unless given.
        axes: the mesh axes that take part together; all of them unless given.

    >>> seconds = collective_seconds("all_reduce", 2**20, cluster="v5e:4x4", mesh={"data": 4, "model": 4}, axes="model")
    >>> 1e-6 < seconds < 1e-3
    True

    Raises:
        ClusterError: the cluster is unknown, or the mesh does not cover it.
        ShardingError: there is no such collective, or no such axis.
    """
    cluster = Cluster.of(cluster)
    given = Mesh.of({"all": cluster.n_devices} if mesh is None else mesh)
    names = given.names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    if kind not in COLLECTIVES:
        raise ShardingError(f"a collective is one of {', '.join(COLLECTIVES)}, got {kind!r}.")
    if not set(names) <= set(given.all_names):
        raise ShardingError(f"a collective runs along axes of the mesh, {given}; got {names}. Use one or more of {given.all_names}.")
    numbers = tuple(given.names.index(name) for name in names if name in given.names)
    return _same_form(nbytes, CostModel(cluster, given).communication.seconds(kind, np.asarray(nbytes, float), numbers))


def matmul_seconds(
    m: float | np.ndarray, n: float | np.ndarray, k: float | np.ndarray, *, cluster: Cluster | str | Path, dtype: str = "bfloat16"
) -> float | np.ndarray:
    """The seconds that one device of the cluster is predicted to take for ``(m, k)`` by ``(k, n)``, operands and result in memory.

    Args:
        m, n, k: sizes; arrays of sizes give an array of seconds.
        cluster: the devices, as a `Cluster` or in its string form.
        dtype: of operands and result.

    >>> matmul_seconds(1000, 1024, 1024, cluster="v5e:1x1") == matmul_seconds(1000, 1024, 1024, cluster="v5e:4x4")
    True
    """
    cluster = Cluster.of(cluster)
    m, n, k = np.broadcast_arrays(*(np.asarray(size, float) for size in (m, n, k)))
    nbytes = (m * k + k * n + m * n) * np.dtype(_numpy_name(dtype)).itemsize
    return _same_form(m, Roofline(cluster.device).dot_seconds(1.0, m, n, k, dtype, nbytes))


def _numpy_name(dtype: str) -> str:
    """A dtype of the same width that numpy has."""
    return "float16" if dtype == "bfloat16" else "uint8" if dtype.startswith("float8") else dtype


def _same_form(like: float | np.ndarray, found: float | np.ndarray) -> float | np.ndarray:
    """A number where a number was asked for."""
    return float(found) if np.ndim(like) == 0 else found
