"""Measurement of this process's devices, and the fit of a cluster's constants to the measured times."""

from autoshard.probe.calibration import Calibration, Sample, calibrate
from autoshard.probe.fit import fit_cluster, fit_line

__all__ = ["Calibration", "Sample", "calibrate", "fit_cluster", "fit_line"]
