"""Commands on a store of people, killed or with a failing disk at each call that changes the
disk.
"""

import shutil
import signal

import torch
from runs import end_of_output, fault

from speakernet.inference.people import PeopleStore
from speakernet.inference.store_file import HALF_WORD
from tests.small_networks import tiny_resnet, write_model

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

    def __init__(self, starter):
        self.starter = starter
        self.folder = starter.folder / "stores"
        whole = self.folder / "whole"
        whole.mkdir(parents=True)
        for seed, name in enumerate(("model.pt", "new.pt")):
            net = tiny_resnet()
            with torch.no_grad():
                net.embedding.weight.add_(seed)
            write_model(self.folder / name, net)
        people = enumerate(("Ada", GONE, "Bo"))
        enrolled = [self._enroll(whole, name, speaker) for speaker, name in people]
        # Embedding again with the same model makes a backup with everybody.
        for arguments in (*enrolled, self._reembed(whole, "model.pt")):
            assert starter.command(arguments, whole) == 0, end_of_output(whole)
        self.places = []
        self.after = {}
        for command in self.commands(whole):
            folder = self.folder / "straight"
            count = self.folder / "count.txt"
            order = fault(folder / "people.db", 0, count=count)
            status = starter.command(self._begin(folder, command), folder, fault=order)
            assert status == 0, end_of_output(folder)
            self.places += [(command, call) for call in range(1, int(count.read_text()) + 1)]
            self.after[command] = _state(folder)

    def commands(self, folder):
        """Name -> words of each command for the store in a folder."""
        store = ["--store", str(folder / "people.db")]
        return {
            "enroll": self._enroll(folder, "Cy", 6),
            NEW: self._enroll(folder, "Cy", 6),
            "remove": ["people", "remove", GONE, *store],
            "purge": ["people", "purge", GONE, *store],
            "reembed": self._reembed(folder, "new.pt"),
        }

    def case(self, command, call, error, *, lasts=False):
        """Run the command with the fault, then without; returns problems in words."""
        folder = self.folder / "failing"
        arguments = self._begin(folder, command)
        before = _state(folder)
        after = self.after[command]
        order = fault(folder / "people.db", call, error, lasts)
        status = self.starter.command(arguments, folder, fault=order)
        output = end_of_output(folder)
        problems = []
        if "Traceback" in output or status not in ((KILL,) if error == KILL else (0, 1)):
            problems.append(f"status {status}: {output}")
        if status == 1 and "people.db" not in output:
            problems.append(f"does not name the store: {output}")
        state = _state(folder)
        if state != after and (status == 0 or state != before):
            problems.append(f"half done: {state}")
        (folder / "output.txt").unlink()
        status = self.starter.command(arguments, folder)
        output = end_of_output(folder)
        if status and not any(end in output for end in SAME_ENDS):
            problems.append(f"does not resume: {output}")
        if _state(folder) != after:
            problems.append("the next try does not come to what it should")
        for path in folder.iterdir():
            if path.name.endswith("-journal") or HALF_WORD in path.name:
                problems.append(f"{path.name} was left behind")
            is_store = path.name.startswith("people.db")
            if command == "purge" and is_store and GONE.encode() in path.read_bytes():
                problems.append(f"{GONE} can still be read in {path.name}")
        return problems

    def _begin(self, folder, command):
        """Copy the store; returns the words of a command on it."""
        shutil.rmtree(folder, ignore_errors=True)
        left_out = ("output.txt", "people.db*" if command == NEW else "")
        shutil.copytree(self.folder / "whole", folder, ignore=shutil.ignore_patterns(*left_out))
        return self.commands(folder)[command]

    def _enroll(self, folder, name, speaker):
        voice = self.starter.folder / "corpus" / f"spk{speaker:02}"
        audio = [str(voice / f"utt{row}.wav") for row in range(2)]
        return ["enroll", name, *audio, *self._model_and_store("model.pt", folder)]

    def _reembed(self, folder, model):
        return ["people", "reembed", *self._model_and_store(model, folder)]

    def _model_and_store(self, model, folder):
        return f"--model {self.folder}/{model} --store {folder}/people.db".split()


def _state(folder):
    """The people in the store of a folder and its model; None if it is empty or does not exist
    yet.
    """
    path = folder / "people.db"
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with PeopleStore(path) as store:
            recordings = sorted(
                (recording.name, recording.source, recording.embedding.tobytes())
                for recording in store.recordings()
            )
            return (store.facts["fingerprint"], recordings) if recordings else None
    except ValueError as error:
        # Its creation was undone, or it has no model yet.
        if "an empty file" in str(error) or "names no model" in str(error):
            return None
        raise
