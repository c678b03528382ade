"""VoxCeleb1 and VoxCeleb2, from nothing or from archives already on disk, to lists that train."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "voxceleb", *sys.argv[1:]]))
