"""What a server takes on at once, and for how long."""

from dataclasses import dataclass

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds beyond which a request is answered with an error instead of being worked on."""

    body_bytes: int = 32 * MEBIBYTE
    """Of one request: three minutes of stereo at 48 kHz."""
    waiting_bytes: int = 512 * MEBIBYTE
    """Of all requests that are being worked on."""
    requests: int = 512
    """Worked on or waiting at once."""
    clips: int = 10
    """Recordings in one request."""
    clip_seconds: float = 600.0
    """Of one recording."""
    receive_seconds: float = 30.0
    """In which a request has to arrive."""
    answer_seconds: float = 60.0
    """In which it is answered, or given up."""
    streams: int = 64
    """Live streams at once."""
    stream_idle_seconds: float = 60.0
    """After which a stream that nobody feeds is forgotten."""
