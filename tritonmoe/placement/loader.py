"""Where the experts of a model live: decided from what the user asked for and what fits, then loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tritonmoe.checkpoint.loading import load_weights, published_storage
from tritonmoe.errors import InputError
from tritonmoe.memory import available_bytes
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.operations import Operations, operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights, Storage, weight_bytes
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import RESIDENT, TRAINED_PREDICTORS, Policy, resolve
from tritonmoe.placement.memory_plan import MemoryPlan, format_bytes, plan, read_budget
from tritonmoe.placement.storage import AUTO, PUBLISHED, WANTED_SHARE, Divided, choose, resolve_storage
from tritonmoe.prediction.estimator import Estimator, estimator_bytes
from tritonmoe.prediction.files import PredictionFiles
from tritonmoe.prediction.predictors import HostPredictor, Predictor, RouterPredictor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """What was asked for; None leaves the choice to `load_decoder`.

    `policy` is the name of a preset, `overrides` what replaces its choices (arguments of `policy.resolve`);
    `measure` has the true routers evaluated too where guesses are executed, for the report: it costs time.
    `gpu_memory` and `expert_slots` are written as on the command line: "10GiB" or "80%", "512" or "25%"; so are
    `expert_dtype` and `dense_dtype`, the forms in which weights are kept, and `embedding`, where that is.
    """

    policy: str | None = None
    gpu_memory: str | None = None
    expert_slots: str | None = None
    default_vectors: Path | None = None
    estimator: Path | None = None
    hybrid: Path | None = None
    measure: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    expert_dtype: str = PUBLISHED
    dense_dtype: str = PUBLISHED
    embedding: str = "device"

    @property
    def leaves_policy_open(self) -> bool:
        """Whether nothing was asked for but an amount of memory."""
        files = self.default_vectors, self.estimator, self.hybrid
        return not any((self.policy, self.expert_slots, *files, self.measure, self.overrides))

    @property
    def is_open(self) -> bool:
        """Whether nothing was asked for that depends on the amount of memory."""
        return self.gpu_memory is None and self.leaves_policy_open and self.expert_dtype != AUTO


@dataclass(frozen=True)
class Loading:
    """How to read the checkpoint."""

    folder: Path
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    check_finite: bool = True
    check_memory: bool = True
    progress: bool = False

    def weights(self, storage: Storage, store: ExpertStore | None = None) -> ModelWeights:
        return load_weights(
            self.folder,
            self.spec,
            self.device,
            self.dtype,
            check_finite=self.check_finite,
            check_memory=self.check_memory,
            progress=self.progress,
            store=store,
            storage=storage,
        )


def load_decoder(
    loading: Loading, placement: Placement, max_context: int, batch: int = 1, check: str | None = None
) -> tuple[Decoder, MemoryPlan | None]:
    """Divide the memory, load the weights, put the experts where they belong; the division is None where it is open.
    `check` is the kind of --check that will run beside, which takes some of it.

    Nothing asked for: all experts on the device where they fit, else in host memory under the policy "exact"; on a CPU,
    where both are the same memory, on the device. InputError where it does not fit.
    """
    spec, device = loading.spec, loading.device
    published = replace(
        published_storage(loading.folder, spec), embedding_on_host=_embedding_on_host(placement, device)
    )
    storages = resolve_storage(placement.expert_dtype, placement.dense_dtype, spec, loading.dtype, published)
    if placement.is_open and device.type == "cpu":
        return Decoder(spec, loading.weights(storages[0])), None
    files = PredictionFiles.found(loading.folder, placement.default_vectors, placement.estimator, placement.hybrid)
    policy, storage, division = decide(loading, placement, storages, max_context, batch, files, check)
    for line in division.lines():
        logger.info("%s", line)
    if policy.is_resident:
        return Decoder(spec, loading.weights(storage)), division
    store = ExpertStore.allocate(spec, loading.dtype, storage)
    weights = loading.weights(storage, store)
    ops = operations(device)
    vectors = files.load_vectors(spec, weights) if policy.uses_default_vectors else None
    defaults = None if vectors is None else vectors.by_layer(spec, device, loading.dtype)
    estimator, kinds = files.load_trained(policy.predictor, spec, weights, vectors)
    if estimator is not None:
        estimator = estimator.to(device, loading.dtype)
    predictor = make_predictor(policy, ops, spec, weights, defaults, estimator, kinds)
    logger.info("%s", policy)
    experts = OffloadedExperts(
        ops, spec, weights, store, division.num_slots, policy, predictor, defaults, placement.measure
    )
    return Decoder(spec, weights, ops, experts), division


def _embedding_on_host(placement: Placement, device: torch.device) -> bool:
    if placement.embedding not in ("device", "host"):
        raise InputError(f"--embedding {placement.embedding!r} is not known; use device or host")
    if placement.embedding == "host" and device.type == "cpu":
        raise InputError("--embedding host: there is no GPU, and all is in main memory; leave it out")
    return placement.embedding == "host"


def decide(
    loading: Loading,
    placement: Placement,
    storages: list[Storage],
    max_context: int,
    batch: int,
    files: PredictionFiles,
    check: str | None = None,
) -> tuple[Policy, Storage, MemoryPlan]:
    """The form of the experts, with the policy that is run and the division of memory for it; says what decided."""

    def divide(storage: Storage) -> Divided:
        return _divide(loading, placement, storage, max_context, batch, files, check)

    storage, reason = storages[0], None
    if placement.expert_dtype == AUTO:
        if placement.expert_slots is not None:
            raise InputError(
                "--expert-dtype auto decides by the slots that forms leave room for; leave out --expert-slots"
            )
        # On a CPU the budget already takes account of the store.
        is_bounded = loading.device.type != "cpu" and loading.check_memory
        free = available_bytes(torch.device("cpu")) if is_bounded else sys.maxsize
        storage, divided, reason = choose(storages, loading.dtype, divide, free)
    else:
        divided = divide(storage)
        if placement.expert_dtype == PUBLISHED and placement.expert_slots is None:
            reason = _advice(divided.plan, storages[1:], divide)
    for text in (divided.remark, reason):
        if text is not None:
            logger.info("%s", text)
    return divided.policy, storage, divided.plan


def _advice(division: MemoryPlan, narrower: list[Storage], divide: Callable[[Storage], Divided]) -> str | None:
    """What fewer bits would bring where most experts have to come over the link."""
    if division.slot_share >= WANTED_SHARE or not narrower:
        return None
    storage = narrower[-1]
    assert storage.experts is not None
    narrow = divide(storage).plan
    return (
        f"--expert-dtype {storage.experts.name} would give slots for {100 * narrow.slot_share:.3g} % of the experts "
        f"instead of {100 * division.slot_share:.3g} %, with {format_bytes(narrow.host_bytes)} of main memory instead "
        f"of {format_bytes(division.host_bytes)}; outputs are then not the model's own"
    )


def _divide(
    loading: Loading,
    placement: Placement,
    storage: Storage,
    max_context: int,
    batch: int,
    files: PredictionFiles,
    check: str | None,
) -> Divided:
    """The policy that is run and the division of memory for it."""
    spec, device, dtype = loading.spec, loading.device, loading.dtype
    store_bytes = weight_bytes(spec, dtype, storage=storage) - weight_bytes(spec, dtype, False, storage)
    budget = read_budget(placement.gpu_memory, device, store_bytes)

    def divided(policy: Policy) -> MemoryPlan:
        uses_file = policy.predictor in TRAINED_PREDICTORS and files.estimator is not None
        network = estimator_bytes(files.estimator, dtype) if uses_file and files.estimator is not None else 0
        slots = placement.expert_slots
        return plan(spec, dtype, device, policy, budget, max_context, batch, slots, storage, network, check)

    if placement.leaves_policy_open:
        with suppress(InputError):  # it does not fit
            return Divided(resolve(RESIDENT), divided(resolve(RESIDENT)), None)
    policy, line = resolve(placement.policy or "exact", **placement.overrides).effective(
        files.vectors is not None, files.trained
    )
    if policy.predictor == "oracle":
        raise InputError("--predict oracle replays a trace, which tools/replay.py does; use another predictor")
    if placement.measure and policy.execute != "speculated":
        raise InputError("--measure compares executed guesses with the routers; it needs --execute speculated")
    if placement.default_vectors is not None and not policy.uses_default_vectors:
        raise InputError(f"--default-vectors has no effect with --predict {policy.predictor}; leave it out")
    for option, file, users in (("--estimator", placement.estimator, TRAINED_PREDICTORS),
                                ("--hybrid", placement.hybrid, ("hybrid",))):  # fmt: skip
        if file is not None and policy.predictor not in users:
            raise InputError(f"{option} has no effect with --predict {policy.predictor}; leave it out")
    return Divided(policy, divided(policy), line)


def make_predictor(
    policy: Policy,
    ops: Operations,
    spec: ModelSpec,
    weights: ModelWeights,
    defaults: torch.Tensor | None,
    estimator: Estimator | None = None,
    kinds: Mapping[int, str] | None = None,
) -> Predictor:
    """What foretells experts under `policy`, with default vectors [layers, E, H] and an estimator where it uses them;
    `kinds` as for `RouterPredictor`."""
    if policy.predictor == "none":
        return Predictor()
    if policy.predictor == "previous-token":
        return HostPredictor(spec, policy.lookahead)
    vectors = None if policy.predictor == "residual" else defaults
    return RouterPredictor(ops, spec, weights, policy.lookahead, policy.candidates, vectors, estimator, kinds)
