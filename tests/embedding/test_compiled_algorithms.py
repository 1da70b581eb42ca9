"""Every algorithm with the compiled kernel, through the public API: what the eager kernel gives."""

from __future__ import annotations

import pytest

import tpuemb_torch as tpuemb
from tests.distributed.test_algorithms import SIZES, assert_close, config, gradients, part, start, train


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_algorithm_compiled() -> None:
    # One rank's part of each batch: the numbers of rows change from step to step, down to none.
    steps = range(len(SIZES))
    results = [
        train(
            tpuemb.TPUEmbedding(config(), kernel=kernel, experimental={"mdl_adagrad_light"}),
            [part(t, 0) for t in steps],
            [gradients(t, 0) for t in steps],
        )
        for kernel in ("eager", "compiled")
    ]
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    # It is not the start that they agree on.
    for table, slots in start().items():
        assert (results[0][table]["parameters"] != slots["parameters"]).any(), table
