"""The options of evaluation, from utterances to embeddings, scores and figures. No torch is
imported here.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Le

from speakernet.options import (
    Count,
    CountOrZero,
    FramesOrZero,
    InputPath,
    Options,
    Positive,
    Probability,
    Processes,
    Several,
)

UNIT_COST = 1.0
"""The usual cost of both a miss and a false accept."""
Mode = Literal["crops", "whole"]
ScoreNorm = Literal["none", "z", "t", "s", "as"]
Sweep = Literal["noise", "reverb", "duration", "telephone", "microphone", "distance", "codec"]
ADAPTATIONS = ("auto", "mean", "whitening", "coral", "lda", "wccn", "plda")
"""Back ends that `speakernet adapt` fits; with auto, it chooses one."""
Quality = Literal["duration", "magnitude", "snr", "cohort"]


class EvaluationOptions(Options):
    """How trial lists are scored and reported."""

    eval_frames: FramesOrZero = 400
    """Length of an evaluation crop in frames of 10 ms; 0 embeds whole utterances."""
    num_crops: Annotated[int, Ge(1), Le(10_000)] = 10
    """Number of evenly spaced crops of each utterance."""
    embedding: Literal["auto", "crops", "whole", "both"] = "auto"
    """What is embedded; auto: crops, or whole utterances if eval_frames is 0; both: the two scores
    are averaged."""
    speech: Literal["whole", "detected"] = "whole"
    """detected: cut utterances to their speech first, as decisions do; whole: score lists as
    published."""
    batch_size: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """Waveforms (crops or whole utterances) embedded at once; at most 16 on a CPU."""
    num_workers: Processes | Literal["auto"] = "auto"
    """Threads that read evaluation audio; auto: one per core of this process, at most eight."""
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"
    """Precision of the network while embedding; auto: the precision of training
    (runtime.precision)."""
    score: Literal["cosine", "mean_distance"] = "cosine"
    """cosine of the mean embeddings, or minus the mean distance over all pairs of crops (as in
    voxceleb_trainer)."""
    enrolment: Literal["embedding", "scores"] = "embedding"
    """How a model with several recordings is scored (data.enrolment_list): by the mean of their
    embeddings, as in wespeaker, or by the mean of their scores."""
    score_norm: ScoreNorm = "none"
    """Score normalisation against a cohort: z, t, s (symmetric) or as (adaptive symmetric)."""
    cohort_size: Count = 300
    """Number of nearest cohort members that adaptive s-norm uses (all if the cohort is smaller)."""
    dcf_target_priors: Several[Probability] = (0.01, 0.05, 0.001)
    """Prior probabilities of a target for the detection cost; 0.01 and 0.05 are always reported."""
    c_miss: Positive = UNIT_COST
    """Cost of a missed target."""
    c_fa: Positive = UNIT_COST
    """Cost of a false accept."""
    bootstrap_samples: Annotated[int, Ge(0), Le(1_000_000)] = 1000
    """Bootstrap draws of speakers for the confidence intervals; 0: no intervals."""
    metadata: InputPath = ""
    """CSV with the column path and others (gender, age, …) to slice the results of the (first) test
    list by."""
    slices: Several[str] = ()
    """What to slice by: duration (of the speech, if that is what is embedded), speech, snr or
    metadata columns; empty: duration and every suitable metadata column."""
    validation_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Precision of the network during validation; auto: the precision of training."""
    max_trials: CountOrZero = 0
    """Size of a fixed random subset of the validation trials, for quick validation; 0: all."""
    speaker_table: InputPath = ""
    """CSV with the columns path, speaker and (if known) session, for lists whose names do not
    contain them."""
    subtract_mean: bool = False
    """Subtract the mean embedding of the training set before scoring; training saves it in the
    model file."""
    mean_utterances: Count = 2000
    """Number of training utterances, drawn with the seed, that the mean is computed from."""
    plda: bool = False
    """After training, fit PLDA on the training list, with a simulated microphone for each file if
    augment has any, and save it with its own mean in the model file."""
    cohort_list: InputPath = ""
    """List of the cohort with lines `speaker path`; empty: the training list. A speaker's
    utterances are averaged."""
    cohort_path: InputPath = ""
    """Audio of the cohort; empty: train_path for the training list, otherwise the folder of
    cohort_list."""
    cohort_utterances: CountOrZero = 10
    """Maximum number of a speaker's utterances that are averaged into a cohort member; 0: all."""
    calibration_list: InputPath = ""
    """Labelled trials to fit calibration and thresholds on; empty: scores stay uncalibrated."""
    calibration_path: InputPath = ""
    """Audio of calibration_list; empty: test_path."""
    calibration_prior: Probability = 0.01
    """Target prior that the calibration is tuned for."""
    quality_measures: Several[Quality] = ()
    """Quality measures that the calibration uses besides the score: duration, magnitude, snr,
    cohort (mean cohort score)."""
    sweep: Several[Sweep] = ()
    """Degrade the trial audio step by step (noise, reverb, microphone, …) and report the EER at
    each step."""
    keep_embeddings: bool = True
    """Keep embeddings beside the results and reuse them while model and audio are unchanged."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Crops without a length, and options that contradict each other."""
        # Options without effect, such as a cohort size without normalisation, are harmless and
        # pass.
        if self.embedding in ("crops", "both") and self.eval_frames == 0:
            yield (
                "eval_frames",
                f"0, but embedding: {self.embedding} needs the length of a crop in frames of 10 ms",
            )
        # The mean distance compares crops, but a cohort has only one embedding per speaker.
        if self.score_norm != "none" and self.score != "cosine":
            yield (
                "score_norm",
                f"{self.score_norm}, but score is {self.score}; normalisation needs score: cosine",
            )
        # PLDA replaces the cosine. Its ratios need no normalisation: they compare with other
        # speakers already.
        if self.plda and (self.score, self.score_norm) != ("cosine", "none"):
            yield (
                "plda",
                f"true, but score is {self.score} and score_norm {self.score_norm}; expected "
                "cosine and none",
            )
        # Only normalisation embeds a cohort and scores the list against it.
        if self.score_norm == "none" and "cohort" in self.quality_measures:
            yield (
                "quality_measures",
                "cohort needs score normalisation; set --score_norm and a cohort",
            )
