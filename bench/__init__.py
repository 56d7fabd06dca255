"""Measures loads in seconds and in instructions; README.md describes the benchmarks."""
