"""Commands over a store of people that are killed or whose disk fails, at each call that changes the disk."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runs import Starter, fault, printed
from targets import tiny_net

from speakernet.checkpoint import write_checkpoint
from speakernet.inference.people import HALF_WORD, PeopleStore
from speakernet.models.model_file import model_file_contents

KILL = -signal.SIGKILL
"""In the place of an error: the process ends there."""
GONE = "Purgatoria"
SAME_ENDS = ("nobody is called", "is of another model")
"""What a command says that finds its work done by an earlier try."""


class StoreFaults:
    """Lets a command over a small store with a backup fail at one call, and looks at what the next try comes to."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self.folder = starter.folder / "stores"
        shutil.rmtree(self.folder, ignore_errors=True)
        whole = self.folder / "whole"
        whole.mkdir(parents=True)
        for seed, name in enumerate(("model.pt", "new.pt")):
            net = tiny_net()
            with torch.no_grad():
                net.embedding.weight.add_(seed)
            write_checkpoint(self.folder / name, model_file_contents(net, loss_normalizes=True))
        for speaker, name in enumerate(("Ada", GONE, "Bo")):
            assert self._run(whole, self._enroll(whole, name, speaker)) == 0, printed(whole)
        # Of the same model: a backup with everybody lies beside it.
        assert self._run(whole, self._reembed(whole, "model.pt")) == 0, printed(whole)
        self.before = _state(whole)
        self.calls: dict[str, int] = {}
        self.after: dict[str, Any] = {}
        for command in self.commands(whole):
            folder, count = self.folder / "straight", self.folder / "count.txt"
            arguments = self._begin(folder, command)
            # Anew: its last number is the only one that stays.
            assert self._run(folder, arguments, fault=fault(folder / "people.db", 0, 0, False, count)) == 0, printed(
                folder
            )
            self.calls[command], self.after[command] = int(count.read_text()), _state(folder)

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """Name of each command, and its words for the store in a folder."""
        store = str(folder / "people.db")
        return {
            "enroll": self._enroll(folder, "Cy", 6),
            "enroll into a new store": self._enroll(folder, "Cy", 6),
            "remove": ["people", "remove", GONE, "--store", store],
            "purge": ["people", "purge", GONE, "--store", store],
            "reembed": self._reembed(folder, "new.pt"),
        }

    def cases(self, every: int = 1) -> Iterator[tuple[str, int]]:
        """Command and call of each case, or of each so many."""
        places = [(name, call) for name, count in self.calls.items() for call in range(1, count + 1)]
        yield from places[::every]

    def case(self, command: str, call: int, error: int, *, lasts: bool = False) -> list[str]:
        """The command with the fault, then again without; what went wrong, in words."""
        folder = self.folder / "failing"
        arguments = self._begin(folder, command)
        begun = _state(folder)
        status = self._run(folder, arguments, fault=fault(folder / "people.db", call, error, lasts))
        words, problems = (folder / "said.txt").read_text(errors="replace"), []
        if "Traceback" in words or status not in ((KILL,) if error == KILL else (0, 1)):
            problems.append(f"status {status}: {words[-1500:]}")
        if status == 1 and "people.db" not in words:
            problems.append(f"does not name the store: {words[-500:]}")
        found, expected = _state(folder), self.after[command]
        if found not in ((expected,) if status == 0 else (begun, expected)):
            problems.append(f"half done: {found}")
        (folder / "said.txt").unlink()
        status = self._run(folder, arguments)
        if status and not any(end in printed(folder) for end in SAME_ENDS):
            problems.append(f"does not go on: {printed(folder)}")
        if _state(folder) != expected:
            problems.append("the next try does not come to what it should")
        if command == "purge":
            left = [one.name for one in folder.glob("people.db*") if GONE.encode() in one.read_bytes()]
            problems += [f"{name} can still be read in {left}" for name in [GONE] if left]
        left = [one.name for one in folder.iterdir() if one.name.endswith("-journal") or HALF_WORD in one.name]
        problems += [f"{', '.join(left)} was left behind"] if left else []
        return problems

    def _begin(self, folder: Path, command: str) -> list[str]:
        """A copy of the store, and the words of a command over it."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / "whole", folder)
        (folder / "said.txt").unlink()
        if command == "enroll into a new store":
            for one in folder.glob("people.db*"):
                one.unlink()
        return self.commands(folder)[command]

    def _enroll(self, folder: Path, name: str, speaker: int) -> list[str]:
        audio = [str(self.starter.folder / "corpus" / f"spk{speaker}" / f"{row}.wav") for row in range(2)]
        return ["enroll", name, *audio, "--model", str(self.folder / "model.pt"), "--store", str(folder / "people.db")]

    def _reembed(self, folder: Path, model: str) -> list[str]:
        return ["people", "reembed", "--model", str(self.folder / model), "--store", str(folder / "people.db")]

    def _run(self, folder: Path, arguments: list[str], **order: Any) -> int:
        return self.starter.command(arguments, folder, **order)


def _state(folder: Path) -> Any:
    """Who is in the store of a folder, and of which model it is; None where there is none yet."""
    path = folder / "people.db"
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with PeopleStore(path, fingerprint=None, embedding_dim=None) as store:
            kept = sorted((one.name, one.source, one.embedding.tobytes().hex()) for one in store.recordings())
            # One that was made and has nobody in it is as good as none.
            return (store.facts["fingerprint"], kept) if kept else None
    except ValueError as error:
        # Likewise: its making was taken back, or it is of no model yet.
        if "an empty file" in str(error) or "of no model yet" in str(error):
            return None
        raise
