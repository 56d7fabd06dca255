"""The `dmafile` command."""

import signal
import sys

from . import _dmafile


def main() -> int:
    """Runs the command with the arguments of this process; returns its exit status."""
    # The interpreter's handler would only note the signal. One that is ignored stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # For `dmafile bench`. With -P nothing is imported from the current folder.
    again = [sys.executable, "-P", "-m", "dmafile"]
    return _dmafile.main(["dmafile", *sys.argv[1:]], again)


if __name__ == "__main__":
    sys.exit(main())
