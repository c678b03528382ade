"""Helpers for your own training loops; their doctests cover the rest."""

import torch

from speakernet import helpers


def test_settings_and_facts():
    assert helpers.optimize_torch_settings(threads=1, keep_memory=False)["threads"] == 1
    assert helpers.log_performance_info()["threads"] == torch.get_num_threads() == 1
