"""Rows for what csrc compiles for cpu."""
