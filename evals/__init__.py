"""What a quantized model lost and what it gained."""
