"""VCTK 0.92: download, unpack, make a speaker-disjoint split and balanced trials."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "vctk")
