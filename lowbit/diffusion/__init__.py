"""diffusers: ``from_pretrained`` reads and makes quantized models, ``save_pretrained`` writes them."""
