"""Forks commands from one warm process, so that a hundred starts do not import torch a hundred times.

Reads a line of JSON for each from its input: `arguments`, the file `said` for its output, and a `fault` of the disk if
one is to be injected. Answers with the process, and when that has ended with its status.
"""

import ctypes
import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

import speakernet.evaluation.report  # imported late by the run and the commands over stores; here once
import speakernet.training.tensorboard  # noqa: F401
from speakernet.assembly import runs
from speakernet.cli import enroll, main, people, train  # noqa: F401

DROPOUT = 0.2


def with_dropout(build: Callable[[Any], Any], config: Any) -> Any:
    """The network of a run, with a layer that draws from torch's global generator: no published trunk here has one."""
    net = build(config)

    def drop(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.nn.functional.dropout(inputs[0], DROPOUT, training=module.training),)

    net.embedding.register_forward_pre_hook(drop)
    return net


def run(order: dict[str, Any]) -> None:
    """In the fork: the command to its end, with its own files and a session of its own."""
    os.setsid()
    said = os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if fault := order.get("fault"):
        place, count = os.fsencode(fault["folder"]), os.fsencode(fault["count"])
        numbers = (ctypes.c_long(fault["call"]), ctypes.c_int(fault["error"]), ctypes.c_int(fault["lasts"]))
        ctypes.CDLL(os.environ["LD_PRELOAD"]).hostile_arm(place, *numbers, count)
    status = 70
    try:
        status = main(order["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # As at the end of every process: threads that write checkpoints are waited for, workers ended.
        import multiprocessing.util
        import threading

        threading._shutdown()
        multiprocessing.util._exit_function()
        os._exit(status)


def serve() -> None:
    """One command after the other, until the input ends."""
    torch.set_num_threads(1)
    # Here and not above: pytest imports this file too, to look for examples, and would train every test's run with it.
    runs.build_model = functools.partial(with_dropout, runs.build_model)
    # A run collects garbage before and after each evaluation: of what this process has imported there is none.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            run(json.loads(line))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
