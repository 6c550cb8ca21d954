"""Measures the devices of this process, and fits a cluster's constants to what was measured."""

from autoshard.probe.calibration import Calibration, Sample, calibrate
from autoshard.probe.fit import fit_cluster, fit_line

__all__ = ["Calibration", "Sample", "calibrate", "fit_cluster", "fit_line"]
