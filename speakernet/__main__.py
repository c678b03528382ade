"""`python -m speakernet COMMAND` is the same as `speakernet COMMAND`."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main())
