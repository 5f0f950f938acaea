"""Rows for what csrc compiles for cuda."""
