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
        layers_pattern: the name of the list of blocks, if peft does not find it: `layers`.
        norm: `shared`: new tokens are concatenated with the old, as the paper grows a model, and
            enter their norm; merging gives an ordinary, larger TokenFormer. `own`: they are a
            Pattention of their own, whose output is added.
        init: `zero`: the adapted model equals the base until it is trained. `norm="shared"` zeroes
            the keys, `norm="own"` the values, because all-zero scores have no gradient. `random`:
            both are random, which changes the output at once.
        init_seed: seed of the new tokens; by default torch's global generator.
        modules_to_save: other modules to train and save with the adapter, such as a classifier.
        base_fingerprint: a hash of the base's weights, set by the library. Loading the adapter on a
            base with a different hash raises `AdapterError`.
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
        by_number = self.layers_to_transform is not None or self.layers_pattern is not None
        if isinstance(self.target_modules, str) and by_number:
            raise ValueError(
                "layers_to_transform and layers_pattern need a list in target_modules; "
                f"{self.target_modules!r} is a regular expression, which can select blocks itself"
            )
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
