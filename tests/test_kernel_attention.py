"""Decode and prefill attention against their float32 references."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, assert_close, generator, poisoned, randn

from tritonmoe_kernels.attention import attention_decode, attention_prefill, decode_splits, decode_workspace_size
from tritonmoe_kernels.references import attention_decode_ref, attention_prefill_ref

pytestmark = KERNEL_MARKS

NAN = float("nan")


def make_cache(
    batch: int, kv_heads: int, capacity: int, size: int, dtype: torch.dtype, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, kv_heads, L, D]: strided views of a larger cache, NaN from entry used[b] on."""
    unused = torch.arange(capacity, device=DEVICE) >= used[:, None]
    parts = []
    for seed in (11, 12):
        cache = poisoned(batch, kv_heads, capacity + 9, size, dtype=dtype)
        part = randn(batch, kv_heads, capacity, size, dtype=dtype, seed=seed)
        cache[:, :, :capacity] = part.masked_fill(unused[:, None, :, None], NAN)
        parts.append(cache[:, :, :capacity])
    return parts[0], parts[1]


def check_decode(
    lengths: torch.Tensor,
    capacity: int,
    kv_heads: int,
    group: int,
    size: int,
    dtype: torch.dtype,
    window: int | None = None,
    with_sinks: bool = False,
) -> torch.Tensor:
    batch, heads = len(lengths), kv_heads * group
    lengths = lengths.to(DEVICE)
    q = randn(batch, heads, size, dtype=dtype)
    keys, values = make_cache(batch, kv_heads, capacity, size, dtype, lengths)
    sinks = randn(heads, seed=13) if with_sinks else None
    out = poisoned(batch, heads * size, dtype=dtype)
    workspace = poisoned(decode_workspace_size(q, keys, window), dtype=torch.float32)
    arguments = (q, keys, values, lengths, size**-0.5, window, sinks)
    assert attention_decode(*arguments, out=out, workspace=workspace) is out
    assert_close(out, attention_decode_ref(*arguments))
    assert out.equal(attention_decode(*arguments))
    return out


def check_prefill(
    positions: torch.Tensor,
    capacity: int,
    kv_heads: int,
    group: int,
    size: int,
    dtype: torch.dtype,
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    batch, tokens = positions.shape
    heads = kv_heads * group
    positions = positions.to(DEVICE)
    q = randn(batch, heads, tokens, size, dtype=dtype).transpose(1, 2)  # strided
    keys, values = make_cache(batch, kv_heads, capacity, size, dtype, positions.amax(1) + 1)
    sinks = randn(heads, seed=13) if with_sinks else None
    out = poisoned(batch, tokens, heads * size, dtype=dtype)
    arguments = (q, keys, values, positions, size**-0.5, window, sinks)
    assert attention_prefill(*arguments, out=out) is out
    assert_close(out, attention_prefill_ref(*arguments))
    assert out.equal(attention_prefill(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size"), [(1, 32), (2, 64), (8, 128), (3, 48)])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (40, True)])
def test_decode(group: int, size: int, window: int | None, with_sinks: bool, dtype: torch.dtype) -> None:
    check_decode(torch.tensor([1, 77, 150]), 150, 2, group, size, dtype, window, with_sinks)


@pytest.mark.parametrize("window", [None, 1, 16, 17])
def test_decode_every_length(window: int | None) -> None:
    check_decode(torch.arange(1, 38, dtype=torch.int32), 37, 1, 2, 16, torch.float32, window, with_sinks=window == 16)


def test_decode_more_blocks_than_splits() -> None:
    check_decode(torch.tensor([1500, 3, 1120]), 1500, 1, 2, 16, torch.float32, None, True)
    check_decode(torch.tensor([1500, 3, 1120]), 1500, 1, 2, 16, torch.float32, 99, False)


def test_decode_of_an_empty_sequence_is_zero() -> None:
    q, lengths = randn(2, 2, 16), torch.tensor([0, 2], device=DEVICE)
    keys, values = make_cache(2, 1, 40, 16, torch.float32, lengths)
    for sinks in (None, randn(2)):
        out = attention_decode(q, keys, values, lengths, 0.25, sinks=sinks)
        assert (out[0] == 0).all()
        assert out[1].isfinite().all()


def test_decode_splits_fill_the_device_and_no_more() -> None:
    launch = {"block_l": 64, "programs": 256}
    assert decode_splits(1, 4, None, launch) == 64
    assert decode_splits(8, 8, None, launch) == 4
    assert decode_splits(1, 8, 128, launch) == 4
    assert decode_splits(4096, 8, None, launch) == 1


def test_decode_batch_of_none() -> None:
    keys = randn(0, 1, 8, 16)
    lengths = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert attention_decode(randn(0, 2, 16), keys, keys, lengths, 1.0).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size"), [(1, 32), (2, 64), (8, 128), (3, 48)])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (10, True)])
def test_prefill(group: int, size: int, window: int | None, with_sinks: bool, dtype: torch.dtype) -> None:
    positions = torch.arange(33) + torch.tensor([[0], [57]])
    check_prefill(positions, 90, 1, group, size, dtype, window, with_sinks)


@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize("window", [None, 1, 16, 33])
def test_prefill_chunks(tokens: int, window: int | None) -> None:
    check_prefill(torch.arange(tokens) + torch.tensor([[0], [20]]), 90, 2, 2, 16, torch.float32, window)


def test_prefill_positions_in_any_order() -> None:
    positions = torch.randperm(90, generator=generator(3))[:40].view(2, 20)
    check_prefill(positions, 90, 2, 1, 16, torch.float32)
    check_prefill(positions, 90, 2, 1, 16, torch.float32, window=20, with_sinks=True)


def test_prefill_of_nothing() -> None:
    keys = randn(2, 1, 8, 16)
    positions = torch.empty(2, 0, dtype=torch.int64, device=DEVICE)
    assert attention_prefill(randn(2, 0, 2, 16), keys, keys, positions, 1.0).shape == (2, 0, 32)


def test_prefill_of_padding_is_zero() -> None:
    keys = randn(1, 1, 8, 16)
    positions = torch.tensor([[0, 1, -1]], device=DEVICE)
    out = attention_prefill(randn(1, 3, 2, 16), keys, keys, positions, 1.0)
    assert (out[0, 2] == 0).all()
    assert_close(out, attention_prefill_ref(randn(1, 3, 2, 16), keys, keys, positions, 1.0))


def test_refusals() -> None:
    q, keys, sinks = randn(2, 4, 16), randn(2, 2, 8, 16), randn(4)
    lengths = torch.ones(2, dtype=torch.int32, device=DEVICE)
    refused = [
        ((q.double(), keys, keys, lengths, 1.0), "q is torch.float64"),
        ((q[0], keys, keys, lengths, 1.0), "q of 3 and keys of 4 axes"),
        ((q, keys.half(), keys, lengths, 1.0), "keys is torch.float16"),
        ((q, keys, keys[:, :, :7], lengths, 1.0), "values has shape"),
        ((q, keys.mT.contiguous().mT, keys, lengths, 1.0), "keys is not contiguous from axis 3 on"),
        ((q[:, :3], keys, keys, lengths, 1.0), "not a multiple of 2 kv heads"),
        ((q, keys, keys, lengths.float(), 1.0), "lengths is torch.float32"),
        ((q, keys, keys, lengths[:1], 1.0), "lengths has shape"),
        ((q, keys, keys, lengths, 1.0, 0), "window must be at least 1"),
        ((q, keys, keys, lengths, 1.0, None, sinks[:3]), "sinks has shape"),
        ((q, keys, keys, lengths, 1.0, None, sinks.half()), "sinks is torch.float16"),
        ((q, keys, keys, lengths, 1.0, None, None, randn(2, 4, 16)), "out has shape"),
        ((q, keys, keys, lengths, 1.0, None, None, None, randn(3)), "workspace has 3 values"),
        ((randn(2, 4, 512), randn(2, 2, 8, 512), randn(2, 2, 8, 512), lengths, 1.0), "at most 256"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            attention_decode(*arguments)
    positions = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="positions is"):
        attention_prefill(q[:, None], keys, keys, positions, 1.0)
    with pytest.raises(ValueError, match="positions has shape"):
        attention_prefill(q[:, None], keys, keys, positions.long().T, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(4, 8, 128), (8, 8, 64), (16, 1, 128), (2, 4, 256)])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (128, True), (4096, False)])
def test_decode_long(
    kv_heads: int, group: int, size: int, window: int | None, with_sinks: bool, dtype: torch.dtype
) -> None:
    check_decode(torch.tensor([1, 129, 16384]), 20000, kv_heads, group, size, dtype, window, with_sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(4, 8, 128), (8, 8, 64), (2, 2, 256)])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (128, True)])
@pytest.mark.parametrize("tokens", [33, 300, 2048])
def test_prefill_long(
    tokens: int, kv_heads: int, group: int, size: int, window: int | None, with_sinks: bool, dtype: torch.dtype
) -> None:
    positions = torch.arange(tokens) + torch.tensor([[0], [1000]])
    check_prefill(positions, 3100, kv_heads, group, size, dtype, window, with_sinks)


@pytest.mark.gpu
def test_prefill_of_4096_tokens() -> None:
    check_prefill(torch.arange(4096)[None], 4096, 4, 8, 128, torch.bfloat16)


@pytest.mark.gpu
def test_captured_decode_serves_every_length() -> None:
    dtype, capacity = torch.bfloat16, 3000
    lengths = torch.tensor([5, 1], device=DEVICE)
    q = randn(2, 8, 64, dtype=dtype)
    keys, values = make_cache(2, 2, capacity, 64, dtype, torch.full((2,), capacity, device=DEVICE))
    out = poisoned(2, 512, dtype=dtype)
    workspace = poisoned(decode_workspace_size(q, keys), dtype=torch.float32)

    def step() -> None:
        attention_decode(q, keys, values, lengths, 0.125, out=out, workspace=workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([1, 2], [64, 65], [2999, 3000]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_close(out, attention_decode_ref(q, keys, values, lengths, 0.125))
