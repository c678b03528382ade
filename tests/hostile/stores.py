"""Commands on a store of people, killed or with a failing disk at each call that changes the
disk.
"""

import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from runs import Starter, fault, printed
from targets import tiny_net

from speakernet.checkpoint import write_checkpoint
from speakernet.inference.people import PeopleStore
from speakernet.inference.store_file import HALF_WORD
from speakernet.models.model_file import model_file_contents

KILL = -signal.SIGKILL
"""Instead of an error number: the process is killed there."""
GONE = "Purgatoria"
SAME_ENDS = ("nobody is called", "belongs to a different model")
"""Printed by a command whose work an earlier attempt has done."""
NEW = "enroll into a new store"


class StoreFaults:
    """Makes a command on a small store with a backup fail at one call, and checks the outcome of
    the next attempt.
    """

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self.folder = starter.folder / "stores"
        whole = self.folder / "whole"
        whole.mkdir(parents=True)
        for seed, name in enumerate(("model.pt", "new.pt")):
            net = tiny_net()
            with torch.no_grad():
                net.embedding.weight.add_(seed)
            write_checkpoint(self.folder / name, model_file_contents(net, loss_normalizes=True))
        # Embedding again with the same model makes a backup with everybody.
        enrolled = [
            self._enroll(whole, name, speaker) for speaker, name in enumerate(("Ada", GONE, "Bo"))
        ]
        for arguments in (*enrolled, self._reembed(whole, "model.pt")):
            assert starter.command(arguments, whole) == 0, printed(whole)
        self.places: list[tuple[str, int]] = []
        self.after: dict[str, Any] = {}
        for command in self.commands(whole):
            folder = self.folder / "straight"
            count = self.folder / "count.txt"
            order = fault(folder / "people.db", 0, 0, False, count)
            assert starter.command(self._begin(folder, command), folder, fault=order) == 0, printed(
                folder
            )
            self.places += [(command, call) for call in range(1, int(count.read_text()) + 1)]
            self.after[command] = _state(folder)

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """Name -> words of each command for the store in a folder."""
        store = str(folder / "people.db")
        return {
            "enroll": self._enroll(folder, "Cy", 6),
            NEW: self._enroll(folder, "Cy", 6),
            "remove": ["people", "remove", GONE, "--store", store],
            "purge": ["people", "purge", GONE, "--store", store],
            "reembed": self._reembed(folder, "new.pt"),
        }

    def case(self, command: str, call: int, error: int, *, lasts: bool = False) -> list[str]:
        """Run the command with the fault, then without; returns problems in words."""
        folder = self.folder / "failing"
        arguments = self._begin(folder, command)
        begun = _state(folder)
        expected = self.after[command]
        order = fault(folder / "people.db", call, error, lasts)
        status = self.starter.command(arguments, folder, fault=order)
        words = printed(folder)
        problems = []
        if "Traceback" in words or status not in ((KILL,) if error == KILL else (0, 1)):
            problems.append(f"status {status}: {words}")
        if status == 1 and "people.db" not in words:
            problems.append(f"does not name the store: {words}")
        found = _state(folder)
        if found not in ((expected,) if status == 0 else (begun, expected)):
            problems.append(f"half done: {found}")
        (folder / "output.txt").unlink()
        if self.starter.command(arguments, folder) and not any(
            end in printed(folder) for end in SAME_ENDS
        ):
            problems.append(f"does not resume: {printed(folder)}")
        if _state(folder) != expected:
            problems.append("the next try does not come to what it should")
        if command == "purge" and any(
            GONE.encode() in one.read_bytes() for one in folder.glob("people.db*")
        ):
            problems.append(f"{GONE} can still be read")
        left = [
            one.name
            for one in folder.iterdir()
            if one.name.endswith("-journal") or HALF_WORD in one.name
        ]
        return problems + [f"{name} was left behind" for name in left]

    def _begin(self, folder: Path, command: str) -> list[str]:
        """Copy the store; returns the words of a command on it."""
        shutil.rmtree(folder, ignore_errors=True)
        kept = ("output.txt", "people.db*") if command == NEW else ("output.txt",)
        shutil.copytree(self.folder / "whole", folder, ignore=shutil.ignore_patterns(*kept))
        return self.commands(folder)[command]

    def _enroll(self, folder: Path, name: str, speaker: int) -> list[str]:
        audio = [
            str(self.starter.folder / "corpus" / f"spk{speaker}" / f"{row}.wav") for row in range(2)
        ]
        return [
            "enroll",
            name,
            *audio,
            "--model",
            str(self.folder / "model.pt"),
            "--store",
            str(folder / "people.db"),
        ]

    def _reembed(self, folder: Path, model: str) -> list[str]:
        return [
            "people",
            "reembed",
            "--model",
            str(self.folder / model),
            "--store",
            str(folder / "people.db"),
        ]


def _state(folder: Path) -> Any:
    """The people in the store of a folder and its model; None if it is empty or does not exist
    yet.
    """
    path = folder / "people.db"
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with PeopleStore(path) as store:
            kept = sorted(
                (one.name, one.source, one.embedding.tobytes().hex()) for one in store.recordings()
            )
            return (store.facts["fingerprint"], kept) if kept else None
    except ValueError as error:
        # Its creation was undone, or it has no model yet.
        if "an empty file" in str(error) or "names no model" in str(error):
            return None
        raise
