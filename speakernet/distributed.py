"""The rank of this process, how it ends, and collectives that do nothing in one process.

torch.distributed is looked up, not imported: a process group runs only if it has been imported
(`speakernet.parallel.group` starts and ends it), and a mistyped command fails without waiting for
torch.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

FIRST_PORT = 20_000
NUM_PORTS = 40_000
"""Range of ports for SLURM jobs that do not set one: derived from the job number, so that all tasks
agree."""
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by srun for the tasks it starts; a batch script, which is a single process, does not have
it."""
MAX_NAMED = 5


@dataclass
class Work:
    """The progress of this process, so that the log can say which rank hangs, and where."""

    count: int = 0
    name: str = "the start"
    reports: bool | None = None
    """Whether this rank prints the error that ends it, for the others too; None: the ranks were not
    connected."""

    def at(self, name: str) -> None:
        """Record the piece of work that starts now."""
        self.count = self.count + 1
        self.name = name


work = Work()
"""The progress of this process."""


class Mail:
    """Values that the ranks leave for each other at any moment, without a collective; a process
    alone has nobody to write to.
    """

    def write(self, key: str, value: str) -> None:
        """Store a value for the other ranks."""

    def read(self, key: str) -> str:
        """A value stored by some rank; empty if there is none."""
        return ""


mail = Mail()
"""The mail of this process; that of several processes is `speakernet.parallel.group.Heartbeat`."""


class CommandEnd(BaseException):
    """An exception that sets the exit status of this process."""

    exit_status = 1


def is_distributed() -> bool:
    """Whether a group of more than one process is running."""
    return _group() is not None


def rank() -> int:
    """This process's rank, 0 if alone."""
    group = _group()
    return int(group.get_rank()) if group else 0


def world_size() -> int:
    """Number of processes, 1 if alone."""
    group = _group()
    return int(group.get_world_size()) if group else 1


def local_rank() -> int:
    """This process's number on its machine, 0 if alone."""
    return 0 if here is None else here.local_rank


def local_world_size() -> int:
    """Number of processes on this machine, 1 if alone."""
    return 1 if here is None else here.local_world_size


def is_main() -> bool:
    """Whether this process writes files and shows progress."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    group = _group()
    if group:
        group.barrier()


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    group = _group()
    if not group:
        return value
    # torch replaces the items of a list in place.
    box = [value]
    group.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    group = _group()
    if not group:
        return [value]
    gathered: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(gathered, value)
    return gathered


def from_main(make: Callable[[], T]) -> T:
    """Rank 0's result, or its ValueError or OSError, on every rank (other machines may not see rank
    0's files).
    """
    # The error is sent too: if only rank 0 raised it, the others would wait in their next
    # collective until its timeout.
    result: Any = None
    failure: Exception | None = None
    if is_main():
        try:
            result = make()
        except (ValueError, OSError) as error:
            failure = error
    result, failure = broadcast_object((result, failure))
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def refuse_differences(values: Mapping[str, Any]) -> None:
    """Refuse ranks with different values (plain, by the names that users know); every rank must
    call it.
    """
    # Every rank gets all values and raises the same error, so that none keeps waiting.
    first, *others = gather_objects(dict(values))
    differences = []
    for number, other in enumerate(others, 1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                values_of = f"{first.get(name)!r} on rank 0 and {other.get(name)!r} on rank"
                differences.append(f"{name} is {values_of} {number}")
    if differences:
        # With a wrong configuration file nearly every option differs, so the list is cut.
        if len(differences) > MAX_NAMED:
            differences[MAX_NAMED:] = [f"and {len(differences) - MAX_NAMED} more"]
        raise ValueError(
            f"the {world_size()} ranks were started with different settings: "
            f"{'; '.join(differences)}. Start all of them with the same command, files and versions"
        )


@dataclass(frozen=True)
class Place:
    """One of several processes, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


here: Place | None = None
"""The place of this process while it is one of several."""


def find_place(environment: Mapping[str, str], port: int) -> Place | None:
    """This process's place from the variables of torchrun or SLURM; None if it was started alone.

    `port` is where SLURM's tasks meet; 0 derives it from the job number.
    """
    # torchrun's variables come first: if srun starts one torchrun on each node, SLURM's variables
    # describe torchrun and not its processes.
    if "RANK" not in environment and _is_slurm_task(environment):
        return _place_in_slurm(environment, port)
    # A lone process joins no group, so the other variables may be missing.
    world_size = _number(environment, "WORLD_SIZE", 1)
    if world_size <= 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    number = -1 if missing else _number(environment, "RANK")
    if not 0 <= number < world_size:
        problem = f"these are not set: {', '.join(missing)}" if missing else f"RANK is {number}"
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but {problem}; expected a rank from 0 to "
            f"{world_size - 1} and the master's address and port: start with torchrun "
            "--nproc_per_node=N, or unset WORLD_SIZE for one process"
        )
    return Place(
        rank=number,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", number),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
    )


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process is alone or rank 0, which shows progress."""
    # Read from the environment, because there is no group yet.
    number = environment.get("RANK", "")
    if not number and _is_slurm_task(environment):
        number = environment.get("SLURM_PROCID", "")
    return number.strip() in ("", "0")


def is_first_here(environment: Mapping[str, str]) -> bool:
    """Whether this process is alone on its machine, or the first there."""
    return environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "")).strip() in ("", "0")


def first_host(nodes: str) -> str:
    """The first node in SLURM's list of nodes.

    >>> first_host("gpu[07-09,12],login"), first_host("one,two")
    ('gpu07', 'one')
    """
    # Rank 0 runs on the first node, so nothing after it is read.
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    assert match is not None  # every part of the pattern may be empty
    return "".join(match.groups(default=""))


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """The number of tasks on a node (counted from 0) in SLURM's notation "4(x2),3".

    >>> [tasks_of_node("4(x2),3", node) for node in range(3)]
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}; expected counts such as 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    # If SLURM gives no list, there is one number, that of all tasks.
    return counts[node] if node < len(counts) else counts[-1]


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    return int(environment.get(SLURM_TASKS) or 0) > 1


def _place_in_slurm(environment: Mapping[str, str], port: int) -> Place:
    # The step's variables, not the job's: within a job of eight tasks, `srun -n 2` starts two. All
    # tasks know the job's number, from which they derive the same port.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment[SLURM_TASKS])
    derived = FIRST_PORT + int(environment.get("SLURM_JOB_ID") or 0) % NUM_PORTS
    nodes = (
        environment.get("SLURM_STEP_NODELIST")
        or environment.get("SLURM_JOB_NODELIST")
        or "localhost"
    )
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, SLURM_TASKS),
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=tasks_of_node(tasks, _number(environment, "SLURM_NODEID", 0)),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=int(environment.get("MASTER_PORT") or port or derived),
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r}; expected a whole number, as set by torchrun or srun")
    return int(text)


def _group() -> Any:
    """torch.distributed if a group of several processes is running, else None."""
    # Not cached, because in a notebook groups start and end.
    group = sys.modules.get("torch.distributed")
    is_running = group is not None and group.is_available() and group.is_initialized()
    return group if is_running and group.get_world_size() > 1 else None  # type: ignore[union-attr]
