"""`fetch` against its reference, bit for bit: what is copied, published, counted, dropped, and left alone.

Records lie in host memory, pinned and mapped where there is a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_testing import DEVICE, KERNEL_MARKS, ON_GPU, generator

from tritonmoe.memory import empty_tensor
from tritonmoe.model import pinned_memory
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.expert_gemm import expert_gemm
from tritonmoe_kernels.fetch import LISTED_WORD, fetch, spin
from tritonmoe_kernels.fetch_reference import READY, fetch_ref
from tritonmoe_kernels.planner_state import LISTED

pytestmark = KERNEL_MARKS

PUBLISHED_BYTES = (9_437_184, 2_506_752)  # a bf16 expert of Qwen3-30B-A3B; about what it takes with 4 bits
POISON = 0xA5
SMALL = {"chunk_words": 128, "num_warps": 1}  # the least that is loaded 16 bytes a thread
Pin = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def pin() -> Iterator[Pin]:
    """Copies bytes into host memory that kernels can read."""
    arenas: list[torch.Tensor] = []

    def copy(data: torch.Tensor) -> torch.Tensor:
        # On pages of its own, as a page is registered whole and once.
        mapped = max(data.numel(), pinned_memory.MAPPED_BYTES)
        arena = empty_tensor((mapped,), torch.uint8, torch.device("cpu"))
        if ON_GPU:
            assert not pinned_memory.register(arena, arenas)
        return arena[: data.numel()].view(data.shape).copy_(data)

    yield copy
    if ON_GPU:
        torch.cuda.synchronize()
    pinned_memory.unregister(arenas)


def table(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass
class Case:
    """The arguments of a launch: a list that fills its table but for one entry, over records of random bytes."""

    records: torch.Tensor  # [L, E, record bytes] uint8, on the host
    num_slots: int
    entries: list[tuple[int, int, int]]  # (key, slot, epoch)
    refuted: tuple[int, ...] = ()  # entries whose slot has another epoch by now
    count: int | None = None
    dtype: torch.dtype = torch.bfloat16
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        layers, experts, record_bytes = self.records.shape
        keys, slots, epochs = ([entry[i] for entry in self.entries] for i in range(3))
        unused = (layers * experts, self.num_slots, 99)  # what an entry beyond the count may hold: nonsense
        current = [-5] * self.num_slots
        for i, (_, slot, epoch) in enumerate(self.entries):
            current[slot] = 0 if i in self.refuted else epoch
        buffer = torch.full((self.num_slots, record_bytes), POISON, dtype=torch.uint8, device=DEVICE)
        self.tensors = {
            "keys": table([*keys, unused[0]], torch.int32),
            "slots": table([*slots, unused[1]], torch.int32),
            "epochs": table([*epochs, unused[2]], torch.int64),
            "count": table([len(keys) if self.count is None else self.count], torch.int32),
            "arrivals": table([0] * (len(keys) + 1), torch.int32),
            "layer_base": table([layer.data_ptr() for layer in self.records], torch.int64),
            "buffer": buffer.view(self.dtype),
            "copy_epoch": table(current, torch.int64),
            "landed": table([-7] * self.num_slots, torch.int64),
            "moved": table([1000], torch.int64),
            "ready": table([0], torch.int32),
            "closing": table([0], torch.int32),
        }

    def run(self, function: Callable[..., None], is_speculative: bool = False, **options: Any) -> None:
        _, experts, record_bytes = self.records.shape
        function(
            **self.tensors,
            num_experts=experts,
            record_bytes=record_bytes,
            is_speculative=is_speculative,
            **{"first_bytes": record_bytes // 512 * 256, **options},
        )

    def row(self, slot: int) -> torch.Tensor:
        return self.tensors["buffer"].view(torch.uint8)[slot].cpu()

    def source(self, entry: int) -> torch.Tensor:
        return self.records.flatten(0, 1)[self.entries[entry][0]]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator(seed))


def random_entries(number: int, keys: int, slots: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Distinct slots, and keys of which a short list has no two equal."""
    random = generator(seed)
    chosen = torch.randperm(slots, generator=random)[:number].tolist()
    wanted = torch.randperm(keys, generator=random)[:number].tolist()
    epochs = torch.randint(1, 2**40, (number,), generator=random).tolist()
    return list(zip(wanted, chosen, epochs, strict=True))


def assert_as_reference(case: Case, is_speculative: bool = False, **options: Any) -> None:
    """Every tensor is what the reference leaves, inputs included; at a dropped record some programs have no part."""
    expected = replace(case)  # fresh tensors
    case.run(fetch, is_speculative, **options)
    expected.run(fetch_ref, is_speculative, **options)
    arrivals, programs = case.tensors["arrivals"], options["programs"]
    for entry in case.refuted if is_speculative else ():
        assert 0 <= arrivals[entry] < programs
        arrivals[entry] = 0
    for name, tensor in case.tensors.items():
        assert tensor.view(torch.uint8).equal(expected.tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("function", [fetch, fetch_ref])
def test_example(function: Callable[..., None], is_speculative: bool, pin: Pin) -> None:
    records = pin(random_bytes(2, 3, 512))
    case = Case(records, num_slots=5, entries=[(4, 3, 70), (0, 1, 72), (5, 0, 74)], refuted=(1,), count=2)
    case.run(function, is_speculative, programs=2, **SMALL)
    assert case.row(3).equal(records[1, 1])
    assert case.row(1).equal(torch.full((512,), POISON, dtype=torch.uint8) if is_speculative else records[0, 0])
    for slot in (0, 2, 4):
        assert (case.row(slot) == POISON).all()
    arrivals = case.tensors["arrivals"].tolist()
    assert arrivals == [2, arrivals[1], 0, 0]
    assert (arrivals[1] < 2) == is_speculative
    assert case.tensors["landed"].tolist() == ([-7, -7, -7, 70, -7] if is_speculative else [-7, 72, -7, 70, -7])
    assert case.tensors["moved"].tolist() == [1000 + (512 if is_speculative else 1024)]


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("record_bytes", [256, 512, 2816, 3840])  # half a chunk, one, five and a half, seven and a half
@pytest.mark.parametrize("programs", [1, 3, 8])
def test_equals_reference(programs: int, record_bytes: int, number: int, is_speculative: bool, pin: Pin) -> None:
    records = pin(random_bytes(3, 5, record_bytes, seed=number))
    entries = random_entries(number, 15, 11, seed=record_bytes + programs)
    assert_as_reference(Case(records, 11, entries), is_speculative, programs=programs, **SMALL)


@pytest.mark.parametrize("seed", range(8))
def test_random_lists(seed: int, pin: Pin) -> None:
    layers, experts, units, slots, programs, look = (
        int(torch.randint(low, high, (), generator=generator(6 * seed + place)))
        for place, (low, high) in enumerate([(1, 5), (1, 9), (1, 12), (1, 20), (1, 12), (1, 5)])
    )
    number = min(layers * experts, slots)
    entries = random_entries(number, layers * experts, slots, seed)
    refuted = tuple(torch.randperm(number, generator=generator(seed))[: seed % 4].tolist())
    dtype = (torch.float32, torch.float16, torch.uint8)[seed % 3]
    case = Case(pin(random_bytes(layers, experts, 256 * units, seed=seed)), slots, entries, refuted, number, dtype)
    for is_speculative in (False, True):
        options = {"programs": programs, "chunks_per_look": look, "delay": seed % 2, **SMALL}
        assert_as_reference(replace(case), is_speculative, **options)


def test_tables_of_any_alignment(pin: Pin) -> None:
    """Lists are rows of tables; a row begins anywhere."""
    case = Case(pin(random_bytes(2, 3, 768)), 5, random_entries(3, 6, 5), refuted=(0,))
    for name in ("keys", "slots", "epochs", "count", "arrivals", "moved", "ready", "closing"):
        tensor = case.tensors[name]
        case.tensors[name] = torch.cat([tensor[:1], tensor])[1:]
        assert case.tensors[name].data_ptr() % 16
    case.run(fetch, True, programs=3, **SMALL)
    dropped, *others = case.tensors["arrivals"].tolist()
    assert dropped < 3
    assert others == [3, 3, 0]
    for entry in (1, 2):
        assert case.row(case.entries[entry][1]).equal(case.source(entry))


def test_a_record_is_published_by_the_last_arrival_alone(pin: Pin) -> None:
    """As if one program had dropped its part: the record is there, but nobody may know."""
    case = Case(pin(random_bytes(1, 2, 2816)), 2, random_entries(2, 2, 2))
    case.tensors["arrivals"][0] = -1
    case.run(fetch, True, programs=4, **SMALL)
    first, second = case.entries[0], case.entries[1]
    assert case.tensors["arrivals"].tolist() == [3, 4, 0]
    assert case.tensors["landed"][first[1]] == -7
    assert case.tensors["landed"][second[1]] == second[2]


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("first_bytes", [0, 256, 1280, 2816])
@pytest.mark.parametrize("entries", [0, 2])
def test_ready_counts_programs_once(first_bytes: int, entries: int, is_speculative: bool, pin: Pin) -> None:
    """Wherever the first part ends, also for programs without a share of the list, or whose last record is dropped."""
    case = Case(pin(random_bytes(1, 3, 2816)), 3, random_entries(entries, 3, 3), refuted=(1,) if entries else ())
    case.tensors["ready"][0] = 100  # the last of so many more
    case.run(fetch, is_speculative, programs=9, first_bytes=first_bytes, **SMALL)
    assert case.tensors["ready"].tolist() == [109]
    case.tensors["ready"].zero_()
    case.tensors["arrivals"].zero_()
    case.run(fetch, is_speculative, programs=9, first_bytes=first_bytes, **SMALL)
    assert case.tensors["ready"].tolist() == [READY]


@pytest.mark.parametrize("function", [fetch, fetch_ref])
@pytest.mark.parametrize("entries", [0, 1, 3])
def test_a_list_that_is_awaited(entries: int, function: Callable[..., None], pin: Pin) -> None:
    """It is taken back once it is seen; and others had their turn, which changes nothing."""
    case = Case(pin(random_bytes(2, 3, 2816)), 3, random_entries(entries, 6, 3))
    listed, before = table([LISTED], torch.int32), [table([READY], torch.int32) for _ in range(2)]
    case.run(function, True, programs=5, listed=listed, goes_first=before, **SMALL)
    assert listed.tolist() == [0]
    assert [word.item() for word in before] == [READY] * 2
    assert case.tensors["closing"].tolist() == case.tensors["ready"].tolist() == [READY]
    for entry, (_, slot, epoch) in enumerate(case.entries):
        assert case.row(slot).equal(case.source(entry))
        assert case.tensors["landed"][slot] == epoch


def test_others_go_first_but_not_for_ever(pin: Pin) -> None:
    """What this launch lets go first may not be on the device: it is copied all the same."""
    case = Case(pin(random_bytes(1, 2, 512)), 2, random_entries(2, 2, 2))
    words = {"listed": table([LISTED], torch.int32), "goes_first": [table([0], torch.int32)]}
    case.run(fetch, True, programs=1, **words, **SMALL)
    for entry, (_, slot, _) in enumerate(case.entries):
        assert case.row(slot).equal(case.source(entry))


def test_experts_far_from_the_base_of_their_layer(pin: Pin) -> None:
    """Expert 3,000,000 of a layer begins 8.4 GB after its first, which need not exist."""
    far, record_bytes = 3_000_000, 2816
    records = pin(random_bytes(1, 1, record_bytes))
    case = Case(records, 3, [(far, 2, 5)])
    case.tensors["layer_base"] -= far * record_bytes
    for name, function in (("kernel", fetch), ("reference", fetch_ref)):
        case.tensors["buffer"].view(torch.uint8).fill_(POISON)
        options = {"num_experts": far + 1, "record_bytes": record_bytes, "is_speculative": False}
        function(**case.tensors, **options, programs=2, **SMALL)
        assert case.row(2).equal(records[0, 0]), name


@pytest.mark.parametrize("number", [0, 2])
def test_nothing_to_fetch_touches_nothing(number: int, pin: Pin) -> None:
    """A count of 0 beside a table of nonsense, and a table without entries."""
    case = Case(pin(random_bytes(1, 2, 256)), 2, random_entries(number, 2, 2), count=0)
    case.tensors["keys"].fill_(2**30)
    case.tensors["slots"].fill_(2**30)
    if not number:
        for name in ("keys", "slots", "epochs", "arrivals"):
            case.tensors[name] = case.tensors[name][:0]
    case.run(fetch, programs=8, **SMALL)
    assert (case.tensors["buffer"].view(torch.uint8) == POISON).all()
    assert (case.tensors["landed"] == -7).all()
    assert not case.tensors["arrivals"].any()
    assert case.tensors["moved"].tolist() == [1000]


REFUSED: dict[str, dict[str, Any]] = {
    "keys is torch.int64": {"keys": table([0, 0], torch.int64)},
    "slots has shape": {"slots": table([0], torch.int32)},
    "epochs is torch.int32": {"epochs": table([0, 0], torch.int32)},
    "count has shape": {"count": table([0, 0], torch.int32)},
    "arrivals is not contiguous": {"arrivals": table([0, 0, 0, 0], torch.int32)[::2]},
    "layer_base is torch.int32": {"layer_base": table([0], torch.int32)},
    "copy_epoch has shape": {"copy_epoch": table([0, 0], torch.int64)},
    "landed has shape": {"landed": table([0, 0], torch.int64)},
    "moved is torch.int32": {"moved": table([0], torch.int32)},
    "ready has shape": {"ready": table([0, 0], torch.int32)},
    "closing has shape": {"closing": table([0, 0], torch.int32)},
    "listed is torch.int64": {"listed": table([0], torch.int64)},
    "listed is there and closing is not": {"listed": table([0], torch.int32), "closing": None},
    "goes_first is for launches with `listed`": {"goes_first": [table([0], torch.int32)]},
    "and two words at most": {"listed": table([0], torch.int32), "goes_first": [table([0], torch.int32)] * 3},
    r"goes_first\[0\] is torch.int64": {"listed": table([0], torch.int32), "goes_first": [table([0], torch.int64)]},
    "first_bytes is 128, expected a multiple of 256 up to 512": {"first_bytes": 128},
    "first_bytes is 768": {"first_bytes": 768},
    "num_experts is 0": {"num_experts": 0},
    "record_bytes is 384, expected a multiple of 256": {"record_bytes": 384},
    "a row of buffer has 512 bytes, expected those of a record, 256": {"record_bytes": 256},
    "buffer is not contiguous": {"buffer": torch.zeros(3, 512, dtype=torch.bfloat16, device=DEVICE)[:, ::2]},
}
REFUSED_BY_KERNEL: dict[str, dict[str, Any]] = {
    "buffer is at an address": {"buffer": torch.zeros(772, dtype=torch.bfloat16, device=DEVICE)[4:].view(3, 256)},
    "chunk_words is 64, expected a power of two": {"chunk_words": 64, "num_warps": 1},
    "chunk_words is 512, expected a power of two": {"chunk_words": 512, "num_warps": 8},
    "chunk_words is 3072": {"chunk_words": 3072},
    "programs is 0": {"programs": 0},
    "chunks_per_look is 0": {"chunks_per_look": 0},
    "delay is -1": {"delay": -1},
}


@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_BY_KERNEL])
def test_refusals(message: str, pin: Pin) -> None:
    case = Case(pin(random_bytes(1, 2, 512)), 3, [(1, 1, 1)])
    arguments = {**case.tensors, "num_experts": 2, "record_bytes": 512, "is_speculative": False}
    for function in (fetch, fetch_ref) if message in REFUSED else (fetch,):
        with pytest.raises(ValueError, match=message):
            function(**{**arguments, **REFUSED.get(message, {}), **REFUSED_BY_KERNEL.get(message, {})})


# What only a GPU can show.


@pytest.fixture(scope="module")
def published_records(pin: Pin) -> dict[int, torch.Tensor]:
    """Two layers of four experts, by their bytes."""
    return {size: pin(random_bytes(2, 4, size, seed=size)) for size in PUBLISHED_BYTES}


@pytest.mark.gpu
@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("record_bytes", PUBLISHED_BYTES)
@pytest.mark.parametrize("tiles", [(4, 2048, 4, 1), (8, 8192, 8, 4), (13, 8192, 4, 3), (32, 4096, 8, 16)])
def test_full_size(
    tiles: tuple[int, int, int, int],
    record_bytes: int,
    is_speculative: bool,
    published_records: dict[int, torch.Tensor],
) -> None:
    assert ON_GPU
    case = Case(published_records[record_bytes], 12, random_entries(8, 8, 12), refuted=(2, 7))
    options = dict(zip(("programs", "chunk_words", "num_warps", "chunks_per_look"), tiles, strict=True))
    assert_as_reference(case, is_speculative, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("is_speculative", [False, True])
def test_last_slot_of_a_large_pool(is_speculative: bool, published_records: dict[int, torch.Tensor]) -> None:
    """Its first word is number 2,168,193,024, beyond int32, in a buffer of 8.7 GB."""
    record_bytes = PUBLISHED_BYTES[0]
    records, last = published_records[record_bytes], 919
    case = Case(records, 1, [(5, 0, 7)])
    buffer = torch.empty(last + 1, record_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
    rows = buffer.view(torch.uint8)
    near = [0, 8, 9, last - 1]  # an offset of bytes modulo 2³² would begin in row 8
    rows[near] = POISON
    case.tensors |= {
        "buffer": buffer,
        "slots": table([last, 0], torch.int32),
        "copy_epoch": table([7] * (last + 1), torch.int64),
        "landed": table([0] * (last + 1), torch.int64),
    }
    case.run(fetch, is_speculative)
    assert rows[last].cpu().equal(records[1, 1])
    assert (rows[near] == POISON).all()
    assert case.tensors["landed"].nonzero().tolist() == [[last]]


@pytest.mark.gpu
@pytest.mark.parametrize("chunks_per_look", [1, 4])
def test_refuted_while_it_is_copied(chunks_per_look: int, published_records: dict[int, torch.Tensor]) -> None:
    """Another stream refutes the first record of two: the rest of it is dropped, and only the second is published."""
    record_bytes = PUBLISHED_BYTES[0]
    case = Case(published_records[record_bytes], 3, [(6, 2, 11), (1, 0, 13)])
    options = {"programs": 8, "chunks_per_look": chunks_per_look}
    case.run(fetch, True, **options, delay=1)  # compiles
    case = replace(case)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    case.run(fetch, True, **options, delay=20_000)  # some 15 ms before each of a program's 36 chunks of a record
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.05)
    with torch.cuda.stream(side):
        case.tensors["copy_epoch"][2] = 0
    side.synchronize()
    assert not done.query(), "the record was complete before it was refuted"
    torch.cuda.synchronize()
    moved = int(case.tensors["moved"]) - 1000 - record_bytes
    assert 0 < moved < record_bytes
    assert moved % (4 * 8192) == 0
    first, second = case.tensors["arrivals"].tolist()[:2]
    assert (first, second) == (0, 8)
    assert case.tensors["landed"].tolist() == [13, -7, -7]
    assert case.row(0).equal(case.source(1))
    copied = (case.row(2).view(-1, 4 * 8192) == case.source(0).view(-1, 4 * 8192)).all(dim=1)
    assert int(copied.sum()) * 4 * 8192 == moved
    assert (case.row(2).view(-1, 4 * 8192)[~copied] == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize("is_speculative", [False, True])
def test_what_is_ready_is_there_before_the_rest(
    is_speculative: bool, published_records: dict[int, torch.Tensor]
) -> None:
    """First parts of all records, while another stream looks on; and the last record is not whole yet."""
    record_bytes, first_bytes = PUBLISHED_BYTES[1], PUBLISHED_BYTES[1] // 512 * 256
    records = published_records[record_bytes]
    sources = records.flatten(0, 1).to(DEVICE)
    entries = random_entries(3, 8, 8)
    options = {"programs": 4, "first_bytes": first_bytes}
    case = Case(records, 8, entries)
    case.run(fetch, is_speculative, delay=1, **options)  # compiles; and what compares is loaded
    assert case.row(entries[0][1]).to(DEVICE)[:first_bytes].equal(sources[entries[0][0], :first_bytes])
    case = replace(case)
    ready, landed, rows = case.tensors["ready"], case.tensors["landed"], case.tensors["buffer"].view(torch.uint8)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    case.run(fetch, is_speculative, delay=2000, **options)
    done.record()
    with torch.cuda.stream(side):
        while ready.item() != READY:
            assert not done.query(), "the list was complete before it was ready"
        are_there = [rows[slot, :first_bytes].equal(sources[key, :first_bytes]) for key, slot, _ in entries]
        is_whole = landed[entries[-1][1]].item() == entries[-1][2]
    assert are_there == [True] * 3
    assert not is_whole
    torch.cuda.synchronize()


@triton.jit
def _list_late_kernel(keys_ptr, slots_ptr, epochs_ptr, count_ptr, listed_ptr, spun_ptr, turns, PDL: tl.constexpr):
    """A plan of one entry, (3, 5, 8), that lets its fetch begin long before it is written."""
    await_inputs(PDL)
    release_dependents(PDL)
    unseen = spin(spun_ptr, turns)
    tl.store(keys_ptr, 3 + unseen)
    tl.store(slots_ptr, 5 + unseen)
    tl.store(epochs_ptr, 8)
    tl.store(count_ptr, 1)
    tl.debug_barrier()
    tl.atomic_xchg(listed_ptr, LISTED_WORD, sem="release", scope="gpu")


@pytest.mark.gpu
def test_what_was_listed_before_is_not_copied(pin: Pin) -> None:
    """A fetch begins beside the launch that writes its list, while the one of the last time is still there."""
    records = pin(random_bytes(1, 8, 2816))
    case, listed = Case(records, 8, [(1, 2, 7), (4, 6, 7)]), table([0], torch.int32)
    case.tensors["copy_epoch"].fill_(8)
    options = launch_options(case.tensors["keys"].device)

    def step() -> None:
        lists = [case.tensors[name] for name in ("keys", "slots", "epochs", "count")]
        _list_late_kernel[(1,)](*lists, listed, case.tensors["landed"], 1000, **options)
        case.run(fetch, True, programs=3, listed=listed, **SMALL)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        for name, value in (("keys", 1), ("slots", 2), ("epochs", 8), ("count", 1), ("arrivals", 0), ("closing", 0)):
            case.tensors[name][0] = value
        case.tensors["ready"].zero_()
        case.tensors["buffer"].view(torch.uint8).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert (case.row(2) == POISON).all(), "it copied what was listed before"
        assert case.row(5).equal(records[0, 3])
        assert case.tensors["landed"][5] == 8
        assert listed.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 0])
def test_others_go_first(count: int, pin: Pin) -> None:
    """Not a byte of this list while the other launch has not asked for its last chunks, nor the word that all of it is
    asked for, empty or not; that copy takes a millisecond, less than the courtesy lasts. Some may be over before they
    are looked at, where the GPU is shared."""
    record_bytes = 64 * 2816
    records = pin(random_bytes(1, 8, record_bytes))
    slow, case = Case(records, 8, [(0, 0, 5), (1, 1, 5)]), Case(records, 8, [(2, 2, 5), (3, 3, 5)], count=count)
    expected = records[0, 2:4] if count else torch.full_like(records[0, 2:4], POISON)
    case.tensors["buffer"] = slow.tensors["buffer"]
    rows, listed = case.tensors["buffer"].view(torch.uint8)[2:4], table([LISTED], torch.int32)
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    words = {"listed": listed, "goes_first": [slow.tensors["closing"]]}

    def step() -> None:
        for stream in (first, second, third):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            slow.run(fetch, delay=6, programs=2, **SMALL)
        with torch.cuda.stream(second):
            case.run(fetch, True, programs=3, **words, **SMALL)

    step()  # compiles; and what compares is loaded
    torch.cuda.synchronize()
    assert (rows != POISON).any().item() == (count > 0)
    times_seen = 0
    for _ in range(40):
        torch.cuda.synchronize()
        for tensors in (slow.tensors, case.tensors):
            for name in ("arrivals", "ready", "closing"):
                tensors[name].zero_()
        listed.fill_(LISTED)
        rows.fill_(POISON)
        torch.cuda.synchronize()
        step()
        done = torch.cuda.Event()
        done.record(second)
        with torch.cuda.stream(third):
            while not done.query():
                # Before the other launch's word is read.
                is_touched, is_closing = (rows != POISON).any().item(), case.tensors["closing"].item() == READY
                if slow.tensors["closing"].item() != READY:
                    times_seen += 1
                    assert not is_touched, "it went first"
                    assert not is_closing, "it let nobody go first"
        torch.cuda.synchronize()
        assert rows.cpu().equal(expected)
        assert case.tensors["closing"].item() == READY
    assert times_seen > 0, "the other launch had ended before anything was looked at"


@pytest.mark.gpu
@pytest.mark.parametrize("delays", [(400, 50), (50, 400), (0, 400)])
def test_gate_up_runs_beside_the_copy_of_down(delays: tuple[int, int], pin: Pin) -> None:
    """Two lists on two streams, one captured graph, slots poisoned before each replay: the bits of whole records."""
    hidden, size, experts = 256, 64, 8
    values = torch.randn(2, experts, 3 * hidden * size, generator=generator(1)).to(torch.bfloat16)
    records = pin(values.view(torch.uint8))
    record_bytes, first_bytes = 6 * hidden * size, 4 * hidden * size
    cases = [Case(records, 8, [(1, 0, 2), (12, 3, 4)]), Case(records, 8, [(7, 6, 3), (9, 5, 5)])]
    buffer = cases[0].tensors["buffer"]
    cases[1].tensors["buffer"] = buffer
    x = torch.randn(1, hidden, generator=generator(2)).to(DEVICE, torch.bfloat16)
    slot_ids = table([0, 6, 3, 5], torch.int32)[None]
    keys = [1, 7, 12, 9]
    gate_up, down = (
        part.unflatten(1, shape)
        for part, shape in zip(
            buffer.split([2 * hidden * size, hidden * size], dim=1), [(2 * size, hidden), (hidden, size)], strict=True
        )
    )
    whole = values.flatten(0, 1)[keys].to(DEVICE)
    parts = (
        whole[:, : 2 * hidden * size].unflatten(1, (2 * size, hidden)),
        whole[:, 2 * hidden * size :].unflatten(1, (hidden, size)),
    )
    expected = expert_gemm(x, table([0, 1, 2, 3], torch.int32)[None], *(part.contiguous() for part in parts))
    out, side = torch.empty_like(expected), torch.cuda.Stream()
    ready = table([0] * 6, torch.int32).view(2, 3)[:, 1]
    for case, word in zip(cases, ready.split(1), strict=True):
        case.tensors["ready"] = word

    def step() -> None:
        main = torch.cuda.current_stream()
        for tensor in (ready, *(case.tensors["arrivals"] for case in cases)):
            tensor.zero_()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            cases[1].run(fetch, delay=delays[1], programs=2, first_bytes=first_bytes, **SMALL)
        cases[0].run(fetch, delay=delays[0], programs=3, first_bytes=first_bytes, **SMALL)
        main.wait_stream(side)
        expert_gemm(x, slot_ids, gate_up, down, out=out, programs=16, ready=ready)

    assert buffer.shape[1] * 2 == record_bytes
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        buffer.view(torch.int16).fill_(0x7FC0)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert out.equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_speculative", [False, True])
def test_a_published_record_is_complete(is_speculative: bool, published_records: dict[int, torch.Tensor]) -> None:
    """While the list is still being copied, another stream reads what has landed so far."""
    records = published_records[PUBLISHED_BYTES[0]]
    sources = records.flatten(0, 1).to(DEVICE)
    case = Case(records, 8, random_entries(8, 8, 8))
    case.run(fetch, is_speculative, delay=1)  # compiles; and what compares is loaded, which waits for all that runs
    assert case.row(case.entries[0][1]).to(DEVICE).equal(sources[case.entries[0][0]])
    case = replace(case)
    landed, rows = case.tensors["landed"], case.tensors["buffer"].view(torch.uint8)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    case.run(fetch, is_speculative, delay=3000)
    done.record()
    early: set[int] = set()
    with torch.cuda.stream(side):
        while not done.query():
            epochs = landed.tolist()  # waits for the side stream alone
            for key, slot, epoch in case.entries:
                if slot not in early and epochs[slot] == epoch:
                    assert rows[slot].equal(sources[key])
                    early.add(slot)
    assert len(early) >= 2, "the list was complete before anything was read"
    torch.cuda.synchronize()
    assert landed.tolist() == [epoch for _, _, epoch in sorted(case.entries, key=lambda entry: entry[1])]


@pytest.mark.gpu
def test_replays_of_a_captured_launch(pin: Pin) -> None:
    """10,000 replays that each read another list, with lists of 0 to R entries, some refuted; every byte is checked."""
    layers, experts, record_bytes, slots, size, lists, replays = 3, 8, 2816, 24, 8, 509, 10_000
    records = pin(random_bytes(layers, experts, record_bytes))
    sources = records.flatten(0, 1).to(DEVICE)
    random = generator(1)
    keys = torch.randint(layers * experts, (lists, size), generator=random).int().to(DEVICE)
    chosen = torch.stack([torch.randperm(slots, generator=random)[:size] for _ in range(lists)]).int().to(DEVICE)
    counts = torch.randint(size + 1, (lists, 1), generator=random).int().to(DEVICE)
    refuted = (torch.rand(lists, size, generator=random) < 0.2).to(DEVICE)
    place = torch.arange(size, device=DEVICE)
    case = Case(records, slots, [(0, slot, 0) for slot in range(size)])
    for name in ("keys", "slots", "epochs", "arrivals"):
        case.tensors[name] = case.tensors[name][:size]
    case.tensors["moved"].zero_()
    step, wrong = table([0], torch.int64), table([0], torch.int64)
    moved = table([0], torch.int64)

    def replay(is_speculative: bool) -> None:
        own = step % lists
        step.add_(1)
        tensors, row = case.tensors, chosen.index_select(0, own)[0]
        tensors["keys"].copy_(keys.index_select(0, own)[0])
        tensors["slots"].copy_(row)
        tensors["epochs"].copy_(step * 2 + place)
        tensors["count"].copy_(counts.index_select(0, own)[0])
        tensors["arrivals"].zero_()
        tensors["landed"].zero_()
        is_refuted = refuted.index_select(0, own)[0]
        tensors["copy_epoch"].index_copy_(0, row.long(), torch.where(is_refuted, -1, tensors["epochs"]))
        tensors["buffer"].view(torch.uint8).fill_(POISON)
        case.run(fetch, is_speculative, chunk_words=128, num_warps=1, chunks_per_look=2)
        is_copied = place < tensors["count"]
        if is_speculative:
            is_copied = is_copied & ~is_refuted
        moved.add_(is_copied.sum() * record_bytes)
        expected = torch.full((slots, record_bytes), POISON, dtype=torch.uint8, device=DEVICE)
        wanted = torch.where(is_copied[:, None], sources.index_select(0, tensors["keys"].long()), POISON)
        expected.index_copy_(0, row.long(), wanted.to(torch.uint8))
        landed = torch.zeros_like(tensors["landed"])
        landed.index_copy_(0, row.long(), torch.where(is_copied, tensors["epochs"], 0))
        wrong.add_((tensors["buffer"].view(torch.uint8) != expected).sum() + (landed != tensors["landed"]).sum())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for is_speculative in (False, True):
            replay(is_speculative)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for is_speculative in (False, True):
            replay(is_speculative)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert int(step) == 2 * (replays + 1)
    assert int(wrong) == 0
    assert int(case.tensors["moved"]) == int(moved) > 0
