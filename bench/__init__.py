"""Measures loads, in seconds and in instructions; README.md tells what, and how to add to it."""
