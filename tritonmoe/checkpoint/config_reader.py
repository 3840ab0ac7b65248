"""Strict access to the keys of a `config.json`: aliases, types, agreement, and what was never read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

from tritonmoe.errors import ConfigError
from tritonmoe.files import parse_json, read_file

logger = logging.getLogger(__name__)

T = TypeVar("T")
MISSING: Any = object()
MAX_CONFIG_BYTES = 16 << 20  # the largest published index.json is under 10 MB
MAX_INTEGER = (1 << 31) - 1  # of a size: kernels index with 32 bits

# Keys that only describe training, export or other programs. Everything else that nobody read is reported.
IGNORED_KEYS = frozenset(
    """
    _name_or_path architectures attention_dropout attn_implementation auto_map bos_token_id
    chunk_size_feed_forward decoder_start_token_id embd_pdrop embedding_dropout enable_moe_fp32_combine
    eod_token_id eos_token_id ep_size forced_eos_token_id hidden_dropout hidden_dropout_prob id2label
    im_end_id im_newline_id im_start_id image_token_id initial_context_length initializer_range label2id
    layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta max_window_layers
    mlp_dropout moe_capacity moe_drop_tokens moe_gate moe_layer_num_skipped moe_random_routing_dropped_token
    moe_use_aux_free mtp_layer_types mtp_mlp_layer_types mtp_transformer_layers num_mtp_layers
    num_mtp_modules num_nextn_predict_layers output_attentions output_hidden_states output_past
    output_router_logits pad_id pad_token_id pretraining_tp resid_pdrop return_dict router_aux_loss_coef
    router_jitter_noise router_z_loss_coef sep_token_id shared_moe_mode text_end_id text_start_id
    tokenizer_class transformers_version unsloth_fixed unsloth_version use_cache use_flash_attention
    """.split()
)


def read_json(path: Path, error: type[Exception] = ConfigError) -> dict[str, Any]:
    """The JSON object in `path`; `error` with one line when it is absent, unreadable or not an object."""
    try:
        value = parse_json(read_file(path, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{path}: not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def _is_moderate(value: float) -> bool:
    """Far enough from overflow that products and quotients of two such numbers are finite; not NaN."""
    return value == 0 or 1e-30 < abs(value) < 1e30


class ConfigReader:
    """One JSON object of a configuration; remembers which keys were read.

    `null` counts as absent, because published files use it so. A key under several spellings must say the same
    under each: two programs reading one file may otherwise run two different models.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()

    def raw(self, *names: str) -> Any:
        """The value under the first present spelling, or None; raises when spellings disagree."""
        self.read.update(names)
        present = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in present[1:]:
            if value != present[0][1]:
                raise ConfigError(
                    f"{self.where}: {present[0][0]} = {present[0][1]!r} but {name} = {value!r}; "
                    "they are two names of one setting, remove the wrong one"
                )
        return present[0][1] if present else None

    def integer(self, *names: str, default: Any = MISSING, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self._required(names, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            most = f" and at most {maximum}" if isinstance(value, int) and value > maximum else ""
            raise ConfigError(f"{self.where}: {names[0]} must be an integer of at least {minimum}{most}, not {value!r}")
        return value

    def number(self, *names: str, default: Any = MISSING, positive: bool = True) -> float:
        value = self._required(names, default)
        if value is default:
            return value
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_moderate(value)
        if not usable or (positive and value <= 0):
            kind = "a positive number" if positive else "a number"
            raise ConfigError(f"{self.where}: {names[0]} must be {kind}, not {value!r}")
        return float(value)

    def boolean(self, *names: str, default: Any = MISSING) -> bool:
        value = self._required(names, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {names[0]} must be true or false, not {value!r}")
        return value

    def strings(self, *names: str, length: int) -> list[str] | None:
        """A list of `length` strings, or None when absent."""
        value = self.raw(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.where}: {names[0]} must be a list of strings")
        if len(value) != length:
            raise ConfigError(f"{self.where}: {names[0]} has {len(value)} entries for {length} layers")
        return value

    def uniform(self, *names: str, default: Any = MISSING, maximum: int = MAX_INTEGER) -> int:
        """An integer, possibly written once per layer: then all entries must be equal."""
        value = self.raw(*names)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise ConfigError(f"{self.where}: {names[0]} differs between layers, which is not supported")
            self.values = {**self.values, **{name: value[0] for name in names if name in self.values}}
        return self.integer(*names, default=default, maximum=maximum)

    def require(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a value of `name` that would change the model in a way that is not implemented."""
        value = self.raw(name)
        values = value if isinstance(value, list) else [value]
        bad = [item for item in values if item is not None and item not in allowed]
        if bad:
            raise ConfigError(f"{self.where}: {name} = {bad[0]!r} is not supported (supported: {allowed[0]!r})")

    def child(self, *names: str) -> ConfigReader:
        """The reader of a nested object; of an empty one when absent."""
        value = self.raw(*names)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {names[0]} must be an object, not {value!r}")
        return ConfigReader(value or {}, f"{self.where}: {names[0]}")

    def unread(self) -> list[str]:
        """Keys that say something, that nobody read and that are not known to be irrelevant."""
        return sorted(
            key
            for key, value in self.values.items()
            if value is not None and key not in self.read and key not in IGNORED_KEYS
        )

    def report_unread(self) -> None:
        if self.unread():
            logger.warning("%s: not understood and ignored: %s", self.where, ", ".join(self.unread()))

    def _required(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.raw(*names)
        if value is not None:
            return value
        if default is MISSING:
            raise ConfigError(f"{self.where}: {names[0]} is missing")
        return default
