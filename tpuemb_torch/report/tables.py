"""A configuration as text tables."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpuemb_torch.config import Config
from tpuemb_torch.planning import format_bytes
from tpuemb_torch.report.description import describe


class _Optimizer(NamedTuple):
    """What tables with the same optimizer have in common, as it is printed."""

    algorithm: str
    numbers: tuple[str, ...]
    options: tuple[str, ...]
    slots: str


def print_config(config: Config, console: Console | None = None, title: str | None = None) -> None:
    """Prints the tables, features, programs and notes of a configuration.

    Args:
        config: what to print.
        console: where; by default standard output.
        title: the headline, such as the name of the file.
    """
    console = console or Console()
    description = describe(config)
    _print_summary(description, console, title)
    optimizers: dict[_Optimizer, int] = {}
    for table in description["tables"]:
        optimizers.setdefault(_optimizer(table), len(optimizers) + 1)
    console.print(_tables(description, optimizers))
    console.print(_optimizers(optimizers))
    console.print(_features(description))
    programs: dict[tuple[str, ...], list[str]] = {}
    for table in description["tables"]:
        if "program" in table:
            programs.setdefault(tuple(table["program"]), []).append(table["name"])
    for lines, names in programs.items():
        console.print(f"\nProgram of {', '.join(names)}:", style="bold", markup=False)
        for line in lines:
            console.print(line, markup=False, highlight=False)
    for note in description["notes"]:
        console.print(f"Note: {note}", markup=False, highlight=False)


def _print_summary(description: dict[str, Any], console: Console, title: str | None) -> None:
    if title:
        console.print(title, style="bold", markup=False)
    lines = {
        "mode": description["mode"],
        "hosts, TensorCores": f"{description['num_hosts']}, {description['num_tensor_cores']}",
        "batch size per TensorCore": description["batch_size_per_tensor_core"],
        "sharding strategy": description["sharding_strategy"],
        "pipelined with TensorCore": _yes(description["pipeline_execution_with_tensor_core"]),
        "layout": "one output per " + description["layout"],
        "learning rates to send": description["num_learning_rates"],
        "weights, slots": f"{format_bytes(description['weight_bytes'])}, {format_bytes(description['slot_bytes'])}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        grid.add_row(name, str(value))
    console.print(grid)


def _tables(description: dict[str, Any], optimizers: dict[_Optimizer, int]) -> Table:
    view = Table(title="Tables", title_justify="left", box=box.SIMPLE_HEAD)
    view.add_column("id", justify="right", overflow="fold")
    view.add_column("table", overflow="fold")
    for name in ("rows", "dim", "rows/sample", "optimizer"):
        view.add_column(name, justify="right", overflow="fold")
    view.add_column("learning rate", overflow="fold")
    for name in ("weights", "slots"):
        view.add_column(name, justify="right", overflow="fold")
    for i, table in enumerate(description["tables"]):
        view.add_row(
            str(i),
            escape(table["name"]),
            f"{table['vocabulary_size']:,}",
            str(table["dimension"]),
            str(table["num_features"]),
            f"#{optimizers[_optimizer(table)]}",
            _learning_rate(table),
            format_bytes(table["weight_bytes"]),
            format_bytes(table["slot_bytes"]),
        )
    return view


def _optimizers(optimizers: dict[_Optimizer, int]) -> Table:
    """Each different optimizer once: often hundreds of tables share one."""
    view = Table(title="Optimizers, every number resolved", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "algorithm", "numbers", "options", "slots"):
        view.add_column(name, overflow="fold")
    for optimizer, number in optimizers.items():
        parts = (optimizer.algorithm, ", ".join(optimizer.numbers), "; ".join(optimizer.options), optimizer.slots)
        view.add_row(f"#{number}", *(escape(part) for part in parts))
    return view


def _features(description: dict[str, Any]) -> Table:
    view = Table(title="Features, in the order of the activations", title_justify="left", box=box.SIMPLE_HEAD)
    view.add_column("id", justify="right", overflow="fold")
    for name in ("feature", "table", "input shape", "output shape"):
        view.add_column(name, overflow="fold")
    for i, feature in enumerate(description["features"]):
        shapes = (escape(str(feature[shape])) for shape in ("input_shape", "output_shape"))
        view.add_row(str(i), escape(feature["name"]), escape(feature["table"]), *shapes)
    return view


def _optimizer(table: dict[str, Any]) -> _Optimizer:
    return _Optimizer(
        algorithm=table["algorithm"],
        numbers=tuple(f"{name}={_value(value)}" for name, value in table["hyperparameters"].items()),
        options=tuple(_options(table)),
        slots=", ".join(table["slots"]) or "none",
    )


def _learning_rate(table: dict[str, Any]) -> str:
    tag = table["learning_rate_tag"]
    lines = [f"tag {tag}" if tag is not None else _value(table["learning_rate"])]
    if table["step_counter_tag"] is not None:
        lines.append(f"step: tag {table['step_counter_tag']}")
    return "\n".join(lines)


def _options(table: dict[str, Any]) -> list[str]:
    options = [] if table["gradient_accumulation"] else ["gradients not accumulated"]
    for name, field in (("gradients", "gradient_clipping_limits"), ("weights", "clipping_limits")):
        if table[field] is not None:
            lower, upper = table[field]
            low = "-inf" if lower is None else _value(lower)
            high = "inf" if upper is None else _value(upper)
            options.append(f"{name} in [{low}, {high}]")
    if table["weight_decay_factor"]:
        times = " x learning rate" if table["multiply_weight_decay_factor_by_learning_rate"] else ""
        options.append(f"weight decay {_value(table['weight_decay_factor'])}{times}")
    if table["quantization"] is not None:
        q = table["quantization"]
        options.append(f"{q['num_buckets']} buckets in [{_value(q['lower'])}, {_value(q['upper'])}]")
    for name in ("low_dimensional_packing", "hot_id_replication"):
        if table[name] in ("enabled", "migration_only"):
            options.append(f"{name}: no effect")
    return options


def _value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.9g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
