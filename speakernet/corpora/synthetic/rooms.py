"""Impulse responses of simulated box rooms: image sources for the early part, decaying noise for the late part.

Used twice: every recording session of the synthetic corpus stands in such a room, and the corpus ships a set of them
for augmentation. No files, no speech.

Source: Allen & Berkley, "Image method for efficiently simulating small-room acoustics", JASA 65 (1979); decay time by
Eyring's formula.
"""

import numpy as np

from speakernet.corpora.synthetic.voices import SAMPLE_RATE

SPEED_OF_SOUND = 343.0  # m/s
EARLY_SECONDS = 0.05  # images up to here; later there are so many that noise is as good
IMAGE_ORDER = 5  # reflections along one axis; reaches EARLY_SECONDS in rooms from about 3 m

# Sides in metres (low, high) and decay time to -60 dB in seconds (low, high), named as in RIRS_NOISES.
ROOM_KINDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "smallroom": ((2.5, 6.0), (0.15, 0.4)),
    "mediumroom": ((6.0, 12.0), (0.3, 0.7)),
    "largeroom": ((12.0, 25.0), (0.5, 1.2)),
}


def draw_room_response(
    generator: np.random.Generator,
    kind: str = "smallroom",
    *,
    distance_metres: tuple[float, float] = (0.3, 2.5),
) -> np.ndarray:
    """A random room of this kind with talker and microphone in it; (samples,) float32, direct path of height one."""
    (shortest, longest), (dry, wet) = ROOM_KINDS[kind]
    sides = generator.uniform(shortest, longest, 3)
    sides[2] = generator.uniform(2.4, 3.5 if kind == "smallroom" else 6.0)
    decay_seconds = float(generator.uniform(dry, wet))
    microphone = generator.uniform(0.15, 0.85, 3) * sides
    direction = generator.standard_normal(3)
    direction *= generator.uniform(*distance_metres) / np.linalg.norm(direction)
    talker = np.clip(microphone + direction, 0.05 * sides, 0.95 * sides)
    return room_response(sides, talker, microphone, decay_seconds, generator)


def room_response(
    sides: np.ndarray,
    talker: np.ndarray,
    microphone: np.ndarray,
    decay_seconds: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Impulse response from `talker` to `microphone`, (3,) metres each, in a box of `sides`; starts at the direct path.

    Delays are rounded to whole samples. All walls absorb alike.
    """
    volume, surface = float(np.prod(sides)), 2.0 * float(sides @ np.roll(sides, 1))
    # 0.161 s/m is 24 ln(10) / c.
    reflection = np.exp(-0.5 * 0.161 * volume / (surface * decay_seconds))  # amplitude; Eyring solved for the walls

    # Along one axis an image lies at 2 n L + s or 2 n L - s, after |2n| or |2n - 1| reflections.
    order = np.arange(-IMAGE_ORDER, IMAGE_ORDER + 1)
    offsets = [
        np.concatenate([2 * order * side + source, 2 * order * side - source]) - ear
        for side, source, ear in zip(sides, talker, microphone, strict=True)
    ]
    bounces = np.concatenate([np.abs(2 * order), np.abs(2 * order - 1)])
    squared = offsets[0][:, None, None] ** 2 + offsets[1][:, None] ** 2 + offsets[2] ** 2
    total = bounces[:, None, None] + bounces[:, None] + bounces
    direct = float(np.linalg.norm(talker - microphone))
    is_early = squared < (direct + SPEED_OF_SOUND * EARLY_SECONDS) ** 2
    distance = np.sqrt(squared[is_early])
    delay = np.round((distance - direct) * (SAMPLE_RATE / SPEED_OF_SOUND)).astype(np.int64)
    height = reflection ** total[is_early] * (direct / np.maximum(distance, 1e-3))

    num_early = round(EARLY_SECONDS * SAMPLE_RATE)
    response = np.zeros(num_early + round(decay_seconds * SAMPLE_RATE), dtype=np.float32)
    response[: num_early + 1] = np.bincount(np.maximum(delay, 0), height, num_early + 1)[: num_early + 1]

    # The tail goes on at the level of the last fifth of the early part and falls 60 dB in `decay_seconds`.
    level = float(np.sqrt(np.mean(response[num_early * 4 // 5 : num_early] ** 2)))
    tail = generator.standard_normal(len(response) - num_early)
    tail *= level * 10.0 ** (-3.0 * np.arange(len(tail)) / (decay_seconds * SAMPLE_RATE))
    response[num_early:] = tail
    return response
