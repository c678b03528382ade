"""The parts of `benchmarks/gpu.py`: comparisons and measurements for a GPU, which also run on a
CPU.
"""
