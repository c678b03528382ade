"""MUSAN (music, speech and noise for augmentation): download, verify, unpack, cut into pieces."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "musan")
