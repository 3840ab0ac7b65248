"""`rope_qk` against its reference and against the engine's attention block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, assert_close, poisoned, randn

from tritonmoe.model.attention import Tokens, attention_block
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.operations import REFERENCES
from tritonmoe.model.rope import inverse_frequencies
from tritonmoe.model.spec import AttentionSpec, RopeSpec
from tritonmoe.model.weights import AttentionWeights
from tritonmoe_kernels import reference
from tritonmoe_kernels.references import rope_qk_ref
from tritonmoe_kernels.rope_qk import rope_qk

pytestmark = KERNEL_MARKS

NORMS = ["none", "head", "full", "head_after_rope"]


def norm_weights(qk_norm: str, heads: int, kv_heads: int, size: int) -> dict[str, torch.Tensor | None]:
    if qk_norm == "none":
        return {"q_norm": None, "k_norm": None}
    q_size, k_size = (heads * size, kv_heads * size) if qk_norm == "full" else (size, size)
    return {"q_norm": 1 + randn(q_size, scale=0.2, seed=11), "k_norm": 1 + randn(k_size, scale=0.2, seed=12)}


def frequencies(pairs: int) -> torch.Tensor:
    return (10000.0 ** -(torch.arange(pairs) / pairs)).to(DEVICE)


def run_both(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, size: int, pairs: int, **options: object
) -> None:
    """Three cache rows of 50 positions, 17 apart in the prompt; q is poisoned and the cache holds noise."""
    batch, length = 3, 50
    qkv = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, scale=2.0, seed=1)
    options = {"tokens_per_row": max(1, -(-tokens // batch))} | options
    positions = (torch.arange(tokens) % options["tokens_per_row"] + 3).to(DEVICE)
    options |= norm_weights(str(options.get("qk_norm", "none")), heads, kv_heads, size)
    noise = [randn(batch, kv_heads, length, size, dtype=dtype, seed=seed) for seed in (2, 3)]
    keys, values = (cache.clone() for cache in noise)
    expected_keys, expected_values = noise
    inputs = (qkv, positions, frequencies(pairs))
    expected = rope_qk_ref(*inputs, expected_keys, expected_values, heads, **options)
    buffer = poisoned(tokens, heads, size, dtype=dtype)
    q = rope_qk(*inputs, keys, values, heads, **options, q=buffer)
    assert q is buffer
    assert torch.equal(values, expected_values)
    assert_close(keys, expected_keys)
    if tokens:
        assert_close(q, expected)
    again = rope_qk(*inputs, *(cache.clone() for cache in (keys, values)), heads, **options)
    assert torch.equal(q, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_tokens(tokens: int, dtype: torch.dtype) -> None:
    run_both(dtype, tokens, heads=3, kv_heads=1, size=16, pairs=8, qk_norm="head")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("qk_norm", NORMS)
def test_kinds(qk_norm: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Each norm with each pairing: partial rotation of an odd head count and a head size that is no power of two."""
    options = {"qk_norm": qk_norm, "interleaved": interleaved, "magnitude": 1.25, "clip_qkv": 1.5, "epsilon": 1e-5}
    run_both(dtype, 4, heads=6, kv_heads=3, size=24, pairs=12, **options)
    run_both(dtype, 4, heads=5, kv_heads=5, size=20, pairs=3, **options)


@pytest.mark.parametrize("qk_norm", ["none", "full"])
@pytest.mark.parametrize("clip_qkv", [None, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_engine_appends_the_same(interleaved: bool, clip_qkv: float | None, qk_norm: str) -> None:
    """The cache after the engine's attention block, prompt of two sequences, equals the kernel's."""
    rope = RopeSpec(theta=10000.0, dim=8, interleaved=interleaved)
    spec = AttentionSpec(4, 2, 16, rope, scale=0.25, qk_norm=qk_norm, clip_qkv=clip_qkv)
    norms = norm_weights(qk_norm, 4, 2, 16)
    qkv_weight = randn(spec.q_size + 2 * spec.kv_size, 24, scale=0.3, seed=1)
    weights = AttentionWeights(qkv_weight, randn(24, spec.q_size, seed=2), None, None, **norms, sinks=None)
    x = randn(2, 5, 24, seed=3)
    positions = torch.arange(5, device=DEVICE).expand(2, 5)
    cache = KVCache(*((torch.zeros(2, 2, 9, 16, device=DEVICE),) for _ in range(2)))
    flat, no_norm = positions.reshape(-1).contiguous(), torch.ones(24, device=DEVICE)
    tokens = Tokens(flat, flat + 1, batch=2, start=0, length=5)
    x = reference.rms_norm(x, no_norm, 1e-6)
    inv_freq = inverse_frequencies(rope).to(DEVICE)
    attention_block(
        REFERENCES, spec, weights, x.flatten(0, 1), no_norm, 1e-6, inv_freq, tokens, cache.keys[0], cache.values[0]
    )
    x = reference.rms_norm(x, no_norm, 1e-6)

    keys, values = (torch.zeros(2, 2, 9, 16, device=DEVICE) for _ in range(2))
    qkv = F.linear(x, qkv_weight).view(10, -1)
    options = {"interleaved": interleaved, "qk_norm": qk_norm, "clip_qkv": clip_qkv, "tokens_per_row": 5}
    rope_qk(qkv, flat, inv_freq, keys, values, 4, **options, **norms)
    assert torch.equal(values, cache.values[0])
    assert_close(keys, cache.keys[0])
    assert not keys[:, :, 5:].any()


def test_clipping_keeps_what_is_not_a_number() -> None:
    qkv = randn(1, (2 + 2 * 2) * 8, seed=1)
    qkv[0, [3, 20, 40]] = float("nan")
    inputs = qkv, torch.zeros(1, dtype=torch.int64, device=DEVICE), frequencies(4)
    keys, values, expected_keys, expected_values = (torch.zeros(1, 2, 3, 8, device=DEVICE) for _ in range(4))
    q = rope_qk(*inputs, keys, values, 2, clip_qkv=0.5, tokens_per_row=1)
    expected = rope_qk_ref(*inputs, expected_keys, expected_values, 2, clip_qkv=0.5, tokens_per_row=1)
    for found, wanted in ((q, expected), (keys, expected_keys), (values, expected_values)):
        assert wanted.isnan().any()
        assert torch.equal(found.isnan(), wanted.isnan())


def test_rows_and_padding() -> None:
    """Explicit rows in any order and a strided cache; positions outside the cache are not appended."""
    qkv = randn(5, (2 + 2 * 2) * 8, seed=1)
    rows = torch.tensor([3, 0, 2, 1, 1], device=DEVICE)
    positions = torch.tensor([2, 0, -1, 6, 5], device=DEVICE)
    keys, values = (randn(4, 6, 2, 8, seed=seed).transpose(1, 2) for seed in (2, 3))
    assert not keys.is_contiguous()
    expected_keys, expected_values = keys.clone(), values.clone()
    untouched = keys.clone()
    expected = rope_qk_ref(qkv, positions, frequencies(4), expected_keys, expected_values, 2, rows=rows)
    for kind in (torch.int64, torch.int32):
        q = rope_qk(qkv, positions, frequencies(4), keys, values, 2, rows=rows.to(kind))
        assert_close(q, expected)
        assert_close(keys, expected_keys)
        assert torch.equal(values, expected_values)
    assert int((keys != untouched).any(-1).sum()) == 3 * 2


def test_large_positions() -> None:
    """Angles of position · inv_freq in float32, as the engine's table has them."""
    qkv = randn(3, 4 * 8, seed=1)
    positions = torch.tensor([1000, 40_959, 131_071], device=DEVICE)
    caches = [torch.zeros(3, 1, 131_072, 8, device=DEVICE) for _ in range(4)]
    expected = rope_qk_ref(qkv, positions, frequencies(4), caches[0], caches[1], 2)
    q = rope_qk(qkv, positions, frequencies(4), caches[2], caches[3], 2)
    assert_close(q, expected)
    rows = torch.arange(3, device=DEVICE)
    assert_close(caches[2][rows, :, positions], caches[0][rows, :, positions])


REFUSED = {
    "must share a shape": {"keys": torch.zeros(3, 2, 9, 8)},
    "qkv has shape": {"qkv": torch.zeros(3, 31)},
    "qkv is not contiguous": {"qkv": torch.zeros(32, 3).T},
    "keys is torch.float16": {"keys": torch.zeros(3, 1, 9, 8, dtype=torch.float16)},
    "last stride": {"values": torch.zeros(3, 1, 8, 9).transpose(2, 3)},
    "positions is torch.int32": {"positions": torch.zeros(3, dtype=torch.int32)},
    "inv_freq rotates 10 values": {"inv_freq": torch.ones(5)},
    "inv_freq is torch.float64": {"inv_freq": torch.ones(4, dtype=torch.float64)},
    "rows has shape": {"rows": torch.zeros(2, dtype=torch.int64)},
    "do not fit a cache of 2 rows": {"keys": torch.zeros(2, 1, 9, 8), "values": torch.zeros(2, 1, 9, 8)},
    "qk_norm is 'tail'": {"qk_norm": "tail"},
    "q_norm is missing": {"qk_norm": "head"},
    "k_norm is given": {"k_norm": torch.ones(8)},
    "k_norm has shape": {"qk_norm": "full", "q_norm": torch.ones(16), "k_norm": torch.ones(16)},
    "q has shape": {"q": torch.zeros(3, 2, 9)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    given: dict[str, object] = {
        "qkv": torch.zeros(3, 32),
        "positions": torch.zeros(3, dtype=torch.int64),
        "inv_freq": torch.ones(4),
        "keys": torch.zeros(3, 1, 9, 8),
        "values": torch.zeros(3, 1, 9, 8),
        "num_heads": 2,
    }
    given |= REFUSED[message]
    given = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        rope_qk(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "pairs", "qk_norm"),
    [
        (32, 4, 128, 64, "head"),
        (64, 8, 64, 32, "none"),
        (16, 16, 128, 64, "full"),
        (48, 8, 128, 32, "full"),
        (96, 8, 128, 32, "head_after_rope"),
    ],
)
def test_model_shapes(
    heads: int, kv_heads: int, size: int, pairs: int, qk_norm: str, tokens: int, dtype: torch.dtype
) -> None:
    for interleaved in (False, True):
        run_both(dtype, tokens, heads, kv_heads, size, pairs, qk_norm=qk_norm, interleaved=interleaved)
