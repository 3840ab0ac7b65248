"""Branches of a captured step: which launches come behind which."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tritonmoe.offload.branch import Branch, done_so_far, make_branch


def test_on_a_cpu_everything_runs_in_place() -> None:
    branch, order = make_branch(torch.device("cpu")), []
    assert type(branch) is Branch
    with branch.fork():
        order.append("forked")
    with branch.go_on(done_so_far(torch.device("cpu"))):
        order.append("went on")
    order.append("after")
    branch.join()
    branch.abandon()
    assert order == ["forked", "went on", "after"]


def edges(graph: torch.cuda.CUDAGraph) -> list[tuple[int, int]]:
    """(from, to) of each, as the graph's own names of its nodes."""
    get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2  # the first version refuses edges of dependent launches
    handle, number = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert get(handle, None, None, None, ctypes.byref(number)) == 0
    begins, ends = ((ctypes.c_void_p * number.value)() for _ in range(2))
    kinds = (ctypes.c_uint64 * number.value)()  # 8 bytes each
    assert get(handle, begins, ends, kinds, ctypes.byref(number)) == 0
    return [(int(begin or 0), int(end or 0)) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.gpu
def test_a_fork_comes_behind_nothing_but_what_is_named() -> None:
    """Counted in the graph: an edge from the branch's former launch, which others imply, would be one more."""
    device = torch.device("cuda")
    branch, other = make_branch(device, -1), make_branch(device)
    values = torch.zeros(8, device=device)
    a, b, c, d, e, f, g, h = values.unbind()

    def step() -> None:
        a.add_(1)
        with branch.fork():
            b.copy_(a)  # behind main's first
        c.add_(1)
        branch.join()
        torch.add(b, c, out=d)  # behind main's second, and the fork's
        with branch.fork():
            b.copy_(d)  # behind main's third alone
        with branch.go_on():
            e.copy_(b)
        c.add_(d)
        fourth = done_so_far(device)
        with other.fork(branch.done):
            f.copy_(e)  # behind the branch's last alone
        with branch.go_on(fourth):
            torch.add(e, c, out=g)  # behind the branch's last, and main's fourth
        branch.join()
        other.join()
        torch.add(f, g, out=h)  # behind main's fourth, the branch and the other

    step()  # not captured: in the order of streams
    torch.cuda.synchronize()
    expected = [1, 2, 3, 2, 2, 2, 5, 7]
    assert values.tolist() == expected
    values.zero_()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    assert len(edges(graph)) == 13
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == expected
