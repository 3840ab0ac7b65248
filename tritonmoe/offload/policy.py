"""How experts get to the device and which of them run: the choices behind `--policy`, resolved once and then frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tritonmoe.errors import InputError
from tritonmoe.model.spec import ModelSpec, MoeSpec

PredictorName = Literal["none", "residual", "quasi-hidden", "estimator", "hybrid", "previous-token", "oracle"]
Source = Literal["routed", "speculated"]
MissFill = Literal["none", "default-vector"]
EvictionName = Literal["lru", "lfu"]
Prefetch = Literal["auto", "always"]

RESIDENT = "resident"
ROUTER_FREE = "router-free"
PRESET_NAMES = ("on-demand", "exact", "router-pf", "est-pf", "hybrid-pf", ROUTER_FREE, RESIDENT)
MAX_LOOKAHEAD = 3  # layers
MOST_BIAS = 10_000  # of a router's logits
LEAST_HIDING_BYTES = 32 << 20  # of a layer's records: behind so many (0.6 ms at 54 GB/s) the host's work is hidden
# They rank every expert of a layer; the others name the K that were or will be routed, and no gate weights.
RANKING_PREDICTORS = ("residual", "quasi-hidden", "estimator", "hybrid")
TRAINED_PREDICTORS = ("estimator", "hybrid")  # they foretell the next layer only
CALIBRATE = "tools/calibrate.py makes them"
MAKERS = {"estimator": "tools/train_estimator.py", "hybrid": "tools/calibrate.py --choose-hybrid"}
OPTIONS = {
    "predictor": "--predict",
    "execute": "--execute",
    "gate": "--gate",
    "lookahead": "--lookahead",
    "candidates": "--candidates",
    "miss_tolerance": "--miss-tolerance",
    "miss_fill": "--miss-fill",
    "cache_bias": "--cache-bias",
    "eviction": "--eviction",
    "prefetch": "--prefetch",
}
CHOICES: dict[str, Sequence[str]] = {
    "predictor": get_args(PredictorName),
    "execute": get_args(Source),
    "gate": get_args(Source),
    "miss_fill": get_args(MissFill),
    "eviction": get_args(EvictionName),
    "prefetch": get_args(Prefetch),
}


@dataclass(frozen=True)
class Policy:
    """Prediction, execution and eviction, valid together; InputError says in one line why they are not.

    `predictor` foretells the experts of the next `lookahead` layers, the model's K and `candidates` more; they are
    prefetched. `execute` "routed" runs the experts that the true router chose, so that outputs are the model's own;
    "speculated" runs what the layer before foretold, weighted by the true router (`gate` "routed") or by the guess
    ("speculated"). Missing experts to which every token gives a share of its gate mass below `miss_tolerance` are left
    out, `miss_fill` "default-vector" putting their mean output in their place. `cache_bias` is added to the router's
    logits of experts that have a slot, for the choice among them alone. `prefetch` "auto" stops fetching ahead for
    layers where that wastes more than it brings, "always" never. `name` is the preset that it was made from.
    """

    name: str
    predictor: PredictorName = "none"
    execute: Source = "routed"
    gate: Source = "routed"  # "speculated" only where `execute` is
    lookahead: int = 1
    candidates: int = 0
    miss_tolerance: float = 0.0
    miss_fill: MissFill = "none"
    cache_bias: float = 0.0
    eviction: EvictionName = "lru"
    prefetch: Prefetch = "auto"

    def __post_init__(self) -> None:
        _require_known("--policy", self.name, PRESET_NAMES)
        for field, choices in CHOICES.items():
            _require_known(OPTIONS[field], getattr(self, field), choices)
        if not _is_integer(self.lookahead) or not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise InputError(f"--lookahead must be an integer from 1 to {MAX_LOOKAHEAD}, not {self.lookahead!r}")
        if not _is_integer(self.candidates) or self.candidates < 0:
            raise InputError(f"--candidates must be an integer from 0, not {self.candidates!r}")
        if not _is_share(self.miss_tolerance):
            raise InputError(f"--miss-tolerance must be a number from 0 to below 1, not {self.miss_tolerance!r}")
        if not _is_bias(self.cache_bias):
            raise InputError(f"--cache-bias must be a number from 0 to {MOST_BIAS}, not {self.cache_bias!r}")
        self._check_resident()
        self._check_prediction()
        self._check_execution()

    def _check_resident(self) -> None:
        if not self.is_resident:
            return
        plain = Policy("on-demand")
        for field, option in OPTIONS.items():
            if getattr(self, field) != getattr(plain, field):
                raise _idle_with_resident(option)

    def _check_prediction(self) -> None:
        if self.predictor == "none" and self.lookahead > 1:
            raise InputError("--lookahead has no effect without a predictor; add --predict residual, or leave it out")
        if self.predictor == "none" and self.prefetch == "always":
            raise InputError("--prefetch always has no effect without a predictor; add --predict, or leave it out")
        if self.candidates > 0 and self.predictor not in RANKING_PREDICTORS:
            raise InputError(
                f"--candidates needs a predictor that ranks all experts, which {self.predictor!r} does not; "
                f"use --predict {_listed(RANKING_PREDICTORS)}, or leave it out"
            )

        if self.lookahead > 1 and self.predictor in TRAINED_PREDICTORS:
            raise InputError(
                f"--lookahead above 1 needs --predict {_listed(RANKING_PREDICTORS[:2])}: an estimator is trained to "
                "foretell the next layer"
            )

    def _check_execution(self) -> None:
        if self.is_router_free and (self.execute, self.gate) != ("speculated", "speculated"):
            option = "--execute" if self.execute != "speculated" else "--gate"
            raise InputError(f"{option} routed needs the routers that --policy router-free does without; use est-pf")
        if self.is_router_free and self.predictor not in TRAINED_PREDICTORS:
            raise InputError("--policy router-free needs --predict estimator or hybrid; else use --policy router-pf")
        if self.execute == "routed":
            if self.gate != "routed":
                raise _idle_gate()
            if self.miss_fill != "none" and self.miss_tolerance == 0.0:
                raise InputError("--miss-fill has no effect without --miss-tolerance; give it a value above 0")
            return
        if self.predictor not in RANKING_PREDICTORS:
            raise InputError(
                f"--execute speculated runs what a predictor ranks, and {self.predictor!r} ranks nothing; "
                f"use --predict {_listed(RANKING_PREDICTORS)}"
            )
        if self.prefetch == "always":
            raise InputError("--prefetch always has no effect with --execute speculated, which needs what is foretold")
        if self.candidates > 0:
            raise InputError(
                "--candidates needs --execute routed: speculated execution runs the best K and would waste the others"
            )
        if self.miss_tolerance > 0.0 or self.miss_fill != "none":
            option = "--miss-tolerance" if self.miss_tolerance > 0.0 else "--miss-fill"
            raise InputError(f"{option} needs --execute routed: what is speculated was fetched, so nothing is missing")
        if self.cache_bias > 0.0:
            raise InputError("--cache-bias needs --execute routed: what is speculated is fetched whatever has a slot")

    @property
    def is_resident(self) -> bool:
        """Whether every expert stays on the device, so that there are no slots."""
        return self.name == RESIDENT

    @property
    def is_exact(self) -> bool:
        """Whether outputs are the model's own, bit for bit."""
        return self.execute == "routed" and self.miss_tolerance == 0.0 and self.cache_bias == 0.0

    @property
    def is_router_free(self) -> bool:
        """Whether no router but the first is evaluated, in prompts neither."""
        return self.name == ROUTER_FREE

    @property
    def guards_prefetch(self) -> bool:
        """Whether prefetching may stop where it loses. Elsewhere that would change what runs next, and what is foretold
        further ahead is not told apart."""
        return self.predictor != "none" and self.execute == "routed" and self.prefetch == "auto"

    @property
    def uses_default_vectors(self) -> bool:
        return self.predictor in RANKING_PREDICTORS[1:] or self.miss_fill == "default-vector"

    def effective(self, has_default_vectors: bool, trained: Sequence[str] = ()) -> tuple[Policy, str | None]:
        """The policy as it can run, and one line to print where that is not the one that was asked for.

        `trained` names the predictors whose files there are. Without default vectors `quasi-hidden` is `residual`.
        Nothing can stand in for a default vector as an expert's output, so filling in with them raises InputError, as
        does a trained predictor without its file.
        """
        if self.predictor in TRAINED_PREDICTORS and self.predictor not in trained:
            raise InputError(
                f"--predict {self.predictor} needs a file made for this model by {MAKERS[self.predictor]}; "
                "make it, or use --predict quasi-hidden"
            )
        if has_default_vectors or not self.uses_default_vectors:
            return self, None
        if self.miss_fill == "default-vector":
            raise InputError(
                f"--miss-fill default-vector needs the model's default vectors ({CALIBRATE}); or use --miss-fill none"
            )
        if self.predictor != "quasi-hidden":
            return self, None
        line = f"no default vectors for this model ({CALIBRATE}): --predict quasi-hidden runs as residual"
        return replace(self, predictor="residual"), line

    def __str__(self) -> str:
        """One line with every choice that has an effect."""
        if self.is_resident:
            return self.name
        parts = [f"predict {self.predictor}"]
        if self.predictor != "none":
            parts += [f"lookahead {self.lookahead}", f"candidates {self.candidates}"]
            parts += ["prefetch always"] if self.prefetch == "always" else []
        parts.append(f"execute {self.execute}" + (f" (gate {self.gate})" if self.execute == "speculated" else ""))
        if self.miss_tolerance > 0.0:
            parts.append(f"miss tolerance {self.miss_tolerance:g} (fill {self.miss_fill})")
        if self.cache_bias > 0.0:
            parts.append(f"cache bias {self.cache_bias:g}")
        return f"{self.name}: {', '.join(parts)}, eviction {self.eviction}"


def minimum_slots(spec: ModelSpec, policy: Policy, batch: int = 1) -> int:
    """The fewest slots in which a decode step of `batch` sequences runs without dividing a layer into waves.

    A layer's experts are all in use while those of the next `lookahead` layers arrive, the nearest of them with its
    extra candidates: K · (1 + lookahead) + candidates for one sequence, K without a predictor. Fewer work
    too, and slower, for whoever asks for them with --expert-slots. With so few, what was foretold wrongly two layers
    ahead keeps some of what is foretold one layer ahead from being fetched before it is needed.
    """
    moes = spec.moe_layers.values()
    routed = max(_distinct(moe, batch, 0) for moe in moes)
    if policy.predictor == "none":
        return routed
    foretold = max(_distinct(moe, batch, policy.candidates) for moe in moes)
    return min(sum(moe.num_experts for moe in moes), routed * policy.lookahead + foretold)


def should_host_plan(spec: ModelSpec, policy: Policy, num_slots: int, record_bytes: int, batch: int = 1) -> bool:
    """Whether decode steps are faster where the host plans them and starts their copies, on a device that can.

    Slots that do not hold one step's experts hold none that the next one asks for, as layers come round in order; the
    link alone decides then, and the copy engine moves records 6 % faster than kernels that read host memory
    (docs/offload.md). The host's work is hidden only behind what is fetched ahead. Measured for one sequence alone:
    several share experts, so that what a step asks for is not known beforehand.
    """
    if batch > 1 or policy.predictor == "none" or policy.eviction != "lru":
        return False
    fewest = min(moe.num_experts_per_tok for moe in spec.moe_layers.values())
    return not holds_a_step(spec, num_slots) and fewest * record_bytes >= LEAST_HIDING_BYTES


def holds_a_step(spec: ModelSpec, num_slots: int) -> bool:
    """Whether the slots hold all experts that a step of one sequence asks for; else they hold none that it finds."""
    return num_slots >= sum(moe.num_experts_per_tok for moe in spec.moe_layers.values())


def _distinct(moe: MoeSpec, batch: int, candidates: int) -> int:
    """The most different experts that `batch` tokens can ask for, each its K and `candidates` more."""
    return min(moe.num_experts, batch * (moe.num_experts_per_tok + candidates))


def _require_known(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{option} {value!r} is not known; use {_listed(known)}")


def _idle_gate() -> InputError:
    return InputError("--gate weights speculated experts; add --execute speculated, or leave it out")


def _idle_with_resident(option: str) -> InputError:
    return InputError(
        f"{option} has no effect with --policy resident, where no expert is ever fetched; leave it out, "
        "or use --policy exact"
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1  # false for NaN


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_BIAS


def _speculating(name: str, predictor: PredictorName) -> Policy:
    return Policy(name, predictor=predictor, execute="speculated", gate="speculated")


PRESETS: dict[str, Policy] = {
    "on-demand": Policy("on-demand"),
    "exact": Policy("exact", predictor="quasi-hidden"),
    "router-pf": _speculating("router-pf", "quasi-hidden"),
    "est-pf": _speculating("est-pf", "estimator"),
    "hybrid-pf": _speculating("hybrid-pf", "hybrid"),
    ROUTER_FREE: _speculating(ROUTER_FREE, "estimator"),
    RESIDENT: Policy(RESIDENT),
}


def resolve(
    preset: str,
    *,
    predictor: str | None = None,
    execute: str | None = None,
    gate: str | None = None,
    lookahead: int | None = None,
    candidates: int | None = None,
    miss_tolerance: float | None = None,
    miss_fill: str | None = None,
    cache_bias: float | None = None,
    eviction: str | None = None,
    prefetch: str | None = None,
) -> Policy:
    """A preset with what the command line gave (None: not given) in place of its own choices.

    Raises InputError with one line that names the option for anything unknown, out of range or without effect.
    """
    _require_known("--policy", preset, PRESET_NAMES)
    base = PRESETS[preset]
    values = {
        "predictor": predictor,
        "execute": execute,
        "gate": gate,
        "lookahead": lookahead,
        "candidates": candidates,
        "miss_tolerance": miss_tolerance,
        "miss_fill": miss_fill,
        "cache_bias": cache_bias,
        "eviction": eviction,
        "prefetch": prefetch,
    }
    given = {field: value for field, value in values.items() if value is not None}
    if base.is_resident and given:
        raise _idle_with_resident(OPTIONS[next(iter(given))])
    if execute == "routed" and gate is None:
        given["gate"] = "routed"  # that of the preset was meant for speculated execution
    policy = replace(base, **given)
    if gate is not None and policy.execute == "routed":
        raise _idle_gate()
    return policy
