"""Eight virtual CPU devices for every test, set before JAX starts; hypothesis keeps no deadlines, since machines are busy."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

settings.register_profile("autoshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("autoshard")


@pytest.fixture(scope="session", autouse=True)
def _machine_code_is_made_quickly():
    """LLVM optimises nothing: programs run a few times, and compiling them takes most of a session.

    XLA's own passes are as always, so compiled modules have the same collectives, and numbers are those of the same HLO.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
