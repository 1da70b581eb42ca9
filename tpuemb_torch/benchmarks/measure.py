"""Times, memory, bandwidth and errors of embedding steps."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.benchmarks.implementations import ACCUMULATOR, RATE, Batch, Implementation
from tpuemb_torch.optimizers import create_rule, reference_step


@dataclass
class Times:
    """Milliseconds of each step, and of its forward."""

    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def add(self, implementation: Implementation, synchronize: Callable[[], None], clock: Callable[[], float]) -> None:
        """Runs a step."""
        start = clock()
        implementation.forward()
        synchronize()
        middle = clock()
        implementation.backward()
        synchronize()
        self.forward.append(1e3 * (middle - start))
        self.step.append(1e3 * (clock() - start))

    def summary(self) -> dict[str, float]:
        """Medians, and the 90% quantile over the median."""
        median = float(np.median(self.step))
        return {
            "forward_ms": float(np.median(self.forward)),
            "step_ms": median,
            "fastest_ms": min(self.step),
            "p90_over_median": float(np.percentile(self.step, 90)) / median,
        }


def wait_until_idle(patience: float) -> None:
    """Waits, at most `patience` seconds, until no other process has used a processor for a moment (Linux)."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = _idle_ticks()
        time.sleep(0.1)
        after = _idle_ticks()
        if before is None or after is None:
            return
        # 100 ticks a second on each processor.
        if after[0] - before[0] >= 0.93 * (after[1] - before[1]):
            return


def _idle_ticks() -> tuple[int, int] | None:
    """Ticks in which the processors were idle, and all ticks."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            ticks = [int(word) for word in file.readline().split()[1:]]
    except OSError:
        return None
    return ticks[3] + ticks[4], sum(ticks)


def interleaved(
    implementations: Sequence[Implementation],
    repeats: int,
    device: str,
    warm_up: int = 3,
    patience: float = 0.0,
    processor_time: bool = False,
) -> list[Times]:
    """Times of steps in turns, A B A B ..., so that all see the same load of the machine.

    Args:
        implementations: what to run.
        repeats: steps of each that count.
        device: "cpu" or "cuda".
        warm_up: steps of each that do not.
        patience: seconds to wait, before each turn, for other processes to pause.
        processor_time: count the time of this process on all processors, instead of the time that passes.
    """
    clock = time.process_time if processor_time else time.perf_counter
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = [Times() for _ in implementations]
    for repeat in range(warm_up + repeats):
        for index, implementation in enumerate(implementations):
            if repeat == warm_up:
                times[index] = Times()
            if patience and repeat >= warm_up:
                wait_until_idle(patience)
                # Threads and caches that went to sleep meanwhile are not part of a step.
                Times().add(implementation, synchronize, clock)
            times[index].add(implementation, synchronize, clock)
    return times


def error_of_first_step(implementation: Implementation, batch: Batch, optimizer: str) -> float:
    """Runs a step from slots at their start; the largest difference of a weight to float64.

    Up to eight tables are compared: the sums of a thousand would take longer than all steps.
    """
    parts = batch.per_feature()[:8]
    config = batch.workload.config(optimizer)
    touched = [torch.unique(ids) for ids, _, _ in parts]
    before = [implementation.weights(i)[rows].cpu().double().numpy() for i, rows in enumerate(touched)]
    implementation.forward()
    implementation.backward()
    worst = 0.0
    for index, ((ids, offsets, gradient), rows) in enumerate(zip(parts, touched, strict=True)):
        folded = torch.zeros(rows.numel(), gradient.shape[1], dtype=torch.float64)
        place = torch.searchsorted(rows, ids)
        bag = torch.repeat_interleave(torch.arange(gradient.shape[0]), offsets.diff())
        for begin in range(0, ids.numel(), 1 << 16):
            part = slice(begin, begin + (1 << 16))
            folded.index_add_(0, place[part], gradient[bag[part]].double())
        table = config.tables[index]
        start = 0.0 if table.optimizer.algorithm == "adam" else ACCUMULATOR
        slots = [np.full(folded.shape, np.float64(np.float32(start))) for _ in create_rule(table.optimizer).slots]
        rate = np.float64(np.float32(RATE)) * implementation.first_rate
        with np.errstate(all="ignore"):
            expected = reference_step(table.optimizer, before[index], folded.numpy(), rate, *slots)[0]
        after = implementation.weights(index)[rows].cpu().double().numpy()
        worst = max(worst, float(np.nanmax(np.abs(after - expected))))
    return worst


def peak_memory(implementation: Implementation) -> int | None:
    """The most bytes that a step holds beyond those before it; None if it takes none from torch's allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        implementation.forward()
        implementation.backward()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    if not changes:
        return None
    return max(0, int(np.cumsum([change for _, change in changes]).max()))


def copy_bandwidth(device: str) -> float:
    """GB/s of a large copy, bytes read and written."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * 4 * source.numel() / best / 1e9


def moved_bytes(batch: Batch, distinct: int, slots: int) -> int:
    """Bytes that a step cannot do without.

    Rows read for the lookup and sums written; gradients read, once per id; weights and slots of the distinct rows read
    and written.
    """
    workload = batch.workload
    row = 4 * workload.dim
    bags = workload.bags * len(workload.rows)
    return row * (2 * workload.ids + bags + 2 * distinct * (1 + slots))


def distinct_rows(batch: Batch) -> int:
    """Number of distinct rows of a batch, over all tables."""
    return sum(torch.unique(ids).numel() for ids, _, _ in batch.per_feature())


def machine(device: str) -> dict[str, object]:
    """What the numbers depend on: processor, threads, versions; nothing that names the machine."""
    found: dict[str, object] = {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        values = {name.strip(): value.strip() for name, value in lines.items()}
        found["processor"] = values.get("model name", found["processor"])
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size", encoding="utf-8") as file:
            found["L3"] = file.read().strip()
    except OSError:
        pass
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def random_gradient(bags: int, columns: int) -> Tensor:
    """A random gradient, `[bags, columns]`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(bags, columns, generator=generator) * 1e-2
