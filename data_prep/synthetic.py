"""A corpus of synthetic speakers with lists, trials, noises and room responses."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "synthetic")
