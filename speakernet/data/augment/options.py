"""The options of augmentation. No torch is imported here."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.options import (
    ByName,
    Component,
    CountOrZero,
    Decibels,
    InputPath,
    Options,
    Several,
    Share,
    options_of,
)

CodecName = Literal["mu-law", "gsm", "opus", "mp3", "vorbis", "amr-nb", "amr-wb", "g722"]
AUGMENTATIONS: dict[str, Component] = {}
"""Augmentations from plugins (`--plugin`), called as `augmentation(waveforms, random)` after all
others."""


class AugmentOptions(Options):
    """How training audio is augmented. Every choice is drawn first and then applied to the whole
    batch.
    """

    speed_factors: Several[Annotated[float, Ge(0.5), Le(2.0)]] = (1.0,)
    """Speeds to draw from; each except 1.0 adds new speakers (0.9, 1.0, 1.1: three times as many
    classes)."""
    real_share: Share | Literal["auto"] = "auto"
    """Share of each batch that stays as recorded; auto: every speed is equally likely."""
    real_epochs: CountOrZero = 0
    """Number of final epochs with recorded voices only; the classes of the other voices stay in the
    head."""
    enabled: bool = True
    """Augment training audio; categories without files are skipped with a warning."""
    style: Literal["ours", "classic"] = "ours"
    """ours: SNR from true power for each source, direct path kept in place; classic: exactly as in
    voxceleb_trainer."""
    noise_path: InputPath = ""
    """Folder with noise in MUSAN's layout (noise/, music/, speech/), or that folder packed; empty:
    no noise."""
    rir_path: InputPath = ""
    """Folder with room impulse responses, or that folder packed; empty: no reverberation."""
    probability: Share = 0.8
    """Share of utterances that get one of the categories below (four fifths in the classic five-way
    choice)."""
    categories: Several[Literal["reverb", "music", "babble", "noise"]] = (
        "reverb",
        "music",
        "babble",
        "noise",
    )
    """Categories to choose from, each equally likely (listed twice: twice as likely)."""
    noise_snr_db: Several[Decibels] = (0.0, 15.0)
    """Lowest and highest signal-to-noise ratio of noise."""
    music_snr_db: Several[Decibels] = (5.0, 15.0)
    """Lowest and highest signal-to-noise ratio of music."""
    babble_snr_db: Several[Decibels] = (13.0, 20.0)
    """Lowest and highest signal-to-noise ratio of babble: of the sum of its talkers, or with
    `style: classic` of each talker (five of them at 16.5 dB have 9.5 dB in all)."""
    babble_speakers: Several[Annotated[int, Ge(1), Le(100)]] = (3, 7)
    """Minimum and maximum number of talkers in babble."""
    volume_db: Several[Decibels] = (0.0, 0.0)
    """Lowest and highest gain."""
    microphone_probability: Share = 0.0
    """Share of utterances filtered as if by a different microphone, with a frequency response drawn
    for each."""
    microphone_db: Annotated[float, Ge(0), Le(30)] = 5.0
    """Standard deviation of that response in dB, smooth between its points. 0: only responses in
    microphone_path."""
    microphone_points: Annotated[int, Ge(2), Le(64)] = 10
    """Number of points of that response, evenly spaced in log frequency from 60 Hz to half the
    sample rate."""
    microphone_path: InputPath = ""
    """Folder with impulse responses of real devices; one is drawn for each of these utterances.
    Empty: none."""
    telephone_probability: Share = 0.0
    """Share of utterances limited to the telephone band (300 to 3400 Hz)."""
    codec_probability: Share = 0.0
    """Share of utterances coded and decoded by one of the codecs below."""
    codecs: Several[CodecName] = ("mu-law",)
    """Codecs to choose from, each equally likely (listed twice: twice as likely), at one of a few
    bit rates. All but mu-law run in the loader; amr-nb, amr-wb and g722 need ffmpeg."""
    components: ByName[str, ByName[str, Any]] = Field(default={})
    """Augmentations from plugins (`--plugin`) with their options, applied after all others: {Name:
    {option: value}}."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where augmentation runs: cpu in the loader, cuda after the transfer; auto: where noise and
    RIRs are."""

    @property
    def changes_channel(self) -> bool:
        """Whether a crop may change without noise and RIRs."""
        names = [name for name in type(self).model_fields if name.endswith("_probability")]
        return any(self.volume_db) or any(getattr(self, name) for name in names)

    @property
    def real_codecs(self) -> list[str]:
        """The codecs that may be drawn, without mu-law, which is computed on any device."""
        if not self.codec_probability:
            return []
        return [name for name in self.codecs if name != "mu-law"]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Invalid plugins, bounds or factors, and options for a recorded voice that is not listed
        or the only one.
        """
        for name, values in self.components.items():
            try:
                options_of(AUGMENTATIONS, name, values, "augmentation")
            except ValueError as error:
                yield "components", f"{name}: {error}"
        for name in (
            "noise_snr_db",
            "music_snr_db",
            "babble_snr_db",
            "volume_db",
            "babble_speakers",
        ):
            bounds = list(getattr(self, name))
            if len(bounds) != 2 or bounds[0] > bounds[1]:
                yield name, f"{bounds}; expected two numbers, the lower first"
        if self.codec_probability and not self.codecs:
            yield "codecs", "[] with codec_probability; expected at least one codec"
        if self.device == "cuda" and self.real_codecs:
            yield "device", f"cuda, but {self.real_codecs[0]} in codecs runs on the CPU; use auto"
        factors = list(self.speed_factors)
        if not factors or len(set(factors)) < len(factors):
            yield "speed_factors", f"{factors}; expected at least one factor, each listed once"
        for option in ("real_share", "real_epochs"):
            value = getattr(self, option)
            if value in ("auto", 0):
                continue
            if factors == [1.0]:
                yield option, f"{value} has no effect without other voices; set speed_factors"
            elif factors and 1.0 not in factors:
                yield (
                    "speed_factors",
                    f"{factors} with {option}: {value}; expected 1.0 (as recorded) among them",
                )
