"""Quantizing from folder to folder, with one block of the model in memory at a time."""

from .job import quantize_folder

__all__ = ["quantize_folder"]
