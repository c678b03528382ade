"""The signals that ask a run to stop: what training answers with a checkpoint, and its workers leave to it."""

import signal


class Stopped(Exception):
    """Work was left in the middle because the run was asked to stop; whoever began it does it again another time."""


HANGUP = getattr(signal, "SIGHUP", None)
"""What a closed terminal or a lost connection sends; Windows has none."""

PREEMPTION = getattr(signal, "SIGUSR1", None)
"""What clusters can be told to send some time before they take a machine away (SLURM: --signal=USR1@60)."""

STOP_SIGNALS: tuple[signal.Signals, ...] = (
    # Ctrl-C, and what job schedulers, `timeout` and container stops send before they kill.
    *(signal.SIGINT, signal.SIGTERM),
    *((HANGUP,) if HANGUP else ()),
    *((PREEMPTION,) if PREEMPTION else ()),
)
