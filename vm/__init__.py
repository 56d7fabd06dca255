"""Boots other kernels in QEMU: `vm/run`, its modules, its tests and their fixtures."""
