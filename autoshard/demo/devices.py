"""Virtual CPU devices, to run multi-device programs on any machine."""

from __future__ import annotations

import os
from contextlib import suppress

import jax

from autoshard.errors import AutoshardError


def virtual_devices(n: int) -> None:
    """Makes JAX use ``n`` virtual CPU devices.

    Raises:
        AutoshardError: JAX has started with other devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # JAX has started, possibly with these devices
        if jax.default_backend() != "cpu" or jax.device_count() < n:
            raise AutoshardError(
                f"virtual devices must be requested before JAX starts: {n} CPU devices are needed, and JAX is already running with "
                f"{jax.device_count()} of {jax.default_backend()}. Start a new process, or request them before anything else runs."
            ) from None


def spare_cpu_devices(n: int) -> None:
    """Makes JAX have ``n`` CPU devices, whichever it uses, unless it has started or is told a number otherwise."""
    if jax.config.jax_num_cpu_devices < 0 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # pyright: ignore[reportAttributeAccessIssue]
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", n)
