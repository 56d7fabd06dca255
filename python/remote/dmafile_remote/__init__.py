"""The compiled half of `dmafile` with what opens URLs.

`import dmafile` uses it if it is installed.
"""
