"""The signals that ask a run to stop: what training answers with a checkpoint, and its workers leave to it."""

import signal

HANGUP = getattr(signal, "SIGHUP", None)
"""What a closed terminal or a lost connection sends; Windows has none."""

STOP_SIGNALS: tuple[signal.Signals, ...] = (
    # Ctrl-C, and what job schedulers, `timeout` and container stops send before they kill.
    *(signal.SIGINT, signal.SIGTERM),
    *((HANGUP,) if HANGUP else ()),
)
