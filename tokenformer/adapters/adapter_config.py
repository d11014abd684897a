"""The configuration of a token adapter."""

from dataclasses import dataclass, field

from peft import PeftConfig

from tokenformer.adapters.peft_registration import TOKEN_ADAPTER

NORMS = ("shared", "own")
INITS = ("zero", "random")


@dataclass
class TokenAdapterConfig(PeftConfig):
    """Options of a token adapter.

    Args:
        num_tokens: tokens to add to each layer.
        target_modules: the layers to add them to, by the end of their names: `ffn`, `q`, `k`, `v`,
            `o`; or a regular expression.
        exclude_modules: layers to leave out, in the same way.
        layers_to_transform: the numbers of the blocks to adapt; all by default.
        norm: `shared`: new tokens are concatenated with the old, as the paper grows a model, and
            enter their norm; merging gives an ordinary, larger TokenFormer. `own`: they are a
            Pattention of their own, whose output is added.
        init: `zero`: the adapted model equals the base until it is trained. The keys are zero, with
            `norm="own"` the values, because a row of zero scores has no gradient. `random`: both
            are random, which changes the output at once.
        init_seed: seed of the new random values; by default torch's global generator.
        base_fingerprint: a hash of the base's weights, set by the library. A base with another one
            refuses the adapter.
    """

    num_tokens: int = 32
    target_modules: list[str] | str | None = field(default_factory=lambda: ["ffn"])
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    norm: str = "shared"
    init: str = "zero"
    init_seed: int | None = None
    modules_to_save: list[str] | None = None
    base_fingerprint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = TOKEN_ADAPTER
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")
        for name, value, known in (("norm", self.norm, NORMS), ("init", self.init, INITS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
