"""VoxCeleb1 and VoxCeleb2, downloaded or from archives on disk: unpack, and write lists ready for
training.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "voxceleb")
