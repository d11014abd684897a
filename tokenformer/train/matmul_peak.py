"""The peak matrix multiplication throughput of a device, against which training is compared."""

import time

import torch

SIZE = 1024
ROUNDS = 8
PROBE = 128
MOST_SECONDS = 1.0


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the best FLOP/s of a few products of square matrices.

    None if that takes too long or means little: a CPU emulates half precision, at a speed that
    depends on shapes more than on the device.
    """
    if device.type == "cpu" and dtype != torch.float32:
        return None
    generator = torch.Generator(device).manual_seed(0)  # keeps the run's own unchanged
    probe, large = (
        torch.randn(size, size, device=device, dtype=dtype, generator=generator)
        for size in (PROBE, SIZE)
    )
    multiply(probe)  # warm-up: the first product loads the library
    if multiply(probe) * (SIZE / PROBE) ** 3 * ROUNDS > MOST_SECONDS:
        return None
    deadline = time.perf_counter() + MOST_SECONDS
    best = multiply(large)
    for _ in range(ROUNDS - 1):
        if time.perf_counter() < deadline:
            best = min(best, multiply(large))
    return 2 * SIZE**3 / best


def multiply(matrix: torch.Tensor) -> float:
    """Return the seconds of one product."""
    start = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # waits for the device
    return time.perf_counter() - start
