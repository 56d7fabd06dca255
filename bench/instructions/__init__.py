"""Benchmarks in instructions, counted in QEMU: `make vm-bench`, `make series-cost`, and others."""
