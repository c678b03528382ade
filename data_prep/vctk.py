"""VCTK 0.92: download, unpack, a speaker-disjoint split, balanced trials."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "vctk")
