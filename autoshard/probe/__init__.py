"""Measurement of this process's devices, and the fit of a cluster's constants to the measured times."""

from autoshard.probe.calibration import Calibration, calibrate
from autoshard.probe.fit import fit_cluster
