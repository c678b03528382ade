"""The only room that knows both the configuration and the parts: section -> keyword arguments -> object.

One file a section (`data`, `model`, `training`, `evaluation`), and `experiment.py`, which strings them together into
the two journeys of `trainSpeakerNet.py`.
"""
