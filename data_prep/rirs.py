"""RIRS_NOISES (simulated and measured room responses): download, verify, unpack, check, make mono and trim."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "rirs", *sys.argv[1:]]))
