"""A small language model with its own invented encyclopedia and exam, so that quantization loss can be measured anywhere."""
