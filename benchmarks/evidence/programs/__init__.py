"""The small programs, by what they show: kernels, collectives, memory and stacks of loops of XLA:TPU, and XLA:GPU."""

from benchmarks.evidence.program import PROGRAMS, Program
from benchmarks.evidence.programs import collectives, gpu, kernels, memory, stacks, updates

__all__ = ["PROGRAMS", "Program", "collectives", "gpu", "kernels", "memory", "stacks", "updates"]
