"""Recipes to copy: each file says in a comment when to pick it."""
