"""Several processes that work as one: how they find each other, what they exchange, and who is named when one is lost.

The engine is torch's: torchrun, its elastic agent and launcher, `torch.distributed`, DistributedDataParallel.
"""
