"""Synthetic speech: a deterministic corpus of invented speakers, with noises and room responses to augment it.

A source-filter synthesiser (`phones` -> `voices` -> `sessions`) and `noises` and `rooms`; `corpus` writes it all to a
folder as training reads it. It is for trying the toolkit and for tests that must not depend on recordings: error rates
on it say nothing about real speech.
"""

from speakernet.corpora.synthetic.corpus import CorpusError, CorpusParameters, CorpusPaths, make_corpus

__all__ = ["CorpusError", "CorpusParameters", "CorpusPaths", "make_corpus"]
