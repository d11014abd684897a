"""How fast this device multiplies matrices: the limit a training step is measured against."""

import time

import torch

SIZE = 1024
ROUNDS = 8
PROBE = 128
MOST_SECONDS = 1.0


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs per second of the best of a few products of square matrices.

    None where it cannot be measured quickly or would say little: a CPU emulates half precision, at
    a speed that depends on shapes more than on the device.
    """
    if device.type == "cpu" and dtype != torch.float32:
        return None
    generator = torch.Generator(device).manual_seed(0)  # a resumed run's own is not to move
    probe, large = (
        torch.randn(size, size, device=device, dtype=dtype, generator=generator)
        for size in (PROBE, SIZE)
    )
    multiply(probe)  # the first product pays for loading the library
    if multiply(probe) * (SIZE / PROBE) ** 3 * ROUNDS > MOST_SECONDS:
        return None
    deadline = time.perf_counter() + MOST_SECONDS
    best = multiply(large)
    for _ in range(ROUNDS - 1):
        if time.perf_counter() < deadline:
            best = min(best, multiply(large))
    return 2 * SIZE**3 / best


def multiply(matrix: torch.Tensor) -> float:
    """Seconds of one product."""
    start = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # waits for the device
    return time.perf_counter() - start
