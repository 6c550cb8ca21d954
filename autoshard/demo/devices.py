"""Virtual CPU devices, for programs that run on several devices on a machine that has none."""

from __future__ import annotations

import jax

from autoshard.errors import AutoshardError


def virtual_devices(n: int) -> None:
    """Makes JAX use ``n`` virtual CPU devices from here on.

    Raises:
        AutoshardError: JAX has started with other devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # JAX has started; that will do where it has the devices already
        if jax.default_backend() != "cpu" or jax.device_count() < n:
            raise AutoshardError(
                f"virtual devices must be asked for before JAX starts: {n} CPU devices are needed, and JAX is already running with "
                f"{jax.device_count()} of {jax.default_backend()}. Start a new process, or ask for them before anything else runs."
            ) from None
