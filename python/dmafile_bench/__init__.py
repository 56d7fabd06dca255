"""The tables by which people choose how to load: `dmafile bench`, docs/measuring.md.

Its modules import nothing of dmafile, whose command they measure from outside.
"""
