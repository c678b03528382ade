"""The training loop and its parts: steps, optimizers, precision, schedules, checkpoints and
trackers.
"""
