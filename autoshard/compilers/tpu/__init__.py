"""XLA:TPU: how arrays are tiled, where they are copied, what is computed again, and what of it a device holds."""

from autoshard.compilers.tpu.compiler import XlaTpu
