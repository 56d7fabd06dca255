"""Timed benchmarks of this machine: `make bench`."""
