"""The model's shape, and how its layers are cut into stages.

Knows sizes only: no tensors, no costs, no ranks. Presets are JSON files inside the package, each
figure with its source.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from operator import index
from typing import Any, Literal

from terapipe.errors import ConfigError, check_integer, check_keys, unknown_name

_CHOICES = {
    "position": ("learned", "rotary"),
    "activation": ("gelu", "swiglu"),
    "norm": ("layernorm", "rmsnorm"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only causal language model (pre-norm).

    Parameters
    ----------
    n_layers, d_model, n_heads : int
        Transformer layers, width, and query heads of `d_model / n_heads` features each.
    n_kv_heads : int, optional
        Key and value heads (grouped-query attention); default `n_heads`.
    d_ff : int, optional
        Width of the feed-forward layer; default `4 * d_model`.
    vocab_size, max_seq_tokens : int
        Number of tokens known, and the longest sequence.
    position : "learned" or "rotary"
        `rope_theta` is the base of the rotary angles.
    activation, norm, norm_eps, bias, tied_embedding, dropout
        GELU or SwiGLU; LayerNorm or RMSNorm; biases in linear layers and LayerNorm; whether the
        output head is the embedding; dropout on embeddings and residual branches.

    Raises
    ------
    ConfigError
        Where a size is not positive, heads do not divide, or a name is unknown.
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int | None = None
    d_ff: int | None = None
    vocab_size: int = 256
    max_seq_tokens: int = 2048
    position: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 1e4
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    bias: bool = True
    tied_embedding: bool = True
    dropout: float = 0.0

    def __new__(cls, *args: Any, **values: Any) -> "ModelConfig":  # noqa: D102 - only to name the nearest valid key
        check_keys("model", values, (field.name for field in fields(cls)), ConfigError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        self._check_sizes()
        self._check_heads()

    def _check_sizes(self) -> None:
        least = {"vocab_size": 2}
        for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "max_seq_tokens"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least.get(name, 1), ConfigError))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(unknown_name(name, getattr(self, name), allowed))
        for name in ("bias", "tied_embedding"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: needs True or False.")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout!r}: needs a number, 0 ≤ dropout < 1.")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r}: needs a positive number.")

    def _check_heads(self) -> None:
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}: every head needs the "
                f"same width. Change one so that it divides, e.g. d_model={self.n_heads * -(-self.d_model // self.n_heads)}."
            )
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.kv_heads}: "
                "each key/value head serves the same number of query heads."
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise ConfigError(f"position='rotary' rotates pairs of features, so d_model/n_heads={self.head_dim} must be even.")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.d_model // self.n_heads

    @property
    def ff_dim(self) -> int:
        """Width of the feed-forward layer."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The model of `to_dict`'s values; unknown keys are refused."""
        check_keys("model", values, (field.name for field in fields(cls)), ConfigError)
        missing = [name for name in ("n_layers", "d_model", "n_heads") if name not in values]
        if missing:
            raise ConfigError(f"a model needs {', '.join(missing)}; given: {', '.join(values) or 'nothing'}.")
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """A published or ready-made model by name; `presets/models.json` states each one's source."""
        presets = json.loads(resources.files("terapipe").joinpath("presets/models.json").read_text("utf-8"))
        if name not in presets:
            raise ConfigError(unknown_name("model preset", name, presets))
        return cls.from_dict({key: value for key, value in presets[name].items() if key != "source"})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def split_layers(n_layers: int, n_stages: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """Cut layers 0…n_layers−1 into one contiguous range a stage, every layer exactly once.

    Parameters
    ----------
    n_layers, n_stages : int
        Without `layers_per_stage` the lengths differ by at most one, longer ranges first.
    layers_per_stage : list of int, optional
        Number of layers on each stage, at least one.

    Raises
    ------
    ConfigError
        With more stages than layers, or counts that drop or repeat a layer.
    """
    if n_stages < 1:
        raise ConfigError(f"n_stages={n_stages}: needs at least one stage.")
    if n_stages > n_layers:
        raise ConfigError(
            f"{n_stages} stages for {n_layers} layers: every stage needs a layer. "
            f"Use at most {n_layers} stages (n_ranks × chunks_per_rank), or a deeper model."
        )
    if layers_per_stage is None:
        whole, rest = divmod(n_layers, n_stages)
        layers_per_stage = [whole + (stage < rest) for stage in range(n_stages)]
    try:
        layers_per_stage = [index(count) for count in layers_per_stage]
    except TypeError:
        raise ConfigError(f"layers_per_stage={layers_per_stage!r}: needs a list of the stages' numbers of layers.") from None
    if len(layers_per_stage) != n_stages:
        raise ConfigError(f"layers_per_stage={layers_per_stage} names {len(layers_per_stage)} stages; there are {n_stages}.")
    if min(layers_per_stage) < 1:
        raise ConfigError(f"layers_per_stage={layers_per_stage}: every stage needs at least one layer.")
    total = sum(layers_per_stage)
    if total != n_layers:
        fault = "would drop" if total < n_layers else "would repeat"
        raise ConfigError(
            f"layers_per_stage={layers_per_stage} adds up to {total}, the model has {n_layers} layers: "
            f"it {fault} {abs(total - n_layers)}. Make the counts add up to {n_layers}."
        )
    ends = [sum(layers_per_stage[: stage + 1]) for stage in range(n_stages)]
    return [range(end - count, end) for end, count in zip(ends, layers_per_stage, strict=True)]
