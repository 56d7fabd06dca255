"""By the clock: tables of this machine, `make bench`."""
