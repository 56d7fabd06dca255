"""Benchmarks in instructions, counted in QEMU."""
