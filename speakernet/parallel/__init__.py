"""Several processes that work as one: how they meet, what they exchange, and how a lost rank is
reported.

It builds on torch: torchrun, its elastic agent and launcher, `torch.distributed`,
DistributedDataParallel.
"""
