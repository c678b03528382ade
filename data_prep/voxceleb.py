"""VoxCeleb1 and VoxCeleb2, from scratch or from archives already on disk, to lists ready for training."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "voxceleb")
