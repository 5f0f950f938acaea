"""Calibration: data run through a model block by block, so that each layer is rounded with the statistics of its inputs."""

from .calibrator import Calibrator
from .data import Calibration

__all__ = ["Calibration", "Calibrator"]
