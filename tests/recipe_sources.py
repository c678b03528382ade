"""The sources of the VoxCeleb recipes: values by option, and schedules as independent formulas.

wespeaker dfa7419 (examples/voxceleb/v2), 3D-Speaker 09e7806 (egs/voxceleb/sv-eres2netv2) and
voxceleb_trainer f51bab8 (configs/, defaults, the command lines of its README). Epochs are finished
epochs. If a source warms up from 0, the first rate here is a thousandth of the top.
"""

import math

import yaml


def wespeaker_rate(epoch, first, last, num_epochs, warmup, batch_size):
    """ExponentialDecrease of wespeaker/utils/schedulers.py with warm_from_zero."""
    scale = batch_size / 64
    coefficient = scale * epoch / warmup if epoch < warmup else scale
    return coefficient * first * math.exp(epoch / num_epochs * math.log(last / first))


def exponential_margin(epoch, final, start, fix):
    """MarginScheduler of wespeaker and 3D-Speaker, between two numbers of finished epochs."""
    if epoch >= fix:
        return final
    share = (epoch - start) / (fix - start)
    return final * (1 - math.exp(share * math.log(1e-3 / (1 + 1e-6)))) if share >= 0 else 0.0


def three_d_speaker_rate(epoch, first, last, num_epochs, warmup):
    """WarmupCosineScheduler of speakerlab/process/scheduler.py."""
    if epoch < warmup:
        return last + (first - last) * epoch / warmup
    return last + 0.5 * (first - last) * (
        1 + math.cos(math.pi * (epoch - warmup) / (num_epochs - warmup))
    )


def half_cosine(first, last, share):
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def _wespeaker(epochs, num_epochs, batch_size, last=5e-5):
    # Its epochs 20 and 40 are counted from 1.
    rates = [
        (epoch, wespeaker_rate(epoch, 0.1, last, num_epochs, 6, batch_size)) for epoch in epochs
    ]
    start = (0, batch_size / 64 * 0.1 / 1000, 0.0)
    return [
        start,
        *((epoch, rate, exponential_margin(epoch, 0.2, 19, 39)) for epoch, rate in rates),
    ]


def _staged(epochs, first, last, num_epochs, warmup, batch_size, margin):
    """A stage of BUT's recipes: the margin as a function of the epoch."""
    start = (0, batch_size / 64 * first / 1000, margin(0))
    rates = (
        (epoch, wespeaker_rate(epoch, first, last, num_epochs, warmup, batch_size))
        for epoch in epochs
    )
    return [start, *((epoch, rate, margin(epoch)) for epoch, rate in rates)]


def _moments(epochs, rate, margin, start=None):
    """The rate and the margin, both functions of the epoch, after a first rate."""
    first = [] if start is None else [(0, start, margin(0))]
    return first + [(epoch, rate(epoch), margin(epoch)) for epoch in epochs]


def _decayed(decay, margin):
    """Multiplied by `decay` every ten epochs."""
    return _moments((0, 1, 499), lambda epoch: 1e-3 * decay ** (epoch // 10), lambda epoch: margin)


_FROZEN = _staged(
    (1, 2, 3, 4, 9, 10), 0.1, 5e-3, 10, 3, 512, lambda epoch: exponential_margin(epoch, 0.2, 1, 4)
)
_LONG = _staged((1, 2, 3), 1e-5, 1e-7, 3, 1, 64, lambda epoch: 0.5)
_150 = _wespeaker((1, 5, 6, 19, 20, 28, 38, 39, 149, 150), 150, 256)
SCHEDULES = {
    "voxceleb/resnet34.yaml": _150,
    "voxceleb/ecapa1024_aam.yaml": _150,
    "voxceleb/campplus_aam.yaml": _150,
    "voxceleb/simam_resnet34.yaml": _150,
    "voxceleb/redimnet_b2.yaml": _wespeaker((1, 5, 6, 19, 20, 38, 39, 119, 120), 120, 512),
    "voxceleb/redimnet2_b0.yaml": _wespeaker((1, 5, 6, 19, 20, 38, 39, 119, 120), 120, 1024, 6e-5),
    "voxceleb/eres2netv2_aam.yaml": _moments(
        (5, 20, 21, 35, 49, 50, 69, 70),
        lambda epoch: three_d_speaker_rate(epoch, 0.2, 5e-5, 70, 5),
        lambda epoch: exponential_margin(epoch, 0.3, 20, 50),
        2e-4,
    ),
    "voxceleb/rawnet3_aam.yaml": _decayed(0.75, 0.1),
    "voxceleb/resnet_se34l_ap.yaml": _decayed(0.95, None),
    "voxceleb/resnet_se34v2_ap.yaml": _decayed(0.95, None),
    # No step has the rate after the fall at the end.
    "voxceleb/w2v_bert.yaml": [(0, 1e-7, 0.2), (15, 1e-4, 0.2), (44, 1e-5, 0.2), (45, 1e-5, 0.2)],
    "voxceleb/wavlm_base_plus_mhfa.yaml": _FROZEN,
    "voxceleb/wavlm_large_mhfa.yaml": _FROZEN,
}
"""Recipe -> moments (first, around the ramp, last), each with finished epochs, learning rate and
margin (None if the loss has none)."""

LATER_STAGES = {
    "voxceleb/w2v_bert.yaml": {
        "joint": [(e, half_cosine(1e-5, 5e-6, e / 12), 0.2) for e in (0, 1, 11, 12)],
        "large_margin": [(e, half_cosine(1e-5, 5e-6, e / 2), 0.5) for e in (0, 1, 2)],
    },
    "voxceleb/wavlm_base_plus_mhfa.yaml": {
        "joint": _staged((1, 2, 9, 10), 1e-4, 1e-6, 10, 2, 512, lambda epoch: 0.2),
        "large_margin": _LONG,
    },
    "voxceleb/wavlm_large_mhfa.yaml": {
        "joint": _staged((1, 4, 5), 5e-5, 1e-6, 5, 1, 128, lambda epoch: 0.2),
        "large_margin": _LONG,
    },
}
"""Recipe -> its stages after the first, each with its moments."""
LATER_VALUES = yaml.safe_load("""
voxceleb/w2v_bert.yaml:
  joint:
    {model.options.trained: all, data.batch_size: 512, optimizer.weight_decay: 1.0e-4}
  large_margin:
    {data.crop_frames: 500, data.crop_frames_max: 600, data.min_seconds: 5.0,
    data.batch_size: 256, augment.enabled: false}
voxceleb/wavlm_base_plus_mhfa.yaml:
  joint:
    {model.options.gradient_factor: 0.1, data.batch_size: 512, optimizer.name: adamw}
  large_margin:
    {data.crop_frames: 500, data.batch_size: 64, model.options.trained: all}
voxceleb/wavlm_large_mhfa.yaml:
  joint:
    {model.options.gradient_factor: 0.1, data.batch_size: 128, optimizer.weight_decay: 1.0e-7}
  large_margin:
    {data.crop_frames: 300, data.batch_size: 64, model.options.trained: all}
""")

_RESNET_LM = [
    (0, 2e-7, 0.5),
    *((epoch, wespeaker_rate(epoch, 1e-4, 2.5e-5, 5, 1, 128), 0.5) for epoch in (1, 4, 5)),
]
SECOND_STAGES = {
    **{
        f"voxceleb/{name}.yaml": _RESNET_LM
        for name in ("resnet34", "ecapa1024_aam", "campplus_aam", "simam_resnet34")
    },
    "voxceleb/redimnet_b2.yaml": _RESNET_LM,
    "voxceleb/redimnet2_b0.yaml": [
        (epoch, wespeaker_rate(epoch, 1e-4, 1e-5, 5, 0, 256), 0.3) for epoch in (0, 1, 4, 5)
    ],
    "voxceleb/eres2netv2_aam.yaml": [
        (0, 1e-7, 0.5),
        *((epoch, three_d_speaker_rate(epoch, 1e-4, 2e-5, 7, 1), 0.5) for epoch in (1, 6, 7)),
    ],
}
_LM_SIZES = yaml.safe_load("""
{training.max_epochs: 5, data.batch_size: 128, data.crop_frames: 600,
augment.speed_factors: [1.0], augment.enabled: true, augment.probability: 0.6}
""")
SECOND_STAGE_VALUES = dict.fromkeys(SECOND_STAGES, _LM_SIZES) | {
    "voxceleb/redimnet2_b0.yaml": {**_LM_SIZES, "data.batch_size": 256, "augment.enabled": False},
    "voxceleb/eres2netv2_aam.yaml": {
        **_LM_SIZES,
        "training.max_epochs": 7,
        "data.batch_size": 108,
        "augment.probability": 0.8,
    },
}

# Options of each recipe other than schedules; null removes one.
_VALUES = yaml.safe_load("""
sgd: &sgd
  {optimizer.name: sgd, optimizer.momentum: 0.9, optimizer.nesterov: true,
  optimizer.weight_decay: 0.0001, optimizer.decay_norms_and_biases: true,
  training.max_grad_norm: 0, training.accumulation_steps: 1, evaluation.score: cosine,
  evaluation.eval_frames: 0, data.sampler: shuffled, augment.speed_factors: [0.9, 1.0, 1.1],
  augment.noise_snr_db: [0, 15], frontend.spec_augment: false}
aam: &aam
  {loss.name: aamsoftmax, loss.scale: 32, loss.easy_margin: false, loss.sub_centers: 1}
wespeaker: &wespeaker
  {<<: [*sgd, *aam], data.batch_size: 256, data.crop_frames: 200, data.min_seconds: 1.0,
  augment.probability: 0.6, augment.rir_path: data/RIRS_NOISES/simulated_rirs,
  augment.music_snr_db: [5, 15], augment.babble_snr_db: [10, 30], augment.babble_speakers: [1, 1],
  frontend.name: fbank, frontend.num_mels: 80, frontend.dither: 1.0, frontend.window: hamming,
  frontend.normalize: mean, frontend.scale: 32768, training.average_checkpoints: 10,
  evaluation.subtract_mean: true, evaluation.score_norm: as, evaluation.cohort_size: 300,
  evaluation.cohort_utterances: 0}
trainer: &trainer
  {optimizer.name: adam, optimizer.learning_rate: 0.001, training.max_epochs: 500,
  training.test_interval: 10, training.max_grad_norm: 0, data.max_utterances_per_speaker: 500,
  data.sampler: balanced, evaluation.eval_frames: 400, evaluation.num_crops: 10,
  evaluation.score: mean_distance}
pairs: &pairs
  {<<: [*trainer], frontend.log_input: true, data.batch_size: 200, data.utterances_per_speaker: 2,
  data.crop_frames: 200, optimizer.weight_decay: 0.0, model.embedding_dim: 512}
voxceleb/resnet34.yaml:
  {<<: [*wespeaker], model.name: ResNet34, model.pooling: TSTP, model.embedding_dim: 256}
voxceleb/ecapa1024_aam.yaml:
  {<<: [*wespeaker], model.name: ECAPA_TDNN_1024, model.pooling: GlobalASTP,
  model.embedding_dim: 192}
voxceleb/campplus_aam.yaml:
  {<<: [*wespeaker], model.name: CAMPPlus, model.pooling: TSTP, model.embedding_dim: 512}
voxceleb/simam_resnet34.yaml:
  {<<: [*wespeaker], model.name: SimAM_ResNet34, model.pooling: ASP, model.embedding_dim: 256}
voxceleb/redimnet_b2.yaml:
  {<<: [*wespeaker], optimizer.weight_decay: 2.0e-05, data.batch_size: 512, frontend.num_mels: 72,
  evaluation.score_norm: none, model.name: ReDimNetB2, model.pooling: GlobalASTP,
  model.embedding_dim: 192, model.options: {embedding_norm: false, pooled_norm: false},
  evaluation.cohort_size: null, evaluation.cohort_utterances: null}
voxceleb/redimnet2_b0.yaml:
  {<<: [*wespeaker], optimizer.weight_decay: 2.0e-05, data.batch_size: 1024, data.min_seconds: 0.0,
  evaluation.score_norm: none, frontend.name: tf_mel, frontend.num_mels: 72,
  frontend.preemphasis: 0.97, frontend.low_hz: 20, frontend.high_hz: 7600,
  frontend.normalize_waveform: true, loss.name: sphereface2, loss.margin_type: C,
  loss.positive_weight: 0.7, loss.exponent: 3, model.name: ReDimNet2B0, model.pooling: GlobalASTP,
  model.embedding_dim: 192, loss.easy_margin: null, loss.sub_centers: null, frontend.dither: null,
  frontend.window: null, frontend.scale: null, evaluation.cohort_size: null,
  evaluation.cohort_utterances: null}
voxceleb/eres2netv2_aam.yaml:
  {<<: [*sgd, *aam], model.name: ERes2NetV2, model.pooling: TSTP, model.embedding_dim: 192,
  model.options: {base_width: 26, channels: 64, expansion: 2, scale: 2},
  model.pooling_options: {variance_floor: 1.0e-08}, data.batch_size: 168, data.crop_frames: 300,
  data.min_seconds: 0.0, augment.probability: 0.8, augment.categories: [reverb, noise],
  augment.rir_path: data/RIRS_NOISES/real_rirs_isotropic_noises, frontend.name: fbank,
  frontend.num_mels: 80, frontend.scale: 1, frontend.window: povey, frontend.dither: 0.0,
  frontend.normalize: mean, training.average_checkpoints: 0, evaluation.subtract_mean: false,
  evaluation.score_norm: none}
voxceleb/w2v_bert.yaml:
  {<<: [*aam], data.batch_size: 512, data.crop_frames: 200, data.crop_frames_max: 300,
  data.min_seconds: 2.0, augment.speed_factors: [0.9, 1.0, 1.1], augment.noise_snr_db: [5, 20],
  training.max_grad_norm: 1.0, model.name: Pretrained, model.pooling: AdapterMFA,
  model.embedding_dim: 256, model.options: {backbone: facebook/w2v-bert-2.0, lora_rank: 64,
  lora_alpha: 128, trained: lora}, model.pooling_options: {dim: 128}, optimizer.name: adamw,
  optimizer.weight_decay: 0.0001, loss.margin: 0.2, evaluation.subtract_mean: true,
  evaluation.score_norm: none}
voxceleb/wavlm_base_plus_mhfa.yaml: &mhfa
  {data.batch_size: 512, data.crop_frames: 300, data.min_seconds: 1.0, augment.probability: 0.6,
  augment.speed_factors: [1.0], model.name: Pretrained, model.pooling: MHFA,
  model.embedding_dim: 256, model.options: {backbone: microsoft/wavlm-base-plus, trained: nothing},
  model.pooling_options: {heads: 64}, loss.scale: 32, loss.sub_centers: 3, loss.inter_top_k: 5,
  loss.inter_top_k_penalty: 0.06, optimizer.name: sgd, optimizer.weight_decay: 1.0e-07,
  evaluation.subtract_mean: true, evaluation.score_norm: as, evaluation.cohort_size: 300}
voxceleb/wavlm_large_mhfa.yaml:
  {<<: [*mhfa], model.options: {backbone: microsoft/wavlm-large, trained: nothing}}
voxceleb/rawnet3_aam.yaml:
  {<<: [*trainer], data.batch_size: 32, data.utterances_per_speaker: 1, data.crop_frames: 300,
  augment.enabled: true, augment.style: classic, augment.rir_path: data/RIRS_NOISES/simulated_rirs,
  model.pooling: ECA, model.embedding_dim: 256, model.options: {sinc_stride: 10},
  loss.name: aamsoftmax, loss.margin: 0.1, loss.scale: 30, optimizer.weight_decay: 5.0e-05,
  optimizer.decay_norms_and_biases: true}
voxceleb/resnet_se34l_ap.yaml:
  {<<: [*pairs], augment.enabled: false, frontend.num_mels: 40, model.pooling: SAP,
  loss.name: angleproto}
voxceleb/resnet_se34v2_ap.yaml:
  {<<: [*pairs], augment.enabled: true, augment.style: classic,
  augment.rir_path: data/RIRS_NOISES/simulated_rirs, frontend.num_mels: 64, model.pooling: ASP,
  loss.name: softmaxproto}
""")
VALUES = {
    recipe: {key: value for key, value in values.items() if value is not None}
    for recipe, values in _VALUES.items()
    if recipe.startswith("voxceleb/")
}

_MILLIONS = yaml.safe_load("""
  {resnet34: 6.63, ecapa1024_aam: 14.65, campplus_aam: 7.18, simam_resnet34: 25.2,
  redimnet_b2: 4.89, redimnet2_b0: 0.70, eres2netv2_aam: 17.8, rawnet3_aam: 16.28,
  resnet_se34l_ap: 1.44, resnet_se34v2_ap: 8.03}
""")
PARAMETERS = {f"voxceleb/{name}.yaml": millions for name, millions in _MILLIONS.items()}
"""Millions, as counted by the sources (redimnet2_b0: by its wespeaker definition)."""
