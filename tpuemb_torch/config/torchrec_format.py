"""A configuration as TorchRec sees it: tables, optimizers and a sharding plan, in YAML; and back.

The tables have the fields of `torchrec.EmbeddingBagConfig`.  Pooling is SUM for all: combiners are not in the proto,
and the layer turns them into weights of a sum.  What TorchRec has no word for is kept beside it, so that the way back
is without loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpuemb_torch.config import load_config
from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.config.schema import Config
from tpuemb_torch.config.write import to_mapping
from tpuemb_torch.config.yaml_format import dump, load

_FORMAT = "torchrec"
_TABLE_KEYS = {"name", "num_embeddings", "embedding_dim", "feature_names", "pooling", "num_features", "unnamed"}


def to_torchrec(config: Config, plan: Mapping[str, Any] | None = None) -> str:
    """Returns the YAML of a configuration's TorchRec tables, optimizers and plan.

    Args:
        config: the configuration.
        plan: a sharding plan as plain values (`Plan.to_dict()`), or None.
    """
    rest = to_mapping(config.to_proto())
    descriptors = rest.pop("table_descriptor", [])
    features = rest.pop("feature_descriptor", None)
    document: dict[str, Any] = {"format": _FORMAT, "tables": [], "optimizers": {}}
    for table, descriptor in zip(config.tables, descriptors, strict=True):
        entry: dict[str, Any] = {
            "name": table.name,
            "num_embeddings": table.vocabulary_size,
            "embedding_dim": table.dimension,
            "feature_names": [feature.name for feature in config.features if feature.table is table],
            "pooling": "SUM",
        }
        if "num_features" in descriptor:
            entry["num_features"] = int(descriptor["num_features"])
        if "name" not in descriptor:
            entry["unnamed"] = True  # TorchRec needs a name
        document["tables"].append(entry)
        document["optimizers"][table.name] = descriptor.get("optimization_parameters", {})
    if features is not None:
        document["features"] = [
            {
                "name": feature.name,
                "table": feature.table.name,
                "input_shape": list(feature.input_shape),
                **({} if "name" in descriptor else {"unnamed": True}),
            }
            for feature, descriptor in zip(config.features, features, strict=True)
        ]
    if plan is not None:
        document["plan"] = dict(plan)
    document["configuration"] = rest
    return dump(document)


def from_torchrec(text: str, name: str = "torchrec") -> Config:
    """Reads what `to_torchrec` wrote; the plan is left aside.

    Raises:
        ConfigError: naming what is missing, unknown or contradictory.
    """
    document = load(text, name)
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ConfigError(name, f'is not a TorchRec document: it must have "format: {_FORMAT}"')
    unknown = sorted(set(document) - {"format", "tables", "optimizers", "features", "plan", "configuration"})
    if unknown:
        raise ConfigError(name, f"has unknown keys {unknown}")
    tables = [_mapping(table, f"tables[{index}]") for index, table in enumerate(_list(document, "tables"))]
    optimizers = _mapping(document.get("optimizers"), "optimizers")
    names = [table.get("name") for table in tables]
    if set(optimizers) != set(names):
        raise ConfigError("optimizers", f"are given for {sorted(optimizers)}, but the tables are {names}")
    descriptors = []
    for index, table in enumerate(tables):
        where = f"tables[{index}]"
        strange = sorted(set(table) - _TABLE_KEYS)
        if strange:
            raise ConfigError(where, f"has unknown keys {strange}")
        if table.get("pooling", "SUM") != "SUM":
            raise ConfigError(
                f"{where}.pooling", f"is {table['pooling']!r}: combiners are an argument of the layer; use SUM"
            )
        descriptor = {
            "name": table["name"] if "name" in table else _missing(where, "name"),
            "vocabulary_size": table["num_embeddings"]
            if "num_embeddings" in table
            else _missing(where, "num_embeddings"),
            "dimension": table["embedding_dim"] if "embedding_dim" in table else _missing(where, "embedding_dim"),
            "optimization_parameters": optimizers[table["name"]],
        }
        if "num_features" in table:
            descriptor["num_features"] = table["num_features"]
        if table.get("unnamed"):
            del descriptor["name"]
        descriptors.append(descriptor)
    mapping = {**_mapping(document.get("configuration", {}), "configuration"), "table_descriptor": descriptors}
    if "features" in document:
        mapping["feature_descriptor"] = [
            _feature(_mapping(feature, f"features[{index}]"), f"features[{index}]", tables)
            for index, feature in enumerate(_list(document, "features"))
        ]
    return load_config(json.dumps(mapping).encode(), format="json")


def _feature(feature: Mapping[str, Any], where: str, tables: list[Mapping[str, Any]]) -> dict[str, Any]:
    for key in ("name", "table", "input_shape"):
        if key not in feature:
            _missing(where, key)
    places = [index for index, table in enumerate(tables) if table.get("name") == feature["table"]]
    if not places:
        raise ConfigError(f"{where}.table", f"is {feature['table']!r}, which is none of the tables")
    listed = [table["name"] for table in tables if feature["name"] in table.get("feature_names", [])]
    if listed != [feature["table"]]:
        raise ConfigError(
            f"{where}.name",
            f"is {feature['name']!r} of table {feature['table']!r}, but feature_names have it in {listed}",
        )
    name = {} if feature.get("unnamed") else {"name": feature["name"]}
    return {**name, "table_id": places[0], "input_shape": feature["input_shape"]}


def _missing(where: str, key: str) -> Any:
    raise ConfigError(f"{where}.{key}", "is missing")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"must be a mapping, got {type(value).__name__}")
    return value


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise ConfigError(key, f"must be a list, got {type(value).__name__}")
    return value
