"""The primitives of JAX itself, as a process knows them that has imported all of its modules and no program's.

python tests/jax_registry.py    # prints them as JSON
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import jax._src  # JAX's registry of primitives has no public home
import jax.extend.core.primitives
from jax._src.interpreters import ad, batching, mlir

# Modules of JAX's that are for its own tests, or need packages that it does not.
NOT_IMPORTED = ("test", "mosaic_gpu", "debugger.web", "serialization")


@dataclass(frozen=True, slots=True)
class Registry:
    """Names of primitives: those that are lowered for some platform, and all that are lowered, batched, differentiated or published."""

    lowered: frozenset[str]
    known: frozenset[str]


@cache
def registry() -> Registry:
    """JAX's primitives, asked of a process of its own: what other tests import and define is none of JAX's."""
    found = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True
    )
    names = json.loads(found.stdout)
    return Registry(frozenset(names["lowered"]), frozenset(names["known"]))


def _all() -> dict[str, list[str]]:
    for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
        if not any(word in module.name for word in NOT_IMPORTED):
            importlib.import_module(module.name)
    tables = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
    lowered = {each.name for table in tables for each in table}
    published = (getattr(jax.extend.core.primitives, name) for name in dir(jax.extend.core.primitives))
    others = (*published, *batching.fancy_primitive_batchers, *ad.primitive_jvps)
    known = lowered | {each.name for each in others if isinstance(each, jax.extend.core.Primitive)}
    return {"lowered": sorted(lowered), "known": sorted(known)}


if __name__ == "__main__":
    print(json.dumps(_all()))
