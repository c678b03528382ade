"""Train a model or, with --eval, score a trial list: `python trainSpeakerNet.py --config
exp01.yaml`.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("train")
