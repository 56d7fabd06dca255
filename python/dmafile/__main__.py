"""The `dmafile` command."""

import signal
import sys

from . import _dmafile


def main() -> int:
    """Runs the command with the arguments of this process; returns its exit status."""
    # The interpreter's handler would only set a flag. A signal that is ignored stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # For `dmafile bench`. -P: import nothing from the current folder.
    again = [sys.executable, "-P", "-m", "dmafile"]
    return _dmafile.main(["dmafile", *sys.argv[1:]], again)


if __name__ == "__main__":
    sys.exit(main())
