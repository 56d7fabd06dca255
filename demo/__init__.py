"""The program of `make demo`."""
