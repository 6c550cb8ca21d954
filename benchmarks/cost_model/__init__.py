"""How near does the cost model come to real compilers and measured machines?

``python -m benchmarks.cost_model [section ...]`` prints every number that is claimed of it, target next to reached. `SECTIONS` names the
modules of this folder that measure one thing each: a section has ``run(quick, progress)`` and returns `Findings`. Sections that hold
something against the TPU or GPU compiler need it (``pip install 'autoshard[tpu,gpu-compiler]'``) but no such device; nothing else needs
more than a CPU.
"""

SECTIONS = ("flops", "collectives", "memory", "gpu", "fits", "ranking", "speed", "nccl", "published")
"""The sections in the order they are printed."""
