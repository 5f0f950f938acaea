"""Calibration: data run through a model block by block, so that each layer is rounded with the statistics of its inputs."""
