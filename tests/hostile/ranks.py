"""Runs of two processes, one of which is killed repeatedly; `torchrun --max-restarts` restarts
both.
"""

import random
import shutil
import subprocess
import time

from tests.outcomes import differences, outcome_of
from tests.started import Started, torchrun
from tests.tiny_recipe import EVERY_STAGE, write_recipe

SHARE_OF_RUN = 0.6
"""Kills come within this share of a run's length, because a resumed run is shorter."""


def recipe_of(folder, corpus):
    """The recipe of a run into `folder`/run, with every stage."""
    return write_recipe(folder / "run.yaml", corpus, folder / "run", EVERY_STAGE)


class RankKills:
    """Kills one of two processes at moments drawn from a seed, and compares the outcomes."""

    def __init__(self, folder, corpus, seed):
        self.folder = folder
        self.corpus = corpus
        self.draw = random.Random(seed)
        self.num_kills = 0
        begin = time.monotonic()
        with self.start("straight") as started:
            status = started.end()
            assert status == 0, started.output[-3000:]
        self.seconds = time.monotonic() - begin
        self.expected = outcome_of(folder / "straight" / "run")

    def start(self, name, *options):
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        recipe = recipe_of(folder, self.corpus)
        command = [*torchrun(*options), "trainSpeakerNet.py", "--config", str(recipe)]
        return Started(command, folder / "output.txt")

    def round(self, most_kills):
        """One run with up to `most_kills` kills, if it lasts long enough; returns problems in
        words.
        """
        with self.start("killed", f"--max-restarts={most_kills}") as started:
            killed = self._kill(started, most_kills)
            status = started.end()
            output = started.output
        self.num_kills += len(killed)
        if status:
            return [f"status {status}: {output[-3000:]}"]
        problems = differences(outcome_of(self.folder / "killed" / "run"), self.expected)
        for rank, process in killed:
            report = f"failed (exitcode: -9) local_rank: {rank} (pid: {process})"
            if report not in output:
                problems.append(f"nothing says {report!r}")
        return problems

    def _kill(self, started, most_kills):
        """Kills processes; returns rank and process of each."""
        killed = []
        before = set()
        for _ in range(most_kills):
            ranks = {}
            while started.process.poll() is None and len(ranks) < 2:
                time.sleep(0.1)
                living = started.ranks().items()
                ranks = {rank: process for rank, process in living if process.pid not in before}
            try:
                started.process.wait(self.draw.uniform(0, SHARE_OF_RUN * self.seconds))
                break
            except subprocess.TimeoutExpired:
                before |= {process.pid for process in ranks.values()}
            rank = self.draw.choice(sorted(ranks))
            if ranks[rank].is_running():
                ranks[rank].kill()
                killed.append((rank, ranks[rank].pid))
        return killed
