"""Forks commands from one warm process, so torch is imported only once.

Reads a line of JSON per command from standard input: `arguments`, the file `output`, and optionally
a `fault` of the disk. Answers with the process id and, when the process has ended, its status.
"""

import ctypes
import functools
import gc
import json
import os
import signal
import sys

import torch

# imported late by runs and store commands; here once for all forks
import speakernet.evaluation.report
import speakernet.training.tensorboard  # noqa: F401
from speakernet.assembly import runs
from speakernet.cli import enroll, main, people, train  # noqa: F401
from speakernet.data import speech

DROPOUT = 0.2
END_SECONDS = 120
"""A command that takes longer is killed by SIGALRM."""


def with_dropout(build, config):
    """The network of a run, with a dropout on torch's global generator, which no published trunk
    here has.
    """
    net = build(config)

    def drop(module, inputs):
        return (torch.nn.functional.dropout(inputs[0], DROPOUT, training=module.training),)

    net.embedding.register_forward_pre_hook(drop)
    return net


def run(order):
    """Run the command in the fork, with its own files and session."""
    os.setsid()
    signal.alarm(END_SECONDS)
    # silero-vad finds no speech in the crude voices of the tests: take all of each recording.
    speech.default_detector = lambda: speech.ENERGY
    speech.are_speech = lambda levels: levels > -1000
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if fault := order.get("fault"):
        arm = ctypes.CDLL(os.environ["LD_PRELOAD"]).hostile_arm
        integer = ctypes.c_int
        arm.argtypes = [ctypes.c_char_p, ctypes.c_long, integer, integer, ctypes.c_char_p]
        names = (fault["folder"].encode(), fault["count"].encode())
        arm(names[0], fault["call"], fault["error"], fault["lasts"], names[1])
    status = 70
    try:
        status = main(order["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # As when any process ends: wait for threads that write checkpoints, end workers.
        import multiprocessing.util
        import threading

        threading._shutdown()
        multiprocessing.util._exit_function()
        os._exit(status)


def serve():
    """Run commands in turn until the input ends."""
    torch.set_num_threads(1)
    # Not at module level: pytest imports this file for doctests and would change the networks of
    # all tests.
    runs.build_model = functools.partial(with_dropout, runs.build_model)
    # A run collects garbage around each evaluation; this excludes everything imported here.
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
