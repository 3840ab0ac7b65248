"""The estimator and the hybrid choice: files and the models they belong to, what they foretell, and what runs on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_device_scheduler import on_device
from test_offload import DEVICE, Offloaded, generate, make_spec, noise
from test_offload import estimator as small_estimator

from tritonmoe import Engine
from tritonmoe.errors import InputError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.moe import Experts
from tritonmoe.model.operations import operations
from tritonmoe.offload.policy import resolve
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.default_vectors import model_identity
from tritonmoe.prediction.estimator import NO_VECTORS, Estimator, estimator_bytes, load_estimator
from tritonmoe.prediction.hybrid import HybridChoice, load_hybrid
from tritonmoe.prediction.predictors import RouterPredictor
from tritonmoe_kernels import reference
from tritonmoe_kernels.routing import NormRouterOutput

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
SPEC = make_spec("qwen3")
WEIGHTS = noise(SPEC)


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "estimator.safetensors"
    estimator = replace(Estimator.initial(SPEC, 24, 40, True, "sha256:v", seed=1), **changes)
    estimator.save(path, model_identity(SPEC, WEIGHTS), {"tokens": 7})
    return path


def test_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = load_estimator(path, SPEC, WEIGHTS, "sha256:v")
    expected = Estimator.initial(SPEC, 24, 40, True, "sha256:v", seed=1)
    assert all(map(torch.equal, found.shared, expected.shared))
    assert (found.corrects, found.vectors) == (True, "sha256:v")
    assert not load_estimator(saved(tmp_path, corrects=False), SPEC, WEIGHTS, "sha256:v").corrects
    assert estimator_bytes(path, torch.bfloat16) == 2 * found.num_parameters
    assert estimator_bytes(tmp_path / "missing", torch.bfloat16) == 0
    with pytest.raises(InputError, match="cannot be written"):
        found.save(tmp_path / "missing" / "x", "", {})


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        (r"into is float32 \[24, 7\] where this model has \[24, 32\]", "into", torch.zeros(24, 7)),
        (r"layer is float32 \[2, 24\] where this model has \[3, 24\]", "layer", torch.zeros(2, 24)),
        (r"head is float32 \[9, 24\] where this model has \[8, 24\]", "head", torch.zeros(9, 24)),
        (r"down is float16 \[24, 40\]", "down", torch.zeros(24, 40).half()),
        ("NaN or infinite", "up", torch.full((40, 24), float("nan"))),
    ],
)
def test_files_of_other_shapes_are_refused(tmp_path: Path, match: str, name: str, change: torch.Tensor) -> None:
    shared = Estimator.initial(SPEC, 24, 40, True, "sha256:v", seed=1).shared
    with pytest.raises(InputError, match=match):
        load_estimator(saved(tmp_path, shared=shared._replace(**{name: change})), SPEC, WEIGHTS, "sha256:v")


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(InputError, match="the estimator of another model"):
        load_estimator(path, SPEC, noise(SPEC, seed=1), "sha256:v")
    with pytest.raises(InputError, match="trained with other default vectors"):
        load_estimator(path, SPEC, WEIGHTS, NO_VECTORS)
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a safetensors file"):
        load_estimator(path, SPEC, WEIGHTS, "sha256:v")
    with pytest.raises(InputError, match="one layer with experts"):
        Estimator.initial(replace(SPEC, layers=SPEC.layers[:1]), 24, 40, True, NO_VECTORS, seed=1)


def test_hybrid_file(tmp_path: Path) -> None:
    path, model = tmp_path / "hybrid.json", model_identity(SPEC, WEIGHTS)
    choice = HybridChoice({1: "estimator", 2: "residual", 3: "quasi-hidden"})
    choice.save(path, model, {"rule": "a test"})
    assert load_hybrid(path, SPEC, WEIGHTS) == choice
    assert json.loads(path.read_text())["why"] == {"rule": "a test"}
    with pytest.raises(InputError, match="the choice for another model"):
        load_hybrid(path, SPEC, noise(SPEC, seed=1))
    for layers in ({1: "estimator", 2: "residual"}, {1: "estimator", 2: "residual", 3: "oracle"}):
        HybridChoice(layers).save(path, model, {})
        with pytest.raises(InputError, match="does not name a predictor for every layer"):
            load_hybrid(path, SPEC, WEIGHTS)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "layers": {"1": ["residual"], "2": {}, "3": "residual"}}))
    with pytest.raises(InputError, match="does not name a predictor for every layer"):
        load_hybrid(path, SPEC, WEIGHTS)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(InputError, match="not JSON"):
            load_hybrid(path, SPEC, WEIGHTS)


def routings(count: int) -> list[NormRouterOutput]:
    """What every layer's routing gave for a prompt of so many tokens."""
    decoder = Decoder(SPEC, WEIGHTS)
    found: list[NormRouterOutput] = []
    decoder.hooks.on_routed = lambda _, routed: found.append(routed)
    prompt = torch.arange(count, device=DEVICE)[None] % SPEC.vocab_size
    decoder.prefill(prompt, 0, KVCache.allocate(SPEC, 1, count, DEVICE, torch.float32))
    return found


@pytest.mark.parametrize("corrects", [False, True])
def test_few_and_many_tokens_are_foretold_alike(corrects: bool) -> None:
    """By the definition, one token at a time: norm, network, and the router's logits where it corrects them."""
    vectors = 0.1 * torch.randn(4, 8, SPEC.hidden_size, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    network = replace(small_estimator(SPEC), corrects=corrects)
    kinds = {1: "estimator", 2: "residual", 3: "estimator"}
    predictor = RouterPredictor(operations(DEVICE), SPEC, WEIGHTS, 1, 2, vectors, network, kinds)
    routed = routings(9)
    for layer in range(3):
        few, many = (
            predictor.guess(layer, layer + 1, routed[layer]),
            predictor.guess_prompt(layer, routed[layer])[layer + 1],
        )
        torch.testing.assert_close(few.logits, many.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(few.ids, many.ids)
        assert few.ids.shape == (9, 4)
        for token in range(9):
            quasi = routed[layer].residual[token].clone()
            for expert, weight in zip(routed[layer].topk_ids[token], routed[layer].topk_weights[token], strict=True):
                quasi += 0.0 if layer == 1 else weight * vectors[layer, expert]
            later = WEIGHTS.layers[layer + 1]
            assert later.moe is not None
            q = reference.rms_norm(quasi, later.post_norm, SPEC.norm_epsilon)
            logits = later.moe.router @ q
            if layer != 1:
                h = network.shared.into @ q + network.shared.layer[layer]
                inner = network.shared.up @ h
                h = h + network.shared.down @ (inner * inner.sigmoid())
                h = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()  # its weight is 1 and its bias 0
                logits = network.shared.head @ h + (logits if corrects else 0.0)
            torch.testing.assert_close(many.logits[token], logits, rtol=1e-3, atol=1e-4)
            assert many.ids[token].tolist() == logits.topk(4).indices.tolist()


class FreeOfRouters(Experts):
    """All experts on the device, every layer but the first routed by an estimator: what `router-free` must equal."""

    def __init__(self, predictor: RouterPredictor) -> None:
        super().__init__(operations(DEVICE), SPEC, WEIGHTS)
        self._predictor, self._routed = predictor, None

    def _route(self, layer_id: int, residual: Any, delta: Any, is_prefill: bool) -> NormRouterOutput:
        routed = self._true_routing(layer_id, residual, delta)
        if layer_id:
            assert self._routed is not None
            logits = self._predictor.guess_prompt(layer_id - 1, self._routed)[layer_id].logits
            ids, weights = reference.route_topk(logits, 2, "softmax", True)
            routed = routed._replace(logits=logits, topk_ids=ids.int(), topk_weights=weights)
        self._routed = routed
        return routed


def test_router_free_evaluates_no_router_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = Offloaded(SPEC, WEIGHTS, 16, resolve("router-free"))
    predictor = offloaded.experts.predictor
    assert isinstance(predictor, RouterPredictor)
    expected = generate(Decoder(SPEC, WEIGHTS, experts=FreeOfRouters(predictor)), 3)
    evaluated: list[int] = []
    true_routing = offloaded.experts._true_routing

    def counted(layer_id: int, *arguments: Any) -> NormRouterOutput:
        evaluated.append(layer_id)
        return true_routing(layer_id, *arguments)

    monkeypatch.setattr(offloaded.experts, "_true_routing", counted)
    found = generate(offloaded.decoder, 3)
    assert set(evaluated) == {0}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], generate(Decoder(SPEC, WEIGHTS), 3)[0], atol=1e-2), "prompts are routed, too"
    offloaded.check()


def test_est_pf_leaves_prompts_alone() -> None:
    exact = generate(Decoder(SPEC, WEIGHTS), 1)
    found = generate(Offloaded(SPEC, WEIGHTS, 16, resolve("est-pf")).decoder, 1)
    assert torch.equal(found[0], exact[0])
    assert not torch.equal(found[1], exact[1])


@pytest.mark.parametrize("plan_on_device", [False, True])
def test_cache_bias_prefers_what_has_a_slot(plan_on_device: bool) -> None:
    """A bias beyond all logits keeps to the experts of the first token; none, and a pool of all, change nothing."""

    def run(bias: float, num_slots: int) -> tuple[torch.Tensor, Offloaded]:
        offloaded = on_device(SPEC, WEIGHTS, num_slots, resolve("on-demand", cache_bias=bias))
        offloaded.experts._plan_on_device = plan_on_device
        offloaded.experts.begin()
        cache = KVCache.allocate(SPEC, 1, 20, DEVICE, torch.float32)
        offloaded.experts.begin_decode(1)
        logits = []
        for position in range(12):
            ids, at = torch.tensor([5 * position], device=DEVICE), torch.tensor([position], device=DEVICE)
            logits.append(offloaded.decoder.decode(ids, at, cache, position + 1))
        offloaded.experts.report()
        return torch.cat(logits), offloaded

    exact, _ = run(0.0, 32)
    biased, offloaded = run(1e4, 32)
    total = offloaded.experts.counters.total()
    assert total.demand == 4 * 2, "every layer fetched its first two experts, and no other"
    assert not torch.equal(biased, exact)
    slightly, offloaded = run(0.5, 12)
    _, plain = run(0.0, 12)
    assert offloaded.experts.counters.total().hits > plain.experts.counters.total().hits
    assert not torch.equal(slightly, exact)


def test_cache_bias_on_host_and_device_is_the_same() -> None:
    results = []
    for plan_on_device in (False, True):
        offloaded = on_device(SPEC, WEIGHTS, 12, resolve("exact", cache_bias=0.5, prefetch="always"))
        offloaded.experts._plan_on_device = plan_on_device
        offloaded.experts.begin()
        offloaded.experts.begin_decode(1)
        results.append(generate(offloaded.decoder, 1, steps=1))
    assert torch.equal(*results)


def test_weights_of_biased_choices_are_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = Offloaded(SPEC, WEIGHTS, 32, resolve("on-demand", cache_bias=3.0))
    routed = routings(9)[2]
    offloaded.experts._mapped[2, [1, 6]] = True
    found = offloaded.experts._prefer_mapped(2, routed)
    logits = routed.logits.clone()
    logits[:, [1, 6]] += 3.0
    assert torch.equal(found.topk_ids.long(), logits.topk(2).indices)
    weights = routed.logits.softmax(-1).gather(1, found.topk_ids.long())
    torch.testing.assert_close(found.topk_weights, weights / weights.sum(-1, keepdim=True))


def test_placement_finds_files_beside_the_model(model_folder: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(model_folder, device="cpu")
    spec, weights = engine.decoder.spec, engine.decoder.weights
    policy = Placement("est-pf", expert_slots="100%")
    with pytest.raises(InputError, match="--predict estimator needs a file made for this model"):
        Engine.from_pretrained(model_folder, device="cpu", placement=policy)
    estimator, model = Estimator.initial(spec, 8, 16, False, NO_VECTORS, seed=0), model_identity(spec, weights)
    estimator.save(model_folder / "estimator.safetensors", model, {})
    speculating = Engine.from_pretrained(model_folder, device="cpu", placement=policy)
    assert len(speculating.generate("One").token_ids) > 0
    choice = HybridChoice({1: "estimator"})
    choice.save(tmp_path / "hybrid.json", model, {})
    hybrid = Placement("exact", expert_slots="100%", hybrid=tmp_path / "hybrid.json", overrides={"predictor": "hybrid"})
    exact = Engine.from_pretrained(model_folder, device="cpu", placement=hybrid)
    assert exact.generate("One").token_ids == engine.generate("One").token_ids
    (model_folder / "estimator.safetensors").unlink()
    with pytest.raises(InputError, match="needs the model's estimator"):
        Engine.from_pretrained(model_folder, device="cpu", placement=hybrid)
    HybridChoice({1: "quasi-hidden"}).save(tmp_path / "hybrid.json", model, {})
    with pytest.raises(InputError, match="needs the model's default vectors"):
        Engine.from_pretrained(model_folder, device="cpu", placement=hybrid)
    with pytest.raises(InputError, match="--estimator has no effect with --predict none"):
        Engine.from_pretrained(
            model_folder, device="cpu", placement=Placement("on-demand", estimator=tmp_path / "x", expert_slots="4")
        )
