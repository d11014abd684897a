"""Memory and time of the chunked loss against the plain loss, with a vocabulary of 50k.

    python -m benchmarks.loss

Peak memory is measured in a new process, beyond the inputs and their gradients. The limit of the
time is the three matrix products of loss and gradients.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    compare,
    make_parser,
    number,
    progress,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.memory_usage import PeakMemory, in_new_process
from benchmarks.results import Row
from tokenformer.train.loss import chunked_cross_entropy

COLUMNS = {
    "share of matmul speed": with_spread("share"),
    "x plain": with_spread("times_plain"),
    "peak, MB": number("peak_bytes", ",.0f", unit=1e6),
    "peak / plain": number("peak", ".3f"),
}


def plain(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ embedding.T, labels, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "chunked": chunked_cross_entropy,
}


def make_inputs(options: Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    # The scale of a real embedding: softmax of larger logits is full of denormal numbers.
    embedding = torch.empty(options.vocab, options.width).normal_(std=0.02).requires_grad_()
    return hidden, embedding, torch.randint(options.vocab, (options.tokens,))


def peak_bytes(name: str, options: Namespace) -> int:
    """Measure one loss. Runs in a new process."""
    torch.set_num_threads(options.threads)
    hidden, embedding, labels = make_inputs(options)
    with PeakMemory() as peak:
        grads = torch.autograd.grad(LOSSES[name](hidden, embedding, labels), (hidden, embedding))
    return peak.bytes - sum(grad.nbytes for grad in grads)


def measure(options: Namespace) -> Iterator[Row]:
    options.threads = torch.get_num_threads()
    progress(f"loss of {options.tokens} tokens")
    hidden, embedding, labels = make_inputs(options)
    logits = torch.empty(options.tokens, options.vocab)
    states, matrix = hidden.detach(), embedding.detach()

    @torch.no_grad()
    def products() -> None:
        torch.mm(states, matrix.T, out=logits)
        logits @ matrix
        logits.T @ states

    def step(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(hidden, embedding, labels), (hidden, embedding))

    steps = {name: step(loss) for name, loss in LOSSES.items()}
    times = time_interleaved({"products": products, **steps}, options.rounds or 5)
    rows = compare(times, "products", against=("plain",))
    peaks = {name: in_new_process(peak_bytes, name, options) for name in LOSSES}
    case = f"{options.tokens} x {options.width} x {options.vocab}"
    for name, row in rows.items():
        memory = {"peak_bytes": peaks[name], "peak": peaks[name] / max(1, peaks["plain"])}
        yield {"case": case, **row, **memory}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, help="default: 1024, with --full 4096")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50304)
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or (4096 if options.full else 1024)
    run("loss", measure, COLUMNS, options)


if __name__ == "__main__":
    main()
