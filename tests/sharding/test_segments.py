"""Segments put in another order: the same whether they are copied or gathered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpuemb_torch.sharding import distinct


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), seed=st.integers(0, 100), short=st.sampled_from([0, 9])
)
def test_any_order(sizes: list[int], seed: int, short: int) -> None:
    order = np.random.default_rng(seed).permutation(len(sizes))
    values = torch.arange(sum(sizes))
    ends = np.cumsum(sizes)
    expected = [n for segment in order for n in range(ends[segment] - sizes[segment], ends[segment])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct, "_SHORT", short)
        assert distinct._reordered(values, np.array(sizes), order).tolist() == expected
