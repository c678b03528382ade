"""The options of lists, samplers, loaders and audio storage. No torch is imported here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator, Field, StringConstraints

from speakernet.options import (
    HIGHEST_SAMPLE_RATE,
    LOWEST_SAMPLE_RATE,
    SAMPLE_RATE,
    ByName,
    Count,
    CountOrZero,
    Frames,
    FramesOrZero,
    Gigabytes,
    InputPath,
    Options,
    Processes,
    Share,
    Switch,
)

ListName = Annotated[str, StringConstraints(pattern=r"^\w[\w+-]{0,99}$")]
"""Letters, digits and `_ + -`, because it names a folder and columns."""


class NamedListOptions(Options):
    """One of several trial lists."""

    list: Annotated[InputPath, MinLen(1)]
    """The labelled trials."""
    path: InputPath = ""
    """Like test_path; empty: test_path, else the folder of the list."""
    test_interval: CountOrZero = 0
    """Evaluate this list every N epochs, at the run's next evaluation (training.test_interval); 0:
    at each of them."""
    optional: bool = False
    """Skip the list, with a warning, while its file or any of its recordings is missing."""


class CorpusOptions(Options):
    """One of several training corpora."""

    train_list: Annotated[InputPath, MinLen(1)]
    """Like data.train_list. Its speakers are distinct from those of the other corpora, even if
    names are equal."""
    train_path: InputPath = ""
    """Like data.train_path."""
    weight: Annotated[float, Gt(0.0), Le(1e9)] | Literal["auto"] = "auto"
    """Share of each batch, relative to the other weights; auto: by number of utterances
    (corpora_temperature)."""


def _as_options(value: Any) -> Any:
    return {"list": value} if isinstance(value, str) else value


class DataOptions(Options):
    """Which recordings are used, and how they become batches."""

    train_list: InputPath = ""
    """Training list with one `speaker path` per line, or a Kaldi folder (utt2spk names speakers and
    utterances)."""
    train_path: InputPath = ""
    """Folder that the paths in train_list are relative to, a Kaldi folder with a wav.scp, or a
    packed corpus, possibly at an address such as s3://bucket/vox2; empty: the folder of the
    list."""
    corpora: ByName[ListName, CorpusOptions] = Field(default={})
    """Several training corpora by name, instead of train_list and train_path; every batch has a
    share of each."""
    corpora_temperature: Annotated[float, Ge(1.0), Le(1e6)] = 1.0
    """For corpora without weights: shares are proportional to the number of utterances to the power
    of 1 / corpora_temperature. 1: proportional to the utterances; higher values: closer to equal
    shares."""
    validation_list: InputPath = ""
    """Trials that choose the best checkpoint during training; empty: test_list is used, and the
    report says so."""
    validation_path: InputPath = ""
    """Like train_path, for validation_list."""
    validation_speakers: Annotated[int, Ge(0), Le(100_000)] = 0
    """Speakers of train_list held out for validation, with trials among them; 0: none."""
    test_list: InputPath = ""
    """Trials to report: `1 enrol test`, `enrol test target`, or unlabelled pairs for scores
    only."""
    test_path: InputPath = ""
    """Like train_path, for test_list."""
    enrolment_list: InputPath = ""
    """Recordings of the models that trials name (`label model test`): `model recording` on each
    line, or Kaldi's spk2utt. Paths are relative to those of the trial list."""
    test_lists: ByName[ListName, Annotated[NamedListOptions, BeforeValidator(_as_options)]] = Field(
        default={}
    )
    """Additional lists, evaluated during training and included in the report, each in its own
    column and under eval/<name>. Without test_list, the first one takes its place."""
    synthetic_corpus: InputPath = ""
    """Folder of the synthetic corpus, which is generated on first use."""
    sample_rate: Annotated[int, Ge(LOWEST_SAMPLE_RATE), Le(HIGHEST_SAMPLE_RATE)] = SAMPLE_RATE
    """Samples per second; recordings at other rates are resampled."""
    num_classes: Annotated[int, Ge(0), Le(100_000_000)] = 0
    """Speakers in the classification head; 0: as many as the training list has."""
    min_seconds: Annotated[float, Ge(0.0), Le(1e6)] = 0.0
    """Leave out shorter training utterances (counted in the log)."""
    on_bad_audio: Literal["error", "skip"] = "error"
    """skip: replace an unreadable utterance with another of the same speaker, and count it."""
    crop_frames: Frames = 200
    """Length of a training crop in frames of 10 ms (200 frames are 2 seconds)."""
    crop_frames_max: FramesOrZero = 0
    """Longest crop. Each batch draws a length between crop_frames and this, and batches of longer
    crops are smaller.
    0: all crops have crop_frames."""
    batch_size: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """Utterances in a batch; with utterances_per_speaker above 1, speakers in a batch."""
    utterances_per_speaker: Annotated[int, Ge(1), Le(100_000)] = 1
    """Utterances of each speaker in a batch; metric losses need 2 or more."""
    max_utterances_per_speaker: Count | Literal["auto"] = "auto"
    """Maximum utterances per speaker in an epoch, redrawn every epoch; auto: 500 if balanced, all
    if shuffled."""
    sampler: Literal["auto", "shuffled", "balanced"] = "auto"
    """shuffled: all utterances in random order; balanced: no speaker twice in a batch; auto:
    depends on the loss."""
    num_workers: Processes | Literal["auto"] = "auto"
    """Loader processes; 0: load in the training process; auto: depends on cores and corpus (the
    reason is logged)."""
    prefetch_factor: Annotated[int, Ge(1), Le(10_000)] | Literal["auto"] = "auto"
    """Batches that each worker prepares ahead."""
    worker_timeout_seconds: Annotated[float, Ge(0.0), Le(1e6)] = 600.0
    """Seconds without a batch after which a worker counts as hung and the run saves last.pt and
    ends; 0: no limit."""
    persistent_workers: bool = True
    """Keep the workers between epochs."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Use page-locked memory for faster transfers; auto: with a GPU."""
    max_bad_share: Share = 0.01
    """With on_bad_audio: skip, the share of unreadable utterances in an epoch above which the run
    stops."""
    cache_megabytes: Annotated[int, Ge(0), Le(10_000_000)] = 512
    """Memory per process for decoded audio that is read repeatedly (noise, RIRs, short
    utterances)."""
    ram_corpus: Switch = "auto"
    """Decode the training corpus once into shared memory as int16; auto: if it is compressed and
    fits into half of the free memory."""
    shard_cache_gigabytes: Annotated[float, Gt(0.0), Le(1e6)] = 50.0
    """Maximum disk space per machine for shards of a corpus at an address (below
    ~/.cache/speakernet)."""
    shuffle_buffer: Annotated[int, Ge(1), Le(10**9)] = 65_536
    """Utterances of a corpus at an address that are shuffled together: shards come in random order,
    and batches are drawn from this many utterances at a time."""
    device_resident: Switch = "auto"
    """Keep noise, RIRs and a packed (or RAM) corpus in GPU memory and cut crops there; auto:
    whatever fits."""
    device_gigabytes: Gigabytes = 0.0
    """GPU memory limit for corpus, noise and RIRs together; 0: half of what training leaves
    free."""

    @property
    def train_lists(self) -> list[str]:
        """The training list, or those of several corpora."""
        return [corpus.train_list for corpus in self.corpora.values()] or [self.train_list]

    @property
    def utterances_per_batch(self) -> int:
        """Utterances in a batch, of all its speakers."""
        return self.batch_size * self.utterances_per_speaker

    def problems(self) -> Iterator[tuple[str, str]]:
        """Conflicting training lists, weights or validation, a corpus given twice, a sampler that
        makes no such batches, and bounds that leave nothing.
        """
        names = ", ".join(self.corpora)
        if self.corpora and (self.train_list or self.train_path):
            yield (
                "corpora",
                f"{names} together with train_list: {self.train_list or self.train_path}; give "
                "only one of them (train_list: '' and train_path: '' unset the other)",
            )
        places = {(corpus.train_list, corpus.train_path) for corpus in self.corpora.values()}
        if len(places) < len(self.corpora):
            yield (
                "corpora",
                f"{names}, two of them with the same train_list and train_path; expected different "
                "corpora, because each speaker would become two classes",
            )
        weighted = [name for name, corpus in self.corpora.items() if corpus.weight != "auto"]
        if weighted and (len(weighted) < len(self.corpora) or self.corpora_temperature != 1):
            yield (
                "corpora",
                f"a weight for {', '.join(weighted)}; expected weights for all corpora and no "
                "corpora_temperature, or no weights",
            )
        if self.validation_speakers and self.validation_list:
            yield (
                "validation_speakers",
                f"{self.validation_speakers} together with validation_list: "
                f"{self.validation_list}; give only one of them",
            )
        if self.validation_speakers == 1:
            yield "validation_speakers", "1; expected 0 or at least 2"
        # The list of test_list may have a name as well.
        columns = [Path(self.test_list).stem.casefold()]
        for name, options in self.test_lists.items():
            if options.list != self.test_list or name.casefold() != columns[0]:
                columns.append(name.casefold())
        if len(set(columns)) < len(columns):
            yield (
                "test_lists",
                f"{', '.join(self.test_lists)} together with test_list: {self.test_list}; expected "
                "names that differ from each other and test_list's, ignoring case",
            )
        if self.utterances_per_speaker > 1 and self.sampler == "shuffled":
            yield (
                "utterances_per_speaker",
                f"{self.utterances_per_speaker} with sampler: shuffled; above 1 it needs balanced",
            )
        if 0 < self.crop_frames_max < self.crop_frames:
            yield (
                "crop_frames_max",
                f"{self.crop_frames_max}; expected 0 or at least crop_frames ({self.crop_frames})",
            )
