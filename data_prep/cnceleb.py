"""CN-Celeb 1 and 2: download, unpack, join short utterances, write lists and the published
trials.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "cnceleb")
