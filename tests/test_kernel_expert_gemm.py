"""Expert products over slots against their float32 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, ON_GPU, assert_close, generator, poisoned, randn
from quantized_matrices import FORMATS, format_name, random_matrix

from tritonmoe_kernels import expert_gemm as kernels
from tritonmoe_kernels.expert_gemm import combine, expert_gemm
from tritonmoe_kernels.fetch_reference import READY
from tritonmoe_kernels.quantized import MXFP4, Matrix, QuantizedMatrix, WeightFormat, dequantize
from tritonmoe_kernels.references import combine_ref, expert_gemm_ref

pytestmark = KERNEL_MARKS

SILU = {"kind": "silu"}
CLAMPED = {"kind": "swiglu_clamped", "limit": 0.7, "alpha": 1.702}
FORMS = ["decode", "prefill"]
# Interpreted, a form of quantised weights is tried in one dtype: weights are float32 in the first, x's in the second.
FORM_DTYPES = {"decode": torch.float32, "prefill": torch.float16}


class Experts(NamedTuple):
    gate_up: Matrix
    down: Matrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def make_experts(slots: int, hidden: int, size: int, dtype: torch.dtype, biases: bool = False) -> Experts:
    experts = Experts(
        randn(slots, 2 * size, hidden, dtype=dtype, scale=hidden**-0.5, seed=1),
        randn(slots, hidden, size, dtype=dtype, scale=size**-0.5, seed=2),
    )
    if biases:
        gate_up_bias, down_bias = randn(slots, 2 * size, dtype=dtype, seed=3), randn(slots, hidden, dtype=dtype, seed=4)
        experts = Experts(*experts[:2], gate_up_bias, down_bias)
    return experts


def make_quantized(form: WeightFormat, slots: int, hidden: int, size: int) -> Experts:
    return Experts(
        random_matrix(form, slots, 2 * size, hidden, hidden**-0.5, 1, DEVICE),
        random_matrix(form, slots, hidden, size, size**-0.5, 2, DEVICE),
    )


def random_slots(tokens: int, top_k: int, slots: int) -> torch.Tensor:
    """Distinct slots for each token, in random order."""
    scores = torch.rand(tokens, slots, generator=generator(5))
    return scores.argsort(dim=1)[:, :top_k].int().contiguous().to(DEVICE)


def run_poisoned(x: torch.Tensor, slot_ids: torch.Tensor, experts: Experts, **options: object) -> torch.Tensor:
    """The kernels' output in a poisoned buffer, the workspace poisoned too."""
    out = poisoned(*slot_ids.shape, x.shape[1], dtype=x.dtype)
    hidden = poisoned(*slot_ids.shape, experts.down.shape[2], dtype=x.dtype)
    assert expert_gemm(x, slot_ids, *experts, **options, out=out, hidden=hidden) is out
    return out


def check(
    tokens: int, top_k: int, slots: int, hidden: int, size: int, dtype: torch.dtype, biases: bool, **options: object
) -> None:
    experts = make_experts(slots, hidden, size, dtype, biases)
    x, slot_ids = randn(tokens, hidden, dtype=dtype), random_slots(tokens, top_k, slots)
    out = run_poisoned(x, slot_ids, experts, **options)
    assert_close(out, expert_gemm_ref(x, slot_ids, *experts, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "form"), [(1, "decode"), (7, "decode"), (1, "prefill"), (7, "prefill")])
@pytest.mark.parametrize(("options", "biases"), [(SILU, False), (CLAMPED, True)])
def test_equals_reference(tokens: int, form: str, options: dict, biases: bool, dtype: torch.dtype) -> None:
    check(tokens, 2, 6, 80, 48, dtype, biases, form=form, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "size"), [(96, 80), (64, 128), (33, 7)])
def test_more_tokens_and_odd_sizes(hidden: int, size: int, dtype: torch.dtype) -> None:
    check(33, 2, 5, hidden, size, dtype, biases=True, **SILU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_an_unrolled_step(dtype: torch.dtype) -> None:
    check(1, 1, 2, 1424, 20, dtype, biases=False, **SILU)


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form: str) -> None:
    experts = make_experts(2, 16, 16, torch.float32)
    x, slot_ids = randn(0, 16), torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    assert expert_gemm(x, slot_ids, *experts, form=form).shape == (0, 2, 16)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_absent_experts_stay(form: str) -> None:
    experts = make_experts(4, 36, 20, torch.float32)
    x, slot_ids = randn(4, 36), random_slots(4, 3, 4)
    absent = torch.zeros_like(slot_ids, dtype=torch.bool)
    absent[0, 1] = absent[2] = absent[3, 0] = True
    out = run_poisoned(x, slot_ids.masked_fill(absent, -1), experts, form=form)
    assert out[absent].isnan().all()
    assert_close(out[~absent], expert_gemm_ref(x, slot_ids, *experts)[~absent])
    # The rest run later into the same buffer: the same bits as all at once.
    expert_gemm(x, slot_ids.masked_fill(~absent, -1), *experts, form=form, out=out)
    assert out.equal(run_poisoned(x, slot_ids, experts, form=form))


@pytest.mark.parametrize("programs", [1, 7, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_programs_make_the_same_bits(dtype: torch.dtype, programs: int) -> None:
    experts = make_experts(5, 36, 20, dtype, biases=True)
    x, slot_ids = randn(3, 36, dtype=dtype), random_slots(3, 4, 5)
    slot_ids[0, 2] = slot_ids[1] = -1
    absent = slot_ids < 0
    out = run_poisoned(x, slot_ids, experts, programs=programs)
    assert out[absent].isnan().all()
    assert out[~absent].equal(run_poisoned(x, slot_ids, experts)[~absent])


def test_few_programs_take_any_number_of_tokens() -> None:
    """More pairs than a step of the engine's has in the decode form."""
    experts, x, slot_ids = make_experts(5, 36, 20, torch.float32), randn(40, 36), random_slots(40, 2, 5)
    out = run_poisoned(x, slot_ids, experts, form="decode", programs=7)
    assert out.equal(run_poisoned(x, slot_ids, experts, form="decode"))


def test_refuses_no_programs() -> None:
    slot_ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="programs is 0"):
        expert_gemm(randn(1, 16), slot_ids, *make_experts(2, 16, 16, torch.float32), programs=0)


@pytest.mark.parametrize("words", [1, 2, 4])
def test_what_is_ready_makes_the_same_bits(words: int) -> None:
    experts, x = make_experts(5, 36, 20, torch.float32), randn(3, 36)
    ready = torch.zeros(words, 3, dtype=torch.int32, device=DEVICE)[:, 1]  # of one layer among three
    ready.fill_(READY)
    for slot_ids in (random_slots(3, 4, 5), torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)):
        out = run_poisoned(x, slot_ids, experts, programs=7, ready=ready)
        expected = run_poisoned(x, slot_ids, experts)
        assert out.nan_to_num(7.0).equal(expected.nan_to_num(7.0))


def test_nothing_absent_is_awaited() -> None:
    """A word that nobody makes READY, where no expert is to be computed: what comes ends all the same."""
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slot_ids = torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
    out = run_poisoned(randn(2, 16), slot_ids, make_experts(2, 16, 16, torch.float32), programs=7, ready=nobody)
    assert out.isnan().all()


def test_refuses_ready_where_nothing_would_wait() -> None:
    slot_ids, word = (
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    experts, x = make_experts(2, 16, 16, torch.float32), randn(1, 16)
    for options, message in (
        ({"ready": word}, "ready is for the decode form with `programs`"),
        ({"ready": word, "programs": 7, "form": "prefill"}, "ready is for the decode form"),
        ({"ready": word[None], "programs": 7}, "ready has shape"),
        ({"ready": word.long(), "programs": 7}, "ready is torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            expert_gemm(x, slot_ids, *experts, **options)


@pytest.mark.parametrize("form", FORMS)
def test_all_absent(form: str) -> None:
    experts = make_experts(2, 16, 16, torch.float32)
    slot_ids = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    assert run_poisoned(randn(3, 16), slot_ids, experts, form=form).isnan().all()
    assert (expert_gemm(randn(3, 16), slot_ids, *experts, form=form) == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_on_one_expert(form: str) -> None:
    experts = make_experts(5, 48, 32, torch.float32)
    x, slot_ids = randn(11, 48), torch.full((11, 1), 4, dtype=torch.int32, device=DEVICE)
    assert_close(run_poisoned(x, slot_ids, experts, form=form), expert_gemm_ref(x, slot_ids, *experts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_twice_and_in_other_slots(form: str, dtype: torch.dtype) -> None:
    experts = make_experts(6, 48, 20, dtype, biases=True)
    x, slot_ids = randn(5, 48, dtype=dtype), random_slots(5, 2, 6)
    first = run_poisoned(x, slot_ids, experts, form=form)
    assert first.equal(run_poisoned(x, slot_ids, experts, form=form))
    order = torch.tensor([3, 5, 0, 4, 1, 2], device=DEVICE)  # slot i now holds what slot order[i] held
    moved = Experts(*(part[order].contiguous() for part in experts))
    moved_ids = order.argsort()[slot_ids.long()].int()
    assert first.equal(run_poisoned(x, moved_ids, moved, form=form))


@pytest.mark.parametrize("form", FORMS)
def test_slots_are_records_of_a_pool(form: str) -> None:
    """Both strides are multiples of 16 elements: how wide loads may be decides which thread adds what."""
    experts = make_experts(3, 48, 32, torch.float32, biases=True)
    pool = poisoned(3, sum(part[0].numel() for part in experts) + 64, dtype=torch.float32)
    views, start = [], 0
    for part in experts:
        view = pool[:, start : start + part[0].numel()].unflatten(1, part.shape[1:])
        view.copy_(part)
        views.append(view)
        start += part[0].numel()
    x, slot_ids = randn(4, 48), random_slots(4, 2, 3)
    assert run_poisoned(x, slot_ids, Experts(*views), form=form).equal(run_poisoned(x, slot_ids, experts, form=form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize(("shared", "residual"), [(False, False), (True, True), (False, True)])
def test_combine(tokens: int, shared: bool, residual: bool, dtype: torch.dtype) -> None:
    expert_out = randn(tokens, 3, 80, dtype=dtype)
    weights = randn(tokens, 3, seed=1).abs()
    options = {
        "shared": randn(tokens, 80, dtype=dtype, seed=2) if shared else None,
        "residual": randn(tokens, 80, dtype=dtype, seed=3) if residual else None,
        "multiplier": 0.22,
    }
    out = poisoned(tokens, 80, dtype=dtype)
    assert combine(expert_out, weights, **options, out=out) is out
    expected = combine_ref(expert_out, weights, **options)
    if tokens:
        assert_close(out, expected)
    if residual:  # in place
        assert combine(expert_out, weights, **options | {"out": options["residual"]}).equal(out)


def test_refusals() -> None:
    experts = make_experts(3, 16, 8, torch.float32, biases=True)
    x, slot_ids = randn(2, 16), random_slots(2, 2, 3)
    refused = [
        ((randn(2, 12), slot_ids, *experts), "x has shape"),
        ((x.double(), slot_ids, *experts), "x is torch.float64"),
        ((x.half(), slot_ids, *experts), "gate_up is torch.float32"),
        ((randn(16, 2).T, slot_ids, *experts), "x is not contiguous"),
        ((x, slot_ids.long(), *experts), "slot_ids is torch.int64"),
        ((x, slot_ids[:1], *experts), "slot_ids has shape"),
        ((x, slot_ids, experts.gate_up[:, :15], experts.down), "gate_up has shape"),
        ((x, slot_ids, experts.gate_up.mT.contiguous().mT, experts.down), "gate_up is not contiguous from axis 1 on"),
        ((x, slot_ids, *experts[:2], experts.gate_up_bias[:, :3]), "gate_up_bias has shape"),
        ((x, slot_ids, experts.gate_up[0], experts.down), "expected, not"),
        ((x, slot_ids, *experts, "gelu"), "kind must be"),
        ((x, slot_ids, *experts, "silu", 0.0, 0.0, x.new_empty(2, 2, 8)), "out has shape"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            expert_gemm(*arguments)
    with pytest.raises(ValueError, match="form must be"):
        expert_gemm(x, slot_ids, *experts, form="fast")
    with pytest.raises(ValueError, match="topk_weights is"):
        combine(randn(2, 2, 16), randn(2, 2).half())
    with pytest.raises(ValueError, match="shared has shape"):
        combine(randn(2, 2, 16), randn(2, 2), shared=randn(1, 16))


def check_quantized(
    form: WeightFormat, hidden: int, size: int, slot_ids: torch.Tensor, dtype: torch.dtype, how: str
) -> torch.Tensor:
    experts = make_quantized(form, int(slot_ids.max()) + 1, hidden, size)
    x = randn(len(slot_ids), hidden, dtype=dtype)
    out = run_poisoned(x, slot_ids, experts, form=how)
    present = slot_ids >= 0
    assert out[~present].isnan().all()
    # Prefill multiplies weights rounded to x's dtype: twice the error, for both roundings are of one size.
    assert_close(out[present], expert_gemm_ref(x, slot_ids, *experts)[present], 2.0 if how == "prefill" else 1.0)
    return out


@pytest.mark.parametrize(
    ("how", "dtype"), [(how, dtype) for how in FORMS for dtype in DTYPES if ON_GPU or dtype == FORM_DTYPES[how]]
)
@pytest.mark.parametrize("form", FORMATS, ids=format_name)
def test_quantized_equals_reference(form: WeightFormat, how: str, dtype: torch.dtype) -> None:
    """Groups that end short, rows that are not whole blocks; an expert that is absent."""
    slot_ids = torch.tensor([[2, -1], [0, 2]], dtype=torch.int32, device=DEVICE)
    check_quantized(form, 72, 40, slot_ids, dtype, how)


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[2], FORMATS[4], FORMATS[5]], ids=format_name)
def test_quantized_rows_that_are_not_whole_words(form: WeightFormat, how: str) -> None:
    slot_ids = torch.tensor([[1]], dtype=torch.int32, device=DEVICE)
    check_quantized(form, 38, 18, slot_ids, torch.float32, how)


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[3]], ids=format_name)
def test_quantized_slots_are_records_of_a_pool(form: WeightFormat, how: str) -> None:
    """Other slots, and slots that are parts of records: the same bits."""
    experts = make_quantized(form, 2, 64, 32)
    tensors = [part for matrix in experts[:2] for part in matrix[1:] if part is not None]
    sizes = [-(-part[0].nbytes // 256) * 256 for part in tensors]
    pool, start = torch.zeros(3, sum(sizes), dtype=torch.uint8, device=DEVICE), 0
    views = []
    for part, size in zip(tensors, sizes, strict=True):
        view = pool[:, start : start + part[0].nbytes].view(part.dtype).unflatten(1, part.shape[1:])
        view[2], view[0] = part[0], part[1]
        views.append(view)
        start += size
    half = len(views) // 2
    stored = [QuantizedMatrix(form, *views[:half]), QuantizedMatrix(form, *views[half:])]
    x, slot_ids = randn(2, 64), torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    first = run_poisoned(x, slot_ids, experts, form=how)
    assert first.equal(run_poisoned(x, torch.where(slot_ids == 0, 2, 0).int(), Experts(*stored), form=how))


@pytest.mark.parametrize("how", FORMS)
def test_mxfp4_is_exact_for_every_code_and_scale(how: str) -> None:
    """Unit 6 is 64 · 1/64, silu of the first being itself; row r of down has scale r there and a code that changes."""
    gate_up = QuantizedMatrix(
        MXFP4,
        torch.zeros(1, 64, 128, dtype=torch.uint8, device=DEVICE),
        torch.full((1, 64, 8), 127, dtype=torch.uint8, device=DEVICE),
    )
    gate_up.codes[0, 6, 0], gate_up.scales[0, 6] = 6, 127 + 4
    gate_up.codes[0, 32 + 6, 0], gate_up.scales[0, 32 + 6] = 1, 127 - 5
    scales = torch.arange(256, device=DEVICE).clamp(max=254)
    codes = torch.zeros(1, 256, 16, dtype=torch.uint8, device=DEVICE)
    codes[0, :, 3] = (torch.arange(256, device=DEVICE) * 5 % 16).to(torch.uint8)
    codes[0, 254, 3] = 3  # 1.5: 4 · 2^127 is not finite
    down = QuantizedMatrix(MXFP4, codes, scales.to(torch.uint8).view(1, 256, 1))
    x = torch.zeros(1, 256, device=DEVICE)
    x[0, 0] = 1.0
    slot_ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    out = expert_gemm(x, slot_ids, gate_up, down, form=how)
    assert torch.equal(out.view(-1), dequantize(down)[0, :, 6])


def test_a_scale_that_is_not_a_number_is_not_hidden() -> None:
    experts = make_quantized(MXFP4, 1, 64, 32)
    assert isinstance(experts.down, QuantizedMatrix)
    experts.down.scales[0, 5, 0] = 255
    slot_ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    for how in FORMS:
        out = expert_gemm(randn(1, 64), slot_ids, *experts, form=how)
        assert out.isnan().nonzero().tolist() == [[0, 0, 5]]


class Tile(NamedTuple):
    """A row of the launch table for tensor cores."""

    block_n: int
    block_k: int
    num_warps: int
    ahead: int = 1
    dot: bool = True


# Rows and parts of columns that fill the tensor cores' 16 rows a warp several times, once, and not at all.
TILES = [Tile(16, 1024, 1), Tile(32, 512, 4, 2), Tile(64, 128, 4, 3), Tile(8, 256, 2), Tile(4, 128, 4, 9)]

# What a tile with large scales makes before it is done again is nothing, and the interpreter's numpy says so.
DISCARDED = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tile], None]:
    return lambda tile: monkeypatch.setattr(kernels, "launch_config", lambda *_: tile._asdict())


def check_dot(tokens: int, hidden: int, size: int, options: dict, biases: bool = False, absent: int = 0) -> None:
    experts = make_quantized(MXFP4, 5, hidden, size)
    if biases:
        experts = Experts(*experts[:2], *make_experts(5, hidden, size, torch.bfloat16, biases=True)[2:])
    x, slot_ids = randn(tokens, hidden, dtype=torch.bfloat16), random_slots(tokens, 3, 5)
    slot_ids.view(-1)[:absent] = -1
    present = slot_ids >= 0
    out = run_poisoned(x, slot_ids, experts, form="decode", **options)
    assert out[~present].isnan().all()
    assert_close(out[present], expert_gemm_ref(x, slot_ids, *experts, **options)[present])


@pytest.mark.parametrize(
    ("tile", "hidden", "size"),
    [(tile, *sizes) for tile in TILES for sizes in ((72, 40), (288, 70), (38, 18))] + [(TILES[0], 1184, 34)],
    ids=str,
)
def test_dot_equals_reference(take: Callable[[Tile], None], tile: Tile, hidden: int, size: int) -> None:
    """Groups and parts that end short, rows that are not whole blocks or words; an expert that is absent."""
    take(tile)
    check_dot(1, hidden, size, SILU, absent=1)


@pytest.mark.parametrize("tokens", range(1, 17))
def test_dot_for_every_number_of_tokens(take: Callable[[Tile], None], tokens: int) -> None:
    take(TILES[tokens % 3])
    check_dot(tokens, 96, 64, CLAMPED, biases=True, absent=tokens)


@DISCARDED
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("power", [0, 10])
def test_dot_is_exact_for_every_code_and_scale(take: Callable[[Tile], None], power: int, is_mixed: bool) -> None:
    """Times 1 or 2^10, bit for bit, up to infinity and NaN and down to 2^-128; large scales in a few tiles, or in all.

    Unit 6 is what is multiplied, 64 · up; silu of 64 is itself. Row r of down has one code, and the scale.
    """
    take(Tile(64, 128, 4))
    gate_up = QuantizedMatrix(
        MXFP4,
        torch.zeros(1, 64, 2048, dtype=torch.uint8, device=DEVICE),
        torch.full((1, 64, 128), 127, dtype=torch.uint8, device=DEVICE),
    )
    gate_up.codes[0, 6, 0], gate_up.scales[0, 6] = 6, 127 + 4
    gate_up.codes[0, 32 + 6, 0], gate_up.scales[0, 32 + 6] = 1, 127 - 5 + power
    row = torch.arange(4096, device=DEVICE)
    if is_mixed:
        row = row * 37 % 4096
    codes = torch.zeros(1, 4096, 16, dtype=torch.uint8, device=DEVICE)
    codes[0, :, 3] = (row % 16).to(torch.uint8)
    down = QuantizedMatrix(MXFP4, codes, (row // 16).to(torch.uint8).view(1, 4096, 1))
    x = torch.zeros(1, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[0, 0] = 1.0
    out = expert_gemm(x, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), gate_up, down, form="decode").view(-1)
    expected = dequantize(down)[0, :, 6] * 2.0**power
    is_number = row // 16 < 255
    assert out[~is_number].isnan().all()
    if not ON_GPU:  # the interpreter makes other numbers of float32's subnormal ones
        is_number &= (expected == 0) | (expected.abs() >= 2.0**-126)
    assert out[is_number].equal(expected[is_number].bfloat16())


@DISCARDED
def test_dot_finds_large_scales_wherever_they_are(take: Callable[[Tile], None]) -> None:
    """Of one group in a row: of any part, any step, gate and up."""
    take(Tile(16, 256, 1))
    experts = make_quantized(MXFP4, 1, 640, 32)
    assert isinstance(experts.gate_up, QuantizedMatrix)
    experts.gate_up.scales[0, 3, 5] = experts.gate_up.scales[0, 32 + 7, 19] = experts.gate_up.scales[0, 60, 0] = 131
    x, slot_ids = randn(1, 640, dtype=torch.bfloat16, scale=0.01), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    hidden = poisoned(1, 1, 32, dtype=torch.bfloat16)
    kernels.expert_gemm(x, slot_ids, *experts, hidden=hidden)
    gate, up = (dequantize(experts.gate_up)[0] @ x[0].float()).view(2, 32)
    assert_close(hidden.view(-1), (torch.nn.functional.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("tile", TILES[:3], ids=str)
def test_dot_makes_the_same_bits(take: Callable[[Tile], None], tile: Tile) -> None:
    """In few programs, twice, in other slots, one pair at a time, and whatever the other slots hold."""
    take(tile)
    experts = make_quantized(MXFP4, 4, 160, 40)
    x, slot_ids = randn(2, 160, dtype=torch.bfloat16), random_slots(2, 3, 4)
    first = run_poisoned(x, slot_ids, experts)
    assert first.equal(run_poisoned(x, slot_ids, experts))
    for programs in (1, 7, 1000):
        assert first.equal(run_poisoned(x, slot_ids, experts, programs=programs))
    order = torch.tensor([3, 0, 1, 2], device=DEVICE)
    moved = Experts(*(QuantizedMatrix(MXFP4, *(part[order] for part in matrix[1:3])) for matrix in experts[:2]))
    assert first.equal(run_poisoned(x, order.argsort()[slot_ids.long()].int(), moved))
    one_by_one = poisoned(2, 3, 160, dtype=torch.bfloat16)
    for i in range(6):
        only = torch.full_like(slot_ids, -1)
        only.view(-1)[i] = slot_ids.view(-1)[i]
        expert_gemm(x, only, *experts, out=one_by_one)
    assert first.equal(one_by_one)


@DISCARDED
def test_dot_hides_no_scale_that_is_not_a_number(take: Callable[[Tile], None]) -> None:
    take(Tile(16, 256, 1))
    experts = make_quantized(MXFP4, 1, 64, 320)
    assert isinstance(experts.down, QuantizedMatrix)
    experts.down.scales[0, 5, 9] = 255
    slot_ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    out = expert_gemm(randn(1, 64, dtype=torch.bfloat16), slot_ids, *experts)
    assert out.isnan().nonzero().tolist() == [[0, 0, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dot_is_for_bfloat16(take: Callable[[Tile], None], dtype: torch.dtype) -> None:
    """In other dtypes the same bits whether the table asks for it or not."""
    experts, slot_ids = make_quantized(MXFP4, 2, 64, 32), random_slots(1, 2, 2)
    x, outs = randn(1, 64, dtype=dtype), []
    for dot in (False, True):
        take(Tile(8, 256, 1, dot=dot))
        outs.append(run_poisoned(x, slot_ids, experts))
    assert outs[0].equal(outs[1])


def test_quantized_refusals() -> None:
    slot_ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    gate_up, down = random_matrix(MXFP4, 2, 64, 64, device=DEVICE), random_matrix(MXFP4, 2, 64, 32, device=DEVICE)
    has_zeros = random_matrix(FORMATS[2], 2, 64, 64, device=DEVICE)
    narrow = WeightFormat("int4", 8, scale_dtype=torch.float32)
    for first, second, message in [
        (gate_up, random_matrix(FORMATS[4], 2, 64, 32, device=DEVICE), "one format"),
        (random_matrix(narrow, 2, 64, 64, device=DEVICE), down, "groups of 8 columns"),
        (QuantizedMatrix(*has_zeros[:3]), down, "gate_up has no zeros"),
        (gate_up, gate_up, "gate_up.codes has shape"),
        (QuantizedMatrix(MXFP4, gate_up.codes, gate_up.scales.int()), down, "gate_up.scales is torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            expert_gemm(randn(1, 64), slot_ids, first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=format_name)
@pytest.mark.parametrize(("hidden", "size"), [(2048, 768), (2880, 2880), (2816, 704)])
@pytest.mark.parametrize(("tokens", "how"), [(1, "decode"), (7, "decode"), (300, "prefill")])
def test_quantized_full_size(
    hidden: int, size: int, form: WeightFormat, tokens: int, how: str, dtype: torch.dtype
) -> None:
    check_quantized(form, hidden, size, random_slots(tokens, 4, 8), dtype, how)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize(("hidden", "size"), [(2048, 768), (2880, 2880), (2816, 704)])
@pytest.mark.parametrize(
    "tile", [Tile(8, 1024, 4, 2), Tile(16, 512, 2, 3), Tile(16, 256, 1), Tile(32, 256, 8)], ids=str
)
def test_dot_full_size(take: Callable[[Tile], None], tile: Tile, hidden: int, size: int, tokens: int) -> None:
    take(tile)
    check_dot(tokens, hidden, size, CLAMPED, biases=True, absent=1)


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMS)
def test_last_slot_of_a_large_quantized_pool(how: str) -> None:
    hidden, size, slots = 2880, 2880, 700
    small = make_quantized(MXFP4, 1, hidden, size)
    codes = [torch.empty(slots, *matrix.codes.shape[1:], dtype=torch.uint8, device=DEVICE) for matrix in small[:2]]
    assert sum(part.nbytes for part in codes) > 2**33
    stored = []
    for matrix, pool in zip(small[:2], codes, strict=True):
        scales = matrix.scales.repeat(slots, 1, 1)
        pool[-1] = matrix.codes[0]
        stored.append(QuantizedMatrix(MXFP4, pool, scales))
    x = randn(2, hidden, dtype=torch.bfloat16)
    last = torch.full((2, 1), slots - 1, dtype=torch.int32, device=DEVICE)
    out = run_poisoned(x, last, Experts(*stored), form=how)
    assert out.equal(run_poisoned(x, torch.zeros_like(last), small, form=how))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("top_k", "hidden", "size", "biases", "options"),
    [
        (8, 2048, 768, False, SILU),
        (4, 2880, 2880, True, CLAMPED),
        (6, 2048, 1408, False, SILU),
        (10, 512, 704, True, SILU),
    ],
)
@pytest.mark.parametrize(("tokens", "form"), [(1, "decode"), (7, "decode"), (7, "prefill"), (300, "prefill")])
def test_full_size(
    top_k: int, hidden: int, size: int, biases: bool, options: dict, tokens: int, form: str, dtype: torch.dtype
) -> None:
    check(tokens, top_k, 12, hidden, size, dtype, biases, form=form, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_long_prefill(tokens: int) -> None:
    check(tokens, 8, 32, 2048, 768, torch.bfloat16, biases=False, **SILU)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_last_slot_of_a_large_pool(form: str) -> None:
    hidden, size, slots = 2048, 768, 1000
    pool = torch.empty(slots, 3 * hidden * size, dtype=torch.bfloat16, device=DEVICE)
    assert pool.nbytes > 2**33
    experts = Experts(
        pool[:, : 2 * hidden * size].unflatten(1, (2 * size, hidden)),
        pool[:, 2 * hidden * size :].unflatten(1, (hidden, size)),
    )
    small = make_experts(1, hidden, size, torch.bfloat16)
    experts.gate_up[-1], experts.down[-1] = small.gate_up[0], small.down[0]
    x = randn(3, hidden, dtype=torch.bfloat16)
    last = torch.full((3, 1), slots - 1, dtype=torch.int32, device=DEVICE)
    out = run_poisoned(x, last, experts, form=form)
    assert out.equal(run_poisoned(x, torch.zeros_like(last), small, form=form))


@pytest.mark.gpu
def test_captured_decode_reads_slots_from_memory() -> None:
    assert ON_GPU
    experts = make_experts(16, 512, 256, torch.bfloat16)
    x, slot_ids = randn(2, 512, dtype=torch.bfloat16), random_slots(2, 4, 16)
    weights, out = randn(2, 4, seed=7).abs(), poisoned(2, 4, 512, dtype=torch.bfloat16)
    hidden, total = poisoned(2, 4, 256, dtype=torch.bfloat16), poisoned(2, 512, dtype=torch.bfloat16)

    def step() -> None:
        expert_gemm(x, slot_ids, *experts, out=out, hidden=hidden)
        combine(out, weights, residual=x, out=total)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    slot_ids.copy_(slot_ids.flip(1) * 3 % 16)
    graph.replay()
    expected = expert_gemm_ref(x, slot_ids, *experts)
    assert_close(out, expected)
    assert_close(total, combine_ref(expected, weights, residual=x))
