"""Boots other kernels in QEMU: `vm/run`, what it is made of, and what tests of it need."""
