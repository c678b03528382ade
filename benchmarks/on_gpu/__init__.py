"""The parts of `benchmarks/gpu.py`: what is compared and measured where a GPU is at hand, and runs on a CPU too."""
