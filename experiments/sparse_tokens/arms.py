"""The runs of the study: models at equal active FLOPs, ablations, growth, and sparsified models."""

from dataclasses import dataclass, replace
from typing import Any

from experiments.exhibit import Scale
from experiments.job import Results
from experiments.language import Growth, LanguageRun, Model
from experiments.sparse_tokens.peer import PeerRun, PeerSize
from experiments.sparse_tokens.sparsity_run import SparsityRun
from experiments.sweep import Arm, tune

ACTIVE = 64
"""Feed-forward tokens that a row visits: n."""
EQUAL_FLOPS = 96
"""Tokens of a dense layer with the FLOPs of n tokens and a router of 16n."""
GROUP = 16
STEPS, MORE_STEPS = 1000, 600
"""Of training from scratch, and of training further."""
RATES = (4e-3, 8e-3, 1.6e-2)
FURTHER_RATES = (2e-3, 4e-3, 8e-3)


@dataclass(frozen=True)
class Peer:
    """A model with PEER layers, in the list of models."""

    size: PeerSize


def dense(tokens: int) -> Model:
    return Model(tokens=32, ffn_tokens=tokens)


def sparse(tokens: int, active: int = ACTIVE, **options: Any) -> Model:
    routing = {"group_size": GROUP, "theta_norm": "chosen"} | options
    groups = active // routing["group_size"]
    return Model(tokens=32, ffn_tokens=tokens, active_groups=groups, **routing)


DENSE, EQUAL, SPARSE_4, SPARSE_16, SPARSE_64, PEER_4, PEER_16, DENSE_4, WIDE_SPARSE = (
    f"dense, n = {ACTIVE}",
    f"dense, {EQUAL_FLOPS} tokens",
    "sparse 4n",
    "sparse 16n",
    "sparse 64n",
    "PEER, 4n experts",
    "PEER, 16n experts",
    "dense 4n",
    "sparse 16n, 4n active",
)
MODELS: dict[str, Model | Peer] = {
    DENSE: dense(ACTIVE),
    EQUAL: dense(EQUAL_FLOPS),
    SPARSE_4: sparse(4 * ACTIVE),
    SPARSE_16: sparse(16 * ACTIVE),
    SPARSE_64: sparse(64 * ACTIVE, group_size=64),
    PEER_4: Peer(PeerSize(4 * ACTIVE, heads=4, top=9)),
    PEER_16: Peer(PeerSize(16 * ACTIVE, heads=4, top=14)),
    DENSE_4: dense(4 * ACTIVE),
    WIDE_SPARSE: sparse(16 * ACTIVE, 4 * ACTIVE),
}


def train(model: Model | Peer, rate: float, **options: Any) -> Any:
    """Return the run from scratch, before it is fitted to a scale."""
    if isinstance(model, Peer):
        return PeerRun(LanguageRun(dense(ACTIVE), (STEPS,), rate=rate), model.size)
    return LanguageRun(model, (STEPS,), rate=rate, **options)


def tuned(model: Model | Peer, scale: Scale, results: Results) -> Arm:
    return tune(lambda rate: scale.fit(train(model, rate)), RATES, scale, results)


def model_arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """Return the arms that are trained from scratch."""
    return {name: tuned(model, scale, results) for name, model in MODELS.items()}


ROUTERS = {
    "a learned router with gates of 1": sparse(4 * ACTIVE, router="learned"),
    "a centroid router": sparse(4 * ACTIVE, router="centroid"),
}
"""Ablations with a sweep of their own."""
CHANGES: dict[str, tuple[Model, dict[str, Any]]] = {
    "groups of 32": (sparse(4 * ACTIVE, group_size=32), {}),
    "groups of 64": (sparse(4 * ACTIVE, group_size=64), {}),
    "the norm over all tokens": (sparse(4 * ACTIVE, theta_norm="all"), {}),
    "no load balancing": (sparse(4 * ACTIVE, balance_rate=0.0), {}),
    "a router that learns four times as fast": (sparse(4 * ACTIVE), {"router_rate": 4.0}),
    "tokens that learn twice as fast": (sparse(4 * ACTIVE), {"ffn_rate": 2.0}),
    "tokens that learn half as fast": (sparse(4 * ACTIVE), {"ffn_rate": 0.5}),
    "all groups active: dense n with gates": (sparse(ACTIVE), {}),
}
"""Ablations at the learning rate of sparse 4n: the model, and options of the run."""


def ablations(scale: Scale, results: Results) -> tuple[dict[str, Arm], dict[str, LanguageRun]]:
    """Return the ablations with a sweep of their own and those without, all at one seed."""
    swept = {name: tuned(model, scale, results) for name, model in ROUTERS.items()}
    single = {
        name: scale.fit(train(model, base.rate, **options))
        for base in tuned(MODELS[SPARSE_4], scale, results).runs[:1]
        for name, (model, options) in CHANGES.items()
    }
    return {name: Arm(arm.sweep, arm.runs[:1]) for name, arm in swept.items()}, single


CONTINUED, UPCYCLED, GROWN_DENSE, FROM_SCRATCH = (
    "dense n, trained further",
    "upcycled to sparse 4n",
    "grown to dense 4n",
    "sparse 4n from scratch",
)
GROWTHS = {
    CONTINUED: (),
    UPCYCLED: (Growth(sparse(4 * ACTIVE), method="upcycle"),),
    GROWN_DENSE: (Growth(dense(4 * ACTIVE), "shrink"),),
}


def growth_arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """Return the arms that train the models of `DENSE` further, and one that is sparse from the
    start; none until their rates are known."""
    bases = tuned(MODELS[DENSE], scale, results).runs
    rates = [run.rate for run in tuned(MODELS[SPARSE_4], scale, results).runs]
    if not bases or not rates:
        return {}
    start = train(MODELS[DENSE], bases[0].rate)
    found = {}
    for name, growth in GROWTHS.items():
        run = LanguageRun(start.model, (MORE_STEPS,), growth, start)
        found[name] = tune(
            lambda rate, run=run: scale.fit(replace(run, rate=rate)), FURTHER_RATES, scale, results
        )
    whole = replace(train(MODELS[SPARSE_4], rates[0]), steps=(STEPS + MORE_STEPS,))
    found[FROM_SCRATCH] = Arm([], [scale.fit(whole.with_seed(seed)) for seed in scale.seeds])
    return found


SHARES = (0.125, 0.25, 0.5, 0.75)
TUNED_SHARE = 0.25
DISTILLATION_RATES = (5e-4, 1e-3, 2e-3)
DISTILL_STEPS = 300
ROUTED, ROUTED_DISTILLED, THRESHOLDS, PRUNED, PRUNED_DISTILLED = (
    "routed",
    "routed, distilled",
    "thresholds",
    "pruned",
    "pruned, distilled",
)
METHODS = {
    ROUTED: ("routing", 0),
    ROUTED_DISTILLED: ("routing", DISTILL_STEPS),
    THRESHOLDS: ("threshold", 0),
    PRUNED: ("prune", 0),
    PRUNED_DISTILLED: ("prune", DISTILL_STEPS),
}
"""The method of a `SparsityRun` and its steps of distillation."""
Sparsified = dict[str, dict[float, list[SparsityRun]]]


def sparsified(scale: Scale, results: Results) -> tuple[list[SparsityRun], Sparsified]:
    """Return the sweeps of the distillation, and for every method the runs by share, made of the
    models of `DENSE_4`. Those that are distilled follow when the rate is known."""
    bases = tuned(MODELS[DENSE_4], scale, results).runs
    sweeps: list[SparsityRun] = []
    found: Sparsified = {name: {} for name in METHODS}
    if not bases:
        return sweeps, found
    start = train(MODELS[DENSE_4], bases[0].rate)
    for name, (method, steps) in METHODS.items():
        run = SparsityRun(start, method, TUNED_SHARE, GROUP, steps)
        runs = [run.with_seed(seed) for seed in scale.seeds]
        if steps:
            arm = tune(
                lambda rate, run=run: scale.fit(replace(run, rate=rate)),
                DISTILLATION_RATES,
                scale,
                results,
                metric="bits_per_byte",
            )
            sweeps += arm.sweep
            if not arm.runs:
                continue
            runs = [replace(one, rate=arm.runs[0].rate) for one in runs]
        for share in SHARES:
            found[name][share] = [scale.fit(replace(one, active=share)) for one in runs]
    return sweeps, found
