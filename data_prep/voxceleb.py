"""VoxCeleb1 and VoxCeleb2, from scratch or from archives already on disk, to lists ready for training."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "voxceleb", *sys.argv[1:]]))
