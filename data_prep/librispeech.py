"""LibriSpeech: download, unpack, write lists for its own splits and balanced trials."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "librispeech")
