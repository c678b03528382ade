"""Several processes that train one network: how they start and meet, what they share, and how a
lost rank is reported.

It builds on torch: torchrun, its elastic agent and launcher, `torch.distributed`,
DistributedDataParallel. The rank and the collectives are in `speakernet.distributed`.
"""
