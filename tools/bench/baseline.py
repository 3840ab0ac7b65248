"""transformers on the same weights: static cache, greedy, on a GPU each decode step one CUDA graph."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.measure import synchronize
from tritonmoe.checkpoint.targets import IN_ORDER, Order, make_targets
from tritonmoe.checkpoint.tensor_files import TensorEntry
from tritonmoe.checkpoint.tensor_names import canonical_name
from tritonmoe.errors import InputError
from tritonmoe.memory import require_memory
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import kv_bytes_per_token
from tritonmoe.model.weights import iter_tensors
from tritonmoe_kernels.quantized import Matrix

# Both can be captured; the plain loop over experts ("eager") asks the host which experts were hit. Prefill uses the
# first: the second gathers a copy of the weights for every token.
EXPERTS = ("grouped_mm", "batched_mm")
CAPTURE_WARM_UP = 3  # steps outside the graph first, for what libraries set up on first use
TRIAL_STEPS = 8
PREFILL_TOKENS = 1 << 16  # of all rows together in one forward pass, so that activations stay near 10 GB
PREFILL_SCORES = 1 << 31  # elements of attention scores, which plain attention holds several times


class SharedModel:
    """transformers' model of the same config, whose parameters are the decoder's own memory where layouts agree."""

    def __init__(self, config: dict[str, Any], decoder: Decoder) -> None:
        try:
            import transformers
        except ImportError:
            raise InputError("--baseline transformers needs transformers; install the 'test' extra") from None
        transformers.logging.set_verbosity_error()
        values = {key: value for key, value in config.items() if key != "quantization_config"}
        parsed = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=decoder.dtype)
        state = _state(model, decoder)
        model.load_state_dict(state, strict=True, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(decoder.device)
        left = [name for name, x in [*model.named_parameters(), *model.named_buffers()] if x.is_meta]
        if left:
            raise InputError(f"transformers' {parsed.model_type} has {left[0]}, which no weight of ours fills")
        self.model: Any = model.eval().requires_grad_(False)
        self.decoder = decoder
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.attention: str = model.config._attn_implementation
        self.num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        ours = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors(decoder.weights)}
        self.copied_bytes = sum(x.nbytes for x in model.parameters() if x.untyped_storage().data_ptr() not in ours)


def _state(model: nn.Module, decoder: Decoder) -> dict[str, torch.Tensor]:
    """A value for every tensor of transformers' model: views of ours, or copies in its layout and type."""
    theirs = model.state_dict()
    found = {
        canonical_name(name): TensorEntry(name, Path(), tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in theirs.items()
    }
    targets = make_targets(decoder.spec, decoder.weights, found)
    views = {name: _on_disk(target.memory, target.order) for name, target in targets.items()}
    views.setdefault("lm_head.weight", _on_disk(decoder.weights.head))
    unmatched = views.keys() ^ (found.keys() | {"lm_head.weight"})
    if unmatched:
        raise InputError(f"transformers' model and ours differ in {sorted(unmatched)[0]}")
    return {name: _as_theirs(views[canonical_name(name)], tensor) for name, tensor in theirs.items()}


def _on_disk(memory: Matrix, order: Order = IN_ORDER) -> torch.Tensor:
    if not isinstance(memory, torch.Tensor):
        raise InputError("transformers runs on weights in --dtype; leave --baseline or the forms of fewer bits out")
    return order.as_on_disk(memory)


def _as_theirs(view: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    # A transposed view would be shared too, but at a layout that transformers never runs at.
    return view.reshape(theirs.shape).to(theirs.dtype).contiguous()


class Theirs:
    """A `Stepper` over a `SharedModel`: prompts [B, context], with a static cache for `new_tokens` more."""

    def __init__(self, shared: SharedModel, prompts: torch.Tensor, new_tokens: int) -> None:
        from transformers.cache_utils import Cache, StaticLayer

        self.device = prompts.device
        self.batch, self.context = prompts.shape
        self.experts = EXPERTS[0]
        self.trials: dict[str, float | str] = {}  # ms per step of each way to run experts, or why it failed
        self._shared, self._prompts = shared, prompts
        self._length = self.context + new_tokens
        spec, dtype = shared.decoder.spec, shared.decoder.dtype
        needed = self.batch * self._length * kv_bytes_per_token(spec, dtype)
        require_memory(needed, self.device, "the static cache of transformers beside ours", "a smaller --context")
        # Full-length layers everywhere: the sliding static layer cannot be captured, since it makes a tensor from a
        # number of the host in each step.
        self._cache: Any = Cache(layers=[StaticLayer(max_cache_len=self._length) for _ in spec.layers])
        self._ids = prompts[:, -1:].clone()
        self._positions = torch.zeros_like(self._ids)
        self._first = self._ids.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = self.device.type == "cuda"

    def warm_up(self) -> None:
        self._shared.model.set_experts_implementation(EXPERTS[0])
        self._prefill(min(self.context, 512))

    @torch.no_grad()
    def prefill(self) -> torch.Tensor:
        logits = self._prefill(self.context)
        self._first = logits.argmax(-1, keepdim=True)
        return logits

    @torch.no_grad()
    def _prefill(self, length: int) -> torch.Tensor:
        self._rewind(0)
        chunk = max(1, PREFILL_TOKENS // self.batch)
        if self._shared.attention == "eager":
            heads = max(layer.attention.num_heads for layer in self._shared.decoder.spec.layers)
            chunk = max(1, min(chunk, PREFILL_SCORES // (self.batch * heads * self._length)))
        logits = torch.empty(0)
        for start in range(0, length, chunk):
            ids = self._prompts[:, start : min(start + chunk, length)]
            positions = torch.arange(start, start + ids.shape[1], device=self.device).expand_as(ids)
            logits = self._forward(ids, positions)
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, masks: Any = None) -> torch.Tensor:
        cache = {self._shared.cache_name: self._cache}
        out = self._shared.model(
            input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=True, logits_to_keep=1, **cache
        )
        return out.logits[:, -1].float()

    def prepare_decoding(self) -> None:
        """Capture one step for each way to run experts and keep the fastest; on a CPU, no graph and no choice."""
        if not self._captures:
            return
        best = float("inf")
        for experts in EXPERTS:
            try:
                self._shared.model.set_experts_implementation(experts)
                graph = self._capture()
                milliseconds = self._trial(graph)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                self.trials[experts] = (str(error).splitlines() or [type(error).__name__])[0]
                continue
            self.trials[experts] = milliseconds
            if milliseconds < best:
                best, self.experts, self._graph = milliseconds, experts, graph
        if self._graph is None:
            raise InputError(f"transformers' decode step could not be captured: {self.trials}")

    @torch.no_grad()
    def _capture(self) -> torch.cuda.CUDAGraph:
        self.restart()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(CAPTURE_WARM_UP, self._length - self.context)):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.restart()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _trial(self, graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds per replayed step."""
        steps, elapsed = min(TRIAL_STEPS, self._length - self.context), 0.0
        for _ in range(2):  # the first round uploads the graph
            self.restart()
            synchronize(self.device)
            began = time.perf_counter()
            for _ in range(steps):
                graph.replay()
            synchronize(self.device)
            elapsed = time.perf_counter() - began
        return 1e3 * elapsed / steps

    def _step(self) -> None:
        logits = self._forward(self._ids, self._positions, self._masks())
        self._ids.copy_(logits.argmax(-1, keepdim=True))
        self._positions.add_(1)

    def _masks(self) -> Any:
        """None where transformers can make the masks itself. Those for plain attention it makes from a number of the
        host, which a graph cannot capture: additive masks [B, 1, 1, L], per kind of layer."""
        if self._shared.attention != "eager" or not self._captures:
            return None
        index = torch.arange(self._length, device=self.device)
        masks = {}
        for layer in self._shared.decoder.spec.layers:
            window = layer.attention.window
            visible = index <= self._positions  # [B, L]
            if window is not None:
                visible = visible & (index > self._positions - window)
            hidden = visible.logical_not().to(self._shared.decoder.dtype)
            mask = (hidden * torch.finfo(hidden.dtype).min)[:, None, None]
            masks["full_attention" if window is None else "sliding_attention"] = mask
        return masks

    @torch.no_grad()
    def restart(self) -> None:
        self._rewind(self.context)
        self._ids.copy_(self._first)
        self._positions.fill_(self.context)

    def _rewind(self, length: int) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(length)

    @torch.no_grad()
    def launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def tokens(self) -> list[int]:
        return self._ids[:, 0].tolist()
