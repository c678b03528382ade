"""From an uploaded file to a recording that can be embedded; everything stays in memory."""

from speakernet.data.audio import AudioError, info_of_bytes, read_audio_bytes
from speakernet.inference.quality import Quality, inspect_recording, refuse_unusable
from speakernet.inference.recordings import Recording
from speakernet.inference.serve.errors import ApiError
from speakernet.inference.serve.limits import Limits
from speakernet.inference.verifier import SpeakerVerifier

MIN_SPEECH_SECONDS = 1.0
"""Less speech in a clip is warned about."""
MOST_SAMPLES_A_SECOND = 2 * 48_000
"""Over all channels: what a clip of the longest duration may unpack to."""

Upload = tuple[str, bytes]
"""A file's name and its content."""


def decode_clip(upload: Upload, verifier: SpeakerVerifier, limits: Limits) -> tuple[Recording, Quality]:
    """Decode a file that was sent: WAV, FLAC, Ogg or MP3.

    Args:
        upload: the file.
        verifier: whose network will hear it.
        limits: its longest duration.

    Raises:
        ApiError: no audio, too long, too short, or silent.
    """
    name, content = upload
    try:
        info = info_of_bytes(content, name)
        most = limits.clip_seconds * MOST_SAMPLES_A_SECOND
        if info.seconds > limits.clip_seconds or info.num_samples * info.num_channels > most:
            raise ApiError(
                413, "too_long", f"{name}: {info.seconds:.0f} s; this server takes up to {limits.clip_seconds:g} s"
            )
        waveform = read_audio_bytes(content, name, sample_rate=verifier.sample_rate)
        # Refuses what is shorter than the network can hear.
        recording = verifier.open(Recording(name, verifier.sample_rate, len(waveform), samples=waveform))
        quality = inspect_recording(recording, min_speech_seconds=MIN_SPEECH_SECONDS)
        if not quality.is_silent:
            refuse_unusable(quality)
    except AudioError as error:
        message = str(error)
        raise ApiError(422, "bad_audio", message if message.startswith(name) else f"{name}: {message}") from error
    if quality.is_silent:
        raise ApiError(422, "silent", f"{name}: silent; is the microphone on?")
    return recording, quality
