"""Float32 that means float32: products without the ten bits of mantissa that TF32 leaves them on a GPU."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Inside, products of float32 matrices and cuDNN's convolutions keep 24 bits, whatever `runtime.tf32` says.

    For filters: an error of one part in a thousand would be audible in the stop band. Costs no more than two flags.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if products == "highest" and not convolutions:
        yield
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
