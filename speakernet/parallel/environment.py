"""Which of several processes this one is, by the variables of whoever started it: torchrun (or its like), or SLURM."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, NUM_PORTS = 20_000, 40_000
"""Of a SLURM job that names none: derived from its number, so that all its tasks come to the same."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by srun for what it starts; a batch script itself, which is one process, has none."""


@dataclass(frozen=True)
class Place:
    """One process among several, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """As torchrun sets them, which is what torch reads."""
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, self.address, self.port)
        return dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))


def find_place(environment: Mapping[str, str], port: int) -> Place | None:
    """This process's place; None where it was started alone.

    Args:
        environment: its variables; torchrun's come before SLURM's, under which it may run.
        port: where SLURM's tasks are to meet; 0: derived from the number of the job.

    Raises:
        ValueError: some variables without the others, or numbers that make no sense.
    """
    if "RANK" not in environment and int(environment.get(SLURM_TASKS) or 0) > 1:
        return _place_in_slurm(environment, port)
    world_size = _number(environment, "WORLD_SIZE") if environment.get("WORLD_SIZE", "").strip() else 1
    if world_size <= 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, by "
            "which the processes would find each other; start them with torchrun --nproc_per_node=N, or unset "
            "WORLD_SIZE for one process"
        )
    rank = _number(environment, "RANK")
    if rank >= world_size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE {world_size}; expected a rank from 0 to {world_size - 1}")
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world_size
    master_port = _number(environment, "MASTER_PORT")
    return Place(rank, world_size, local_rank, local_size, environment["MASTER_ADDR"], master_port)


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process is alone or rank 0, which shows what is being done."""
    is_task = int(environment.get(SLURM_TASKS) or 0) > 1
    return (environment.get("RANK") or (environment.get("SLURM_PROCID") if is_task else "") or "0").strip() == "0"


def is_first_here(environment: Mapping[str, str]) -> bool:
    """Whether this process is alone on its machine or the first of those there, which speaks for all of them."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in environment:
            return environment[name].strip() in ("", "0")
    return True


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes.

    >>> first_host("gpu[07-09,12],login")
    'gpu07'
    >>> first_host("one,two")
    'one'
    """
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None  # every part of the pattern may be empty
    return "".join(part or "" for part in found.groups())


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Of SLURM's "4(x2),3" the number of a node, counted from 0.

    >>> [tasks_of_node("4(x2),3", node) for node in range(3)]
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}; expected counts such as 4(x2),3")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


def _place_in_slurm(environment: Mapping[str, str], port: int) -> Place:
    local_size = tasks_of_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE", environment[SLURM_TASKS]),
        _number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0,
    )
    derived = FIRST_PORT + int(environment.get("SLURM_JOB_ID") or 0) % NUM_PORTS
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, SLURM_TASKS),
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=local_size,
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=int(environment.get("MASTER_PORT") or port or derived),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    found = environment.get(name, "").strip()
    if not found.isdigit():
        raise ValueError(f"{name} is {found!r}; expected a whole number, as torchrun or srun sets it")
    return int(found)
