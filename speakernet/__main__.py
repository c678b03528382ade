"""`python -m speakernet COMMAND` is the same as `speakernet COMMAND`."""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script()
