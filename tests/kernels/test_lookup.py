"""The compiled lookup and sort: what torch gives, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpuemb_torch.kernels.lookup import NativeLookup, TorchLookup
from tpuemb_torch.kernels.native import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(params=[1, 2, 3], ids="threads{}".format)
def _threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def bags(count: int) -> tuple[Tensor, int]:
    """Offsets of bags of 0 to 9 ids, and the number of ids."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 10, (count,)).cumsum(0)])
    return offsets, int(offsets[-1])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("count", "limit"),
    [
        (0, 5),
        (1, 1),
        (5, 10),
        (1000, 10),
        (1000, 2000),
        (50_000, 1),
        (50_000, 3_000_000),
        (40_000, 2**32),
        (100, 2**40),
    ],
)
def test_sort(count: int, limit: int) -> None:
    ids = torch.randint(0, limit, (count,))
    if count > 3:
        ids[3] = limit - 1
    ours, theirs = NativeLookup.sort(ids, limit), TorchLookup.sort(ids, limit)
    for name in ("rows", "starts", "order"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("features", "batch"), [(1, 1), (3, 7), (1, 0), (8, 1000), (500, 16)])
def test_bags_and_rows(features: int, batch: int) -> None:
    offsets, count = bags(features * batch)
    assert torch.equal(
        NativeLookup.bags(offsets, features, batch, count), TorchLookup.bags(offsets, features, batch, count)
    )
    bounds = offsets[torch.arange(features + 1) * batch]
    ids, first_rows = torch.randint(0, 99, (count,)), torch.randint(0, 9999, (features,))
    ours = NativeLookup.add_first_rows(ids, bounds, first_rows)
    assert torch.equal(ours, TorchLookup.add_first_rows(ids, bounds, first_rows))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 24, 64, 65, 130, 2048])
@pytest.mark.parametrize("weighted", [False, True])
def test_look_up(dim: int, weighted: bool) -> None:
    weights = torch.randn(100, dim)
    for features, batch in ((1, 1), (3, 7), (4, 0), (8, 300 if dim < 200 else 5)):
        offsets, count = bags(features * batch)
        ids, gains = torch.randint(0, 100, (count,)), torch.randn(count) if weighted else None
        ours = NativeLookup.look_up(ids, offsets, gains, weights, features, batch)
        assert torch.equal(ours, TorchLookup.look_up(ids, offsets, gains, weights, features, batch))


@pytest.mark.parametrize("bad", [-1, 100, 2**62])
def test_ids_outside_are_refused(bad: int) -> None:
    with pytest.raises(IndexError, match=r"1 of 3 ids are not in \[0, 100\)"):
        NativeLookup.look_up(torch.tensor([1, bad, 2]), torch.tensor([0, 3]), None, torch.randn(100, 4), 1, 1)
