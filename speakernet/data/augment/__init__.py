"""Augmentation of training audio: every choice is drawn first, then applied to the whole batch."""
