"""What runs: the operators, the registry of kernels, and the kernels."""
