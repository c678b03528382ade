"""Make a corpus of synthetic speakers with lists, noises and room responses: `python data_prep/synthetic.py --help`.

A thin edge: `speakernet.corpora.synthetic` does the work. A run that was stopped goes on where it was.
"""

import argparse
import json
import sys
import time

from speakernet.corpora.synthetic import CorpusError, make_corpus


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, make the corpus, say what was made; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Make a deterministic corpus of synthetic speakers, with trials, noises and room responses.",
        epilog="Example: data_prep/synthetic.py --speakers 1000 --utterances 20 --save_path data/synthetic_large",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--save_path", default="data/synthetic_large", help="folder of the corpus")
    parser.add_argument("--speakers", type=int, default=1000, help="speakers to train on")
    parser.add_argument("--utterances", type=int, default=20, help="utterances of each, about 3.5 s long")
    parser.add_argument("--trial_speakers", type=int, default=40, help="other speakers, for the trials")
    parser.add_argument("--trial_utterances", type=int, default=10, help="utterances of each trial speaker")
    parser.add_argument("--session_utterances", type=int, default=2, help="utterances that share room and microphone")
    parser.add_argument("--noises", type=int, default=200, help="clips of 5 s for augmentation: noise, music, speech")
    parser.add_argument("--rooms", type=int, default=150, help="room impulse responses for augmentation")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other speakers")
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core when left out")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        paths = make_corpus(
            options.save_path,
            num_speakers=options.speakers,
            utterances_per_speaker=options.utterances,
            num_trial_speakers=options.trial_speakers,
            trial_utterances_per_speaker=options.trial_utterances,
            utterances_per_session=options.session_utterances,
            num_noises=options.noises,
            num_rooms=options.rooms,
            seed=options.seed,
            num_workers=options.workers,
        )
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    made = json.loads((paths.train_list.parent / "complete.json").read_text(encoding="utf-8"))
    print(f"{made['files']} files ({made['seconds'] / 3600:.2f} h of speech) in {options.save_path}, {seconds:.1f} s")
    print(
        "train on it:\n"
        "  python trainSpeakerNet.py --config exp01.yaml --data.synthetic_corpus '' --save_path exps/synthetic"
        f" \\\n  --train_list {paths.train_list} --train_path {paths.train_path}"
        f" --test_list {paths.test_list} --test_path {paths.test_path}"
        f" \\\n  --musan_path {paths.noise_path} --rir_path {paths.rir_path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
