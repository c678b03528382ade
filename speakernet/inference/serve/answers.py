"""What the API answers, field by field: these classes are its description in /openapi.json."""

from dataclasses import dataclass


@dataclass
class Heard:
    """What was heard in a clip."""

    seconds: float
    speech_seconds: float
    warnings: list[str]


@dataclass
class Health:
    """What is served, and how busy it is."""

    status: str
    model: str
    sample_rate: int
    embedding_dim: int
    fingerprint: str
    is_calibrated: bool
    advice: str | None
    keeps_people: bool
    waiting: int
    clips: int
    batches: int


@dataclass
class Answer:
    """A score and what it says; everything but the score is null where the model is not calibrated."""

    score: float
    log_likelihood_ratio: float | None
    same_speaker: bool | None
    threshold: float | None
    false_accept_rate: float | None
    advice: str | None


@dataclass
class Verification(Answer):
    """An answer about two clips."""

    clips: list[Heard]


@dataclass
class Embedding:
    """What the network makes of a clip: not of unit length, no mean subtracted."""

    embedding: list[float]
    clips: list[Heard]


@dataclass
class Embeddings:
    """Two embeddings to compare, as /embed gives them."""

    first: list[float]
    second: list[float]


@dataclass
class Person:
    """Somebody who is enrolled."""

    name: str
    recordings: int


@dataclass
class People:
    """Everybody who is enrolled."""

    people: list[Person]


@dataclass
class Enrolment(Person):
    """Somebody who was enrolled now, and what was odd about it."""

    warnings: list[str]
    clips: list[Heard]


@dataclass
class Candidate:
    """Somebody whom a clip was compared with."""

    name: str
    score: float
    log_likelihood_ratio: float | None


@dataclass
class Identification:
    """Who it is: a name, or null for a stranger (and where the model is not calibrated)."""

    name: str | None
    is_calibrated: bool
    advice: str | None
    candidates: list[Candidate]
    clips: list[Heard]


@dataclass
class Stream:
    """A live comparison that was begun."""

    id: str


@dataclass
class StreamAnswer(Answer):
    """What is known after so many seconds of a stream."""

    seconds: float


@dataclass
class StreamProgress:
    """How much of a stream was heard, and the newest answer if another second became full."""

    seconds: float
    state: StreamAnswer | None


@dataclass
class ErrorDetail:
    """Why a request was refused."""

    code: str
    message: str


@dataclass
class Refusal:
    """What every error looks like."""

    error: ErrorDetail
