"""The small programs, by what they show: kernels, collectives and memory of XLA:TPU, and XLA:GPU."""

from benchmarks.evidence.program import PROGRAMS, Program
from benchmarks.evidence.programs import collectives, gpu, kernels, memory, updates

__all__ = ["PROGRAMS", "Program", "collectives", "gpu", "kernels", "memory", "updates"]
