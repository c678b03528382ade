"""Which channel of a recording is used: a mixture of two people is neither of them, and opposite
phases cancel out.

Channels are compared in a few windows over the recording. A silent or copied channel changes
nothing but the level, so that the mean of all channels is used, as everywhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from speakernet.data.audio import AudioError, AudioInfo, audio_of_array, crop_of_file
from speakernet.data.levels import frame_powers

MIX = "mix"
CHECKED_WINDOWS = 20
WINDOW_SECONDS = 3.0
MAX_COMPARED = 8
"""Channels of a microphone array beyond these are not compared."""
DEAD_DB = 30.0
"""A channel this far below the loudest one is an unused input, perhaps with some crosstalk."""
OPPOSITE = -0.8
"""At this correlation, the mean of two equally loud channels is 10 dB below each of them."""
DIFFERENT = 0.2
"""Below this correlation at any lag, the channels hold different sounds: two voices stay below
0.13, and one voice at two microphones of a room above 0.33, even with more reverberation than
direct sound."""
MAX_LAG_SECONDS = 0.02
"""By which sound reaches one microphone later than another: 7 m."""
SPEECH_RANGE_DB = 6.0
"""Between quiet and loud frames of speech; a hiss or hum varies less."""
Reader = Callable[[int, int], np.ndarray]
"""First sample and number of samples -> (samples, channels) float32, at the recording's own
rate."""


@dataclass(frozen=True)
class Chosen:
    """The channel to read, counted from 0, or None for the mean of all; and a warning, empty if all
    is well.
    """

    channel: int | None = None
    warning: str = ""


def checked_channel(requested: Any) -> int | str | None:
    """A channel as users give it: counted from 1, `mix`, or None to choose automatically.

    >>> checked_channel("2"), checked_channel("mix"), checked_channel(None)
    (2, 'mix', None)
    """
    if requested is None or requested == MIX:
        return requested
    text = str(requested)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--channel {text}: expected {MIX}, or a channel counted from 1")
    return int(text)


def choose_of_file(
    file: IO[bytes], info: AudioInfo, name: str, requested: int | str | None = None
) -> Chosen:
    """`choose` for an open file whose header is known."""
    rate = info.sample_rate

    def read(start: int, count: int) -> np.ndarray:
        columns = [
            crop_of_file(file, info, name, start, count, rate, channel=channel)
            for channel in range(min(info.num_channels, MAX_COMPARED))
        ]
        return np.stack(columns, axis=1)

    return choose(read, info.num_samples, info.num_channels, rate, name, requested)


def choose_of_array(
    array: np.ndarray, sample_rate: int, rate: int, requested: int | str | None
) -> Chosen:
    """`choose` for an array, (samples, channels), compared at this rate."""
    num_channels = array.shape[1]
    # Every channel is checked and scaled as a recording of its own.
    columns = [
        audio_of_array(array[:, [channel]], sample_rate, rate)
        for channel in range(min(num_channels, MAX_COMPARED))
    ]
    compared = np.stack(columns, axis=1)

    def read(start: int, count: int) -> np.ndarray:
        return compared[start : start + count]

    return choose(read, len(compared), num_channels, rate, "the array", requested)


def choose(
    read: Reader,
    num_samples: int,
    num_channels: int,
    sample_rate: int,
    name: str,
    requested: int | str | None = None,
) -> Chosen:
    """Choose the channel of a recording.

    Args:
        read: reads a stretch of it.
        num_samples: its length.
        num_channels: if there is only one, it is used whatever is requested.
        sample_rate: its own rate in Hz.
        name: for messages.
        requested: a channel counted from 1, `mix`, or None: the mean, but one channel if they
            cancel each other.

    Raises:
        AudioError: the recording does not have the requested channel.
    """
    if num_channels == 1 or requested == MIX:
        return Chosen()
    if isinstance(requested, int):
        if requested > num_channels:
            raise AudioError(
                f"{name}: --channel {requested}, but the recording has {num_channels} channels"
            )
        return Chosen(requested - 1)
    # A minute in total is compared, spread over the recording: at its beginning one of two people
    # may not have spoken yet, and decoding all of it again takes long.
    width = min(num_samples, round(WINDOW_SECONDS * sample_rate))
    num_windows = min(CHECKED_WINDOWS, num_samples // width)
    starts = np.linspace(0, num_samples - width, num_windows).astype(int)
    return compare([read(start, width) for start in np.unique(starts).tolist()], sample_rate)


def compare(windows: list[np.ndarray], sample_rate: int) -> Chosen:
    """Choose by windows of all channels, (samples, channels) each."""
    # Each channel is compared with the loudest one. Three things may be wrong: they cancel each
    # other, so that the mean is near silence; they are unrelated at any lag, as two telephones on
    # one line are; or one of them is dead, which harms nothing. A lag must be searched, because one
    # voice at two microphones of a room is uncorrelated at lag zero.
    windows = [window - window.mean(axis=0) for window in windows]
    powers = np.sum([np.square(window).sum(axis=0) for window in windows], axis=0)
    loudest = int(powers.argmax())
    is_live = powers > powers[loudest] * 10 ** (-DEAD_DB / 10)
    for channel in np.flatnonzero(is_live).tolist():
        if channel == loudest:
            continue
        # Over all windows together, so that silent windows have no weight.
        scale = np.sqrt(powers[loudest] * powers[channel])
        correlation = (
            sum(float(window[:, loudest] @ window[:, channel]) for window in windows) / scale
        )
        if correlation <= OPPOSITE:
            return Chosen(
                loudest,
                f"opposite phases: the channels cancel each other, so only channel {loudest + 1} "
                "is used",
            )
        # Two channels of different hum also differ but hold no people, so both must vary in level
        # as speech does. The search over lags is the slowest check and comes last.
        if abs(correlation) < DIFFERENT and _have_speech(windows, [loudest, channel], sample_rate):
            lagged = sum(
                _highest_product(window[:, loudest], window[:, channel], sample_rate)
                for window in windows
            )
            if lagged / scale < DIFFERENT:
                first, second = sorted((loudest + 1, channel + 1))
                return Chosen(
                    None,
                    f"channels differ: each of {first} and {second} may be a different person, and "
                    f"their mixture is neither; choose one with --channel {first} or {second}, or "
                    f"keep the mixture with --channel {MIX}",
                )
    return Chosen()


def _have_speech(windows: list[np.ndarray], channels: list[int], sample_rate: int) -> bool:
    """Whether the level of each channel varies as that of speech does."""
    for channel in channels:
        powers = np.concatenate(
            [frame_powers(window[:, channel], sample_rate) for window in windows]
        )
        # Percentiles rather than extremes, because a single click may be louder than all speech.
        quiet, loud = np.percentile(10 * np.log10(powers + 1e-12), [10, 95])
        if loud - quiet < SPEECH_RANGE_DB:
            return False
    return True


def _highest_product(first: np.ndarray, second: np.ndarray, sample_rate: int) -> float:
    """The largest absolute inner product of two signals over all lags up to `MAX_LAG_SECONDS`."""
    lags = round(MAX_LAG_SECONDS * sample_rate)
    # Padded to twice the length, or the end of one signal would be compared with the start of the
    # other.
    size = 2 * len(first)
    products = np.fft.irfft(np.fft.rfft(first, size) * np.conj(np.fft.rfft(second, size)), size)
    return float(np.abs(np.concatenate([products[: lags + 1], products[-lags:]])).max())
