"""Common Voice, one language: make a speaker-disjoint split and balanced trials."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "common_voice")
