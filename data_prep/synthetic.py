"""A corpus of synthetic speakers with lists, trials, noise and RIRs."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "synthetic")
