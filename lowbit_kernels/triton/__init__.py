"""Triton kernels: any GPU that Triton targets, and its interpreter."""
