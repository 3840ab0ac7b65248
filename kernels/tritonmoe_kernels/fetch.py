"""Copy listed expert records from mapped host memory into slots: the GPU fetches what it has decided to fetch.

Floor of `fetch`: the bytes of the list over the link. One bf16 record of 9.44 MB takes 173 us at 54.6 GB/s (the copy
engine, PCIe 5 x16) and 184 us at 51.2 GB/s (a kernel that reads host memory); a 4-bit record of 2.507 MB 46 and 49 us.

Schedule: a few programs share every record, in list order, by chunks in turn. A read over PCIe takes 1-2 us, so bytes
in flight decide: a chunk of 4096 words on 4 warps is 8 loads of 16 bytes a thread before its first store, and 16
programs have 262 KB under way where 51.2 GB/s needs about 100 KB. What is to spare hides what a program does between
two records. The list is read on the device, so one captured launch serves any list; an empty one ends after one load.
A launch costs some microseconds beside its records' time (docs/log.md): two reads, and the way there and back of the
first and the last chunk. Small programs find a place sooner beside others that fill the device.

Publication: a program that stored its part of a record arrives at the record's counter; the last of them writes the
copy's epoch to `landed`. Barrier, acquire-release count and release exchange make every program's stores visible to
whoever reads that epoch with an acquire.

What computes with the records may begin with their first part, and does while the rest of the last one is copied: a
program that has stored its share of all first parts arrives at `ready`, of which the last makes READY, and lets
dependent launches begin. These have no other way to know what is there: a launch that begins early sees nothing of
what it depends on but by an acquire. They may wait for READY: they begin when all programs are on the device, which
then wait for no launch that is not. What wants whole records awaits the launch, as ever.

A list can be awaited likewise, so that nothing but an acquire and a read lie between what the planner has written and
the first chunk, where a launch behind another's end takes some microseconds, and more until programs find a place among
those that compute. Such a launch then lets others go first, of which it knows by a word that they have asked for their
last chunks (`closing`): the link is never idle between two, and one does not slow down what is wanted sooner. That is
a courtesy, with an end: whether what it waits for is on the device nobody promises.

A speculative record may be refuted while it is copied: then its slot's `copy_epoch` is no longer the entry's. Programs
look every few chunks and drop the rest of the record, without arriving, so that it is never published. The look is a
scalar atomic, as a load may be served from L1, and it is issued while the loads of a chunk are under way: its
microsecond is theirs too. Were it not, one look in 2 chunks of 5 us (16 programs at 51.2 GB/s) would take 10 % of a
program's time, and nothing of the link's until the bytes in flight to spare are used up. Stores to a refuted slot may
still be under way for as long as this launch runs: the planner gives it to another record only when that is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.fetch_reference import READY, check_fetch, settle_words
from tritonmoe_kernels.planner_state import LISTED

READY_WORD = tl.constexpr(READY)
LISTED_WORD = tl.constexpr(LISTED)
PATIENCE = tl.constexpr(16384)  # looks at a word, each of about a quarter of a microsecond
ACCESS_BYTES = 16
WORD_BYTES = 4


@triton.jit
def look(word_ptr):
    """The word that another branch of the graph may write at any time, read where both meet: in L2.

    Adding nothing, it compiles to an acquire load on NVIDIA GPUs: it never writes back what it read.
    """
    return tl.atomic_add(word_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def await_word(word_ptr, value):
    """Wait until it has this value, and see what was stored before. Whoever writes it must be on the device."""
    while look(word_ptr) != value:
        pass


@triton.jit
def publish(arrivals_ptr, word_ptr, value):
    """Arrive; the last program of the grid writes `value` to `word_ptr`, after all programs' stores.

    The barrier comes first because one thread arrives for all: every warp must have stored by then.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.atomic_xchg(word_ptr, value, sem="release", scope="gpu")


@triton.jit
def spin(word_ptr, turns):
    """0, after about `turns` microseconds, for tests. Compilers remove a read whose result changes nothing.

    `word_ptr` is never the least int64, but only the caller knows.
    """
    unseen = 0
    for _ in range(turns):
        unseen += (look(word_ptr) == -0x8000000000000000).to(tl.int32)
    return unseen


@triton.jit
def _let_begin(ready_ptr, PDL: tl.constexpr):
    """This program has stored its share of all first parts."""
    if ready_ptr is not None:
        publish(ready_ptr, ready_ptr, READY_WORD)
        release_dependents(PDL)


@triton.jit
def _let_go_first(word_ptr):
    """Wait until another launch has asked for its last chunks, but not for ever."""
    if word_ptr is not None:
        looks = 0
        while (looks < PATIENCE) & (look(word_ptr) != READY_WORD):
            looks += 1


@triton.jit
def _close(closing_ptr, listed_ptr):
    """This program asks for its last chunk now. The last one to do so takes back what all have seen."""
    if closing_ptr is not None:
        arrived = tl.atomic_add(closing_ptr, 1, sem="relaxed", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            if listed_ptr is not None:
                tl.atomic_xchg(listed_ptr, 0, sem="relaxed", scope="gpu")
            tl.atomic_xchg(closing_ptr, READY_WORD, sem="relaxed", scope="gpu")


# Rows of tables have any alignment: told apart by it, each combination would be one more kernel to compile.
@triton.jit(
    do_not_specialize=["group", "delay", "first_words"],
    do_not_specialize_on_alignment=[
        "keys_ptr",
        "slots_ptr",
        "epochs_ptr",
        "count_ptr",
        "arrivals_ptr",
        "moved_ptr",
        "ready_ptr",
        "closing_ptr",
        "listed_ptr",
        "first_ptr",
        "second_ptr",
    ],
)
def _fetch_kernel(
    keys_ptr,  # [R] int32
    slots_ptr,  # [R] int32
    epochs_ptr,  # [R] int64
    count_ptr,  # [1] int32
    arrivals_ptr,  # [R] int32
    layer_base_ptr,  # [L] int64
    buffer_ptr,  # [S, record_words] int32
    copy_epoch_ptr,  # [S] int64
    landed_ptr,  # [S] int64
    moved_ptr,  # [1] int64
    ready_ptr,  # [1] int32, or None
    closing_ptr,  # [1] int32, or None
    listed_ptr,  # [1] int32 to await instead of the launch before, or None
    first_ptr,  # [1] int32 of a launch that goes first, or None
    second_ptr,  # one more, or None
    num_experts,
    record_words,
    first_words,
    group,
    delay,  # or None
    IS_SPECULATIVE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Dependents are not let begin before they have work: they would wait in the place of what computes.
    if listed_ptr is None:
        await_inputs(PDL)
    else:
        await_word(listed_ptr, LISTED_WORD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    # Each entry is asked for before the record in front of it is copied, so that only the first one is waited for.
    key, slot, epoch = tl.load(keys_ptr), tl.load(slots_ptr), tl.load(epochs_ptr)
    count = tl.load(count_ptr)
    num_chunks = tl.cdiv(record_words, CHUNK)
    words = tl.arange(0, CHUNK)
    _let_go_first(first_ptr)
    _let_go_first(second_ptr)
    is_closing = 0
    has_begun = 0
    moved_words = 0  # int32: a program moves less than 8 GB in a launch
    for entry in range(0, count):
        following = entry + 1
        next_key = tl.load(keys_ptr + following, mask=following < count, other=0)
        next_slot = tl.load(slots_ptr + following, mask=following < count, other=0)
        next_epoch = tl.load(epochs_ptr + following, mask=following < count, other=0)
        record = (key % num_experts).to(tl.int64) * record_words
        source = tl.load(layer_base_ptr + key // num_experts) + record * 4
        # An address from a table has no known alignment: without a promise, loads would be of one word.
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        target_ptr = buffer_ptr + slot.to(tl.int64) * record_words
        # Chunks are dealt out in turn over the whole list: the program after the last one goes first.
        chunk = (program + entry * (programs - num_chunks % programs)) % programs
        end = num_chunks
        looked = 0
        while chunk < end:
            if (has_begun == 0) & (following == count) & (chunk * CHUNK >= first_words):
                _let_begin(ready_ptr, PDL)
                has_begun = 1
            if (is_closing == 0) & (following == count) & (chunk + programs >= num_chunks):
                _close(closing_ptr, listed_ptr)
                is_closing = 1
            if delay is not None:
                chunk += spin(copy_epoch_ptr + slot, delay)
            offsets = chunk * CHUNK + words
            inside = offsets < record_words
            data = tl.load(source_ptr + offsets, mask=inside, other=0, cache_modifier=".cg")
            if IS_SPECULATIVE:
                if looked % group == 0:  # noqa: SIM102 - joined by `and`, it would look at every chunk
                    if look(copy_epoch_ptr + slot) != epoch:
                        end = -1
                looked += 1
                inside = inside & (offsets < end * CHUNK)  # nothing any more, once refuted
            tl.store(target_ptr + offsets, data, mask=inside)
            moved_words += tl.where(chunk < end, tl.minimum(record_words - chunk * CHUNK, CHUNK), 0)
            chunk += programs
        if end >= 0:
            publish(arrivals_ptr + entry, landed_ptr + slot, epoch)
        key, slot, epoch = next_key, next_slot, next_epoch
    if is_closing == 0:
        _close(closing_ptr, listed_ptr)
    if has_begun == 0:
        _let_begin(ready_ptr, PDL)
    if moved_words > 0:
        tl.atomic_add(moved_ptr, moved_words.to(tl.int64) * 4, sem="relaxed", scope="gpu")
    if listed_ptr is not None:  # its end is that of what it came behind, too
        await_inputs(PDL)


def fetch(
    keys: torch.Tensor,
    slots: torch.Tensor,
    epochs: torch.Tensor,
    count: torch.Tensor,
    arrivals: torch.Tensor,
    layer_base: torch.Tensor,
    num_experts: int,
    record_bytes: int,
    buffer: torch.Tensor,
    copy_epoch: torch.Tensor,
    landed: torch.Tensor,
    moved: torch.Tensor,
    is_speculative: bool,
    programs: int = 16,
    chunk_words: int = 4096,
    chunks_per_look: int = 2,
    num_warps: int = 4,
    delay: int = 0,
    ready: torch.Tensor | None = None,
    first_bytes: int = 0,
    closing: torch.Tensor | None = None,
    listed: torch.Tensor | None = None,
    goes_first: Sequence[torch.Tensor] = (),
) -> None:
    """Copy the first `count` listed records into their slots and publish each one's epoch in `landed`.

    Entry r of the list, all on the device: keys [R] int32, layer · num_experts + expert; slots [R] int32, distinct;
    epochs [R] int64; arrivals [R] int32, zero for each launch and `programs` for a published record after it. count [1]
    int32, at most R. layer_base [L] int64: where the records of a layer begin, in memory that the device can read, at
    multiples of 16 bytes; expert e's is `e · record_bytes` further. buffer [S, N], any dtype: N elements are one
    record, a multiple of 256 bytes. copy_epoch and landed [S] int64. moved [1] int64: copied bytes are added to it.

    With `is_speculative`, an entry whose slot has another copy_epoch than the entry is dropped, also halfway: every
    program looks before it stores the first of `chunks_per_look` chunks. Of a dropped record `arrivals` stays below
    `programs`, `moved` has the part that was copied, and `landed` is as it was.

    `ready` [1] int32, zero for each launch, is READY once the first `first_bytes` of every record are in their slots,
    or the record is dropped; then launches that depend on this one may begin. `closing` [1] int32, zero for each
    launch, is READY once every program asks for its last chunk.

    With `listed` [1] int32 the launch begins beside the one that it is behind, which makes the word LISTED when the
    list and `count` are written; `closing` must then be given, and makes it 0 again. Nothing else may be what this
    launch relies on. It lets launches go first that `goes_first` has the `closing` of, two at most, or for some
    milliseconds; also where it has nothing to copy itself: so whoever lets it go first lets those go first, too.

    `programs` and tiles change nothing but speed, and no program waits for another of its launch. `delay` (tests) spins
    about as many microseconds before every chunk. Launches whose lists share a slot must run one after the other. Lists
    of any length, position in their tables, looks and delays share one compiled kernel, but for a `delay` of 0.
    """
    check_fetch(
        keys, slots, epochs, count, arrivals, layer_base, num_experts, record_bytes, buffer, copy_epoch, landed, moved,
        ready, first_bytes, closing, listed, goes_first,
    )  # fmt: skip
    if buffer.data_ptr() % ACCESS_BYTES:
        raise ValueError(f"buffer is at an address that is no multiple of {ACCESS_BYTES}")
    if chunk_words & (chunk_words - 1) or chunk_words * WORD_BYTES < ACCESS_BYTES * 32 * num_warps:
        raise ValueError(f"chunk_words is {chunk_words}, expected a power of two, 4 words or more for each thread")
    for name, value, least in (("programs", programs, 1), ("chunks_per_look", chunks_per_look, 1), ("delay", delay, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    if not len(keys) or not len(buffer):
        settle_words(ready, closing, listed)
        return
    _fetch_kernel[(programs,)](
        keys,
        slots,
        epochs,
        count,
        arrivals,
        layer_base,
        buffer.view(torch.int32),
        copy_epoch,
        landed,
        moved,
        ready,
        closing,
        listed,
        *(*goes_first, None, None)[:2],
        num_experts,
        record_bytes // WORD_BYTES,
        first_bytes // WORD_BYTES,
        chunks_per_look,
        delay or None,
        IS_SPECULATIVE=is_speculative,
        CHUNK=chunk_words,
        num_warps=num_warps,
        **launch_options(keys.device),
    )
