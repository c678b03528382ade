"""Your own recordings, ready for training: lists, split, trials, a configuration, and the next
command.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "folder")
