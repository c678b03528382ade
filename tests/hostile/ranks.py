"""Runs of two processes, one of which is killed repeatedly; `torchrun --max-restarts` restarts
both.
"""

import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.outcomes import differences, outcome_of
from tests.started import Started, torchrun
from tests.tiny_recipe import EVERY_STAGE, write_recipe

SHARE_OF_RUN = 0.6
"""Kills come within this share of a run's length, because a resumed run is shorter."""


def recipe_of(folder: Path, corpus: Path) -> Path:
    """The recipe of a run into `folder`/run, with every stage."""
    return write_recipe(folder / "run.yaml", corpus, folder / "run", EVERY_STAGE)


class RankKills:
    """Kills one of two processes at moments drawn from a seed, and compares the outcomes."""

    def __init__(self, folder: Path, corpus: Path, seed: int) -> None:
        self.folder = folder
        self.corpus = corpus
        self.draw = random.Random(seed)
        self.num_kills = 0
        straight = folder / "straight"
        shutil.rmtree(straight, ignore_errors=True)
        recipe = recipe_of(straight, corpus)
        begin = time.monotonic()
        with Started(
            [*torchrun(), "trainSpeakerNet.py", "--config", str(recipe)], straight / "output.txt"
        ) as started:
            status = started.end()
            assert status == 0, started.output[-3000:]
        self.seconds = time.monotonic() - begin
        self.expected = outcome_of(straight / "run")

    def rounds(self, num_kills: int, most_rounds: int) -> list[str]:
        """Rounds until `num_kills` kills (their number per round is chance); returns problems in
        words.
        """
        wanted = self.num_kills + num_kills
        problems: list[str] = []
        for _ in range(most_rounds):
            problems += self.round(wanted - self.num_kills)
            if self.num_kills == wanted:
                return problems
        return [
            *problems,
            f"{wanted - self.num_kills} of {num_kills} kills have not come in {most_rounds} rounds",
        ]

    def round(self, most_kills: int) -> list[str]:
        """One run with up to `most_kills` kills, if it lasts long enough; returns problems in
        words.
        """
        folder = self.folder / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = recipe_of(folder, self.corpus)
        command = [
            *torchrun(f"--max-restarts={most_kills}"),
            "trainSpeakerNet.py",
            "--config",
            str(recipe),
        ]
        with Started(command, folder / "output.txt") as started:
            killed = self._kill(started, most_kills)
            status = started.end()
            output = started.output
        self.num_kills += len(killed)
        if status:
            return [f"status {status}: {output[-3000:]}"]
        problems = [
            f"{name} differs" for name in differences(outcome_of(folder / "run"), self.expected)
        ]
        names = [
            f"failed (exitcode: -9) local_rank: {rank} (pid: {process})" for rank, process in killed
        ]
        return problems + [f"nothing says {name!r}" for name in names if name not in output]

    def _kill(self, started: Started, most_kills: int) -> list[tuple[int, int]]:
        """Kills processes; returns rank and process of each."""
        killed: list[tuple[int, int]] = []
        before: set[int] = set()
        for _ in range(most_kills):
            ranks: dict[int, Any] = {}
            while started.process.poll() is None and len(ranks) < 2:
                time.sleep(0.1)
                ranks = {
                    rank: one for rank, one in started.ranks().items() if one.pid not in before
                }
            try:
                started.process.wait(self.draw.uniform(0, SHARE_OF_RUN * self.seconds))
                break
            except subprocess.TimeoutExpired:
                pass
            before |= {one.pid for one in ranks.values()}
            rank = self.draw.choice(sorted(ranks))
            if ranks[rank].is_running():
                ranks[rank].kill()
                killed.append((rank, ranks[rank].pid))
        return killed
