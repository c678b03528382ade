"""LibriSpeech: download, unpack, lists by its own parts, balanced trials."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "librispeech")
