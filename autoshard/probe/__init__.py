"""Measures the devices of this process, and fits a cluster's constants to what was measured."""

from autoshard.probe.fit import fit_line

__all__ = ["fit_line"]
