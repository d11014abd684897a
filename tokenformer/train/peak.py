"""How fast this device multiplies matrices: the limit a training step is measured against."""

import time

import torch

SIZE = 1024
ROUNDS = 8


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the best of a few products of square matrices."""
    generator = torch.Generator(device).manual_seed(0)  # a resumed run's own is not to move
    a, b = (
        torch.randn(SIZE, SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    best = 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        c = a @ b
        c[0, 0].item()  # waits for the device
        best = max(best, 2 * SIZE**3 / (time.perf_counter() - start))
    return best
