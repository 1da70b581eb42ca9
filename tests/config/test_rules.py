"""Every rule on its own: a valid configuration with one thing changed, and the error that names it."""

from __future__ import annotations

import re
import warnings

import pytest
from google.protobuf import text_format

from tests.config import examples
from tpuemb_torch.config import ConfigError, ConfigWarning, load_config
from tpuemb_torch.config.validate import problems

Proto = examples.Proto


def rejected(proto: Proto) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(proto)
    assert next(str(e) for e in problems(proto)) == str(caught.value)
    return caught.value


def accepted(proto: Proto) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(proto)


def edited(base: str, *edits: tuple[str, str]) -> Proto:
    for old, new in edits:
        assert base.count(old) >= 1, old
        base = base.replace(old, new, 1)
    return text_format.Parse(base, Proto())


USERS, ITEMS = "table_descriptor[0]", "table_descriptor[1]"
OPTIMIZER = "table_descriptor[0].optimization_parameters"

BY_FEATURE = [
    # V1
    ("mode: TRAINING", "", "mode", "UNSPECIFIED; set it to INFERENCE, TRAINING or BACKWARD_PASS_ONLY"),
    ("mode: TRAINING", "mode: 7", "mode", "7 is no .*Mode; use one of UNSPECIFIED = 0, INFERENCE = 1"),
    ("num_hosts: 1", "num_hosts: 1 sharding_strategy: 2", "sharding_strategy", "2 is no .*MOD = 1"),
    ("num_hosts: 1", "", "num_hosts", "0 must be at least 1"),
    ("num_hosts: 1", "num_hosts: -1", "num_hosts", "-1"),
    ("num_tensor_cores: 2", "num_tensor_cores: 0", "num_tensor_cores", "0 must be at least 1"),
    # V6, V7
    ("num_hosts: 1", "num_hosts: 1 batch_size_per_tensor_core: 16", "batch_size_per_tensor_core", "16 must be 0"),
    ("dimension: 4", "dimension: 4 num_features: 1", f"{ITEMS}.num_features", r"1 \(table 'items'\) must be 0"),
    # V8
    ("table_id: 1", "table_id: 2", "feature_descriptor[1].table_id", r"2 \(feature 'clicked'\) is outside \[0, 1\]"),
    ("table_id: 1", "table_id: -1", "feature_descriptor[1].table_id", "-1"),
    # V9, V10
    ("table_id: 0 input_shape: 16", "table_id: 0", "feature_descriptor[0].input_shape", r"empty \(feature 'user'\)"),
    ("input_shape: 5", "input_shape: 0", "feature_descriptor[1].input_shape[1]", r"0 \(feature 'clicked'\)"),
    ("input_shape: 5", "input_shape: -5", "feature_descriptor[1].input_shape[1]", "-5"),
    ("input_shape: 5", "input_shape: 134217728", "feature_descriptor[1].input_shape", "2147483648 output rows"),
    # V11
    ("table_id: 1", "table_id: 0", ITEMS, "no feature looks table 'items' up"),
    # V12
    (
        "tag: 0",
        "tag: 1",
        f"{ITEMS}.optimization_parameters.learning_rate.dynamic.tag",
        "1 is found where tag 0 is missing",
    ),
    ("tag: 0", "tag: -1", f"{ITEMS}.optimization_parameters.learning_rate.dynamic.tag", "-1 .*is negative"),
    # V14
    ("adagrad {}", "", f"{OPTIMIZER}.parameters", "no optimizer is chosen .*adagrad, .*stochastic_gradient_descent"),
    # V19
    ('name: "users"', "", f"{USERS}.name", "empty"),
    ('name: "items"', 'name: "users"', f"{ITEMS}.name", "'users' is the name of table 0"),
    # V34
    ("vocabulary_size: 100", "vocabulary_size: 0", f"{USERS}.vocabulary_size", r"0 \(table 'users'\)"),
    ("vocabulary_size: 100", "vocabulary_size: -1", f"{USERS}.vocabulary_size", "-1"),
    ("dimension: 8", "", f"{USERS}.dimension", "0 .*2147483647"),
    ("dimension: 8", "dimension: -8", f"{USERS}.dimension", "-8"),
    # names of features
    ('name: "clicked"', 'name: "user"', "feature_descriptor[1].name", "'user' is the name of feature 0"),
    ('name: "clicked"', 'name: "feature_2"', None, None),
]


@pytest.mark.parametrize(("old", "new", "field", "words"), BY_FEATURE)
def test_feature_layout(old: str, new: str, field: str | None, words: str | None) -> None:
    proto = edited(examples.BY_FEATURE, (old, new))
    if field is None or words is None:
        return accepted(proto)
    error = rejected(proto)
    assert error.field == field
    assert re.search(words, error.problem)
    return None


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        # V4, V5
        ("batch_size_per_tensor_core: 16", "", "batch_size_per_tensor_core", "0 must be .*divided by num_tensor_cores"),
        ("batch_size_per_tensor_core: 16", "batch_size_per_tensor_core: -2", "batch_size_per_tensor_core", "-2"),
        ("num_features: 3", "", f"{ITEMS}.num_features", r"0 \(table 'items'\) must be at least 1"),
        ("num_features: 3", "num_features: -3", f"{ITEMS}.num_features", "-3"),
        ("num_features: 3", "num_features: 134217728", f"{ITEMS}.num_features", "more than 2147483647"),
    ],
)
def test_table_layout(old: str, new: str, field: str, words: str) -> None:
    error = rejected(edited(examples.BY_TABLE, (old, new)))
    assert error.field == field
    assert re.search(words, error.problem)


def test_no_tables() -> None:
    error = rejected(edited("mode: TRAINING num_hosts: 1 num_tensor_cores: 1"))
    assert error.field == "table_descriptor"


def test_feature_named_like_the_default_of_another() -> None:
    proto = edited(examples.BY_FEATURE, ('name: "user" ', ""), ('name: "clicked"', 'name: "feature_0"'))
    error = rejected(proto)
    assert error.field == "feature_descriptor[1].name"
    assert "a feature without a name" in error.problem


def test_features_without_names() -> None:
    accepted(edited(examples.BY_FEATURE, ('name: "user" ', ""), ('name: "clicked"', "")))


def test_rows_per_sample_overflow() -> None:
    proto = examples.with_optimizer("adagrad {}")
    del proto.feature_descriptor[:]
    for shape in ([2**31 - 1], [1], [2**31 - 1]):
        proto.feature_descriptor.add(table_id=0, input_shape=shape)
    error = rejected(proto)
    assert error.field == "table_descriptor[0]"
    assert "4294967295 output rows per sample" in error.problem


@pytest.mark.parametrize("size", [1, 2**31 - 1, 2**31 + 1, 2**62])
def test_large_vocabularies_are_fine(size: int) -> None:
    accepted(edited(examples.BY_FEATURE, ("vocabulary_size: 100", f"vocabulary_size: {size}")))


ADAM = "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 %s }"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        # V15 and the other enums
        ("adagrad {} gradient_accumulation_status: 9", "gradient_accumulation_status", "9 is no .*DISABLED = 2"),
        ("adagrad {} low_dimensional_packing_status: 3", "low_dimensional_packing_status", "3 is no"),
        (
            "adagrad {} hot_id_replication_configuration { status: 4 }",
            "hot_id_replication_configuration.status",
            "4 is no .*MIGRATION_ONLY = 3",
        ),
        # learning rates
        ("adagrad {} learning_rate {}", "learning_rate", "is empty .*constant.*dynamic"),
        ("adagrad {} learning_rate { constant: -0.1 }", "learning_rate.constant", r"-0\.1 .*\[0, inf\)"),
        ("adagrad {} learning_rate { constant: nan }", "learning_rate.constant", "nan"),
        ("adagrad {} learning_rate { constant: inf }", "learning_rate.constant", "inf"),
        # V35
        (
            "adagrad {} clipping_limits { lower { value: 1 } upper { value: -1 } }",
            "clipping_limits.lower",
            "above .* -1",
        ),
        (
            "adagrad {} gradient_clipping_limits { lower { value: 0.5 } upper { value: 0.1 } }",
            "gradient_clipping_limits.lower",
            r"0\.5 .*above the upper limit 0\.1",
        ),
        ("adagrad {} clipping_limits { upper { value: nan } }", "clipping_limits.upper", "nan"),
        ("adagrad {} clipping_limits { upper { value: -inf } }", "clipping_limits.upper", "-inf"),
        ("adagrad {} clipping_limits { lower { value: inf } }", "clipping_limits.lower", "inf .*remove it"),
        # V36
        (
            "adagrad {} simulated_quantization { enabled: true num_buckets: 4 }",
            "simulated_quantization.clipping_limits.lower",
            "is not set",
        ),
        (
            "adagrad {} simulated_quantization { enabled: true num_buckets: 1 "
            "clipping_limits { lower { value: 0 } upper { value: 1 } } }",
            "simulated_quantization.num_buckets",
            "1 .*at least 2",
        ),
        (
            "adagrad {} simulated_quantization { enabled: true num_buckets: 4 "
            "clipping_limits { lower { value: 0 } upper { value: inf } } }",
            "simulated_quantization.clipping_limits.upper",
            "inf",
        ),
        (
            "adagrad {} simulated_quantization { enabled: true num_buckets: 4 "
            "clipping_limits { lower { value: 1 } upper { value: 1 } } }",
            "simulated_quantization.clipping_limits.lower",
            "1 .*below the upper limit 1",
        ),
        # weight decay
        ("adagrad {} weight_decay_factor: -0.1", "weight_decay_factor", r"-0\.1"),
        ("adagrad {} weight_decay_factor: nan", "weight_decay_factor", "nan"),
        ("mdl_adagrad_light {} weight_decay_factor: 0.1", "weight_decay_factor", "does not support"),
        # combinations
        (
            ADAM % "use_non_lazy_adam: true" + "gradient_accumulation_status: DISABLED",
            "adam.use_non_lazy_adam",
            "needs gradient accumulation",
        ),
        (
            "lion { use_non_lazy_lion: true } gradient_accumulation_status: DISABLED",
            "lion.use_non_lazy_lion",
            "needs gradient accumulation",
        ),
    ],
)
def test_optimizer(text: str, field: str, words: str) -> None:
    error = rejected(examples.with_optimizer(text))
    assert error.field == f"{OPTIMIZER}.{field}"
    assert re.search(words, error.problem)
    assert "table 't'" in error.problem or "is no" in error.problem


@pytest.mark.parametrize(
    "text",
    [
        "adagrad {} learning_rate { constant: 0 }",
        "adagrad {} gradient_accumulation_status: DISABLED gradient_clipping_limits { upper { value: 1 } }",
        "assign {} gradient_accumulation_status: DISABLED",
        "adagrad {} clipping_limits { lower { value: -inf } upper { value: inf } }",
        "adagrad {} clipping_limits { lower { value: 0 } upper { value: 0 } }",
        "adagrad {} simulated_quantization { num_buckets: 1 }",  # not enabled
        ADAM % "use_non_lazy_adam: true",  # UNSPECIFIED accumulates
        "ftrl { multiply_linear_by_lr: true } learning_rate { constant: 0 }",
        "ftrl { allow_zero_accumulator: true }",
        "adagrad {} weight_decay_factor: 1.5",
        "mdl_adagrad_light {} learning_rate { dynamic {} }",
    ],
)
def test_unusual_but_legal_optimizer(text: str) -> None:
    accepted(examples.with_optimizer(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftrl {} learning_rate { constant: 0 }", "learning_rate.constant: 0 .*divide by zero"),
        ("frequency_aware_adagrad {}", "max_lr_multiplier: 0 or not set"),
        ("frequency_estimator { tau: 0.1 max_delta: 9 }", r"dimension: 8 \(table 't'\)"),
    ],
)
def test_warnings(text: str, words: str) -> None:
    with pytest.warns(ConfigWarning, match=words) as caught:
        load_config(examples.with_optimizer(text))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_learning_rate_that_is_not_set_is_zero_with_a_warning() -> None:
    proto = examples.with_optimizer("adagrad {}")
    proto.table_descriptor[0].optimization_parameters.ClearField("learning_rate")
    with pytest.warns(ConfigWarning, match=r"learning_rate: not set \(table 't'\), so the rate is 0"):
        config = load_config(proto)
    assert config.tables[0].optimizer.learning_rate.constant == 0.0
    proto = examples.with_optimizer("assign {}")  # has no use for a rate
    proto.table_descriptor[0].optimization_parameters.ClearField("learning_rate")
    accepted(proto)


@pytest.mark.parametrize(("number", "words"), [(1, "learning_rate.dynamic.tag"), (15, "gradient_accumulation_status")])
def test_fields_of_an_older_proto_are_not_dropped_silently(number: int, words: str) -> None:
    proto = examples.with_optimizer("adagrad {}")
    proto.table_descriptor[0].optimization_parameters.MergeFromString(bytes([number << 3, 1]))
    with pytest.warns(ConfigWarning, match=f"field {number} .*{words}"):
        load_config(proto)


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        ([0], None),
        ([0, 0, 1], None),
        ([1, 0], None),
        ([None, 0], None),
        ([0, 2], "2 is found where tag 1 is missing: the 2 different tags"),
        ([1], "1 is found where tag 0 is missing: the 1 different tags"),
        ([3, 0, 0, 1], "3 is found where tag 2 is missing"),
    ],
)
def test_tags_have_no_gap(tags: list[int | None], problem: str | None) -> None:
    proto = Proto(mode=Proto.TRAINING, num_hosts=1, num_tensor_cores=1)
    for i, tag in enumerate(tags):
        table = proto.table_descriptor.add(name=f"t{i}", vocabulary_size=10, dimension=4)
        table.optimization_parameters.stochastic_gradient_descent.SetInParent()
        if tag is None:
            table.optimization_parameters.learning_rate.constant = 0.5
        else:
            table.optimization_parameters.learning_rate.dynamic.tag = tag
        proto.feature_descriptor.add(table_id=i, input_shape=[4])
    if problem is not None:
        error = rejected(proto)
        assert problem in error.problem
        bad = tags.index(int(problem.split()[0]))
        assert error.field == f"table_descriptor[{bad}].optimization_parameters.learning_rate.dynamic.tag"
        return
    config = load_config(proto)
    assert config.num_learning_rates == len({tag for tag in tags if tag is not None})
    assert [table.optimizer.learning_rate.tag for table in config.tables] == tags


def test_a_step_counter_is_a_tag() -> None:
    text = "frequency_aware_adagrad { max_lr_multiplier: 9 %s } learning_rate { dynamic { tag: %d } }"
    config = load_config(examples.with_optimizer(text % ("", 0)))  # not set: tag 0, shared with the rate
    assert config.num_learning_rates == 1
    assert config.tables[0].optimizer.tags == (0, 0)
    config = load_config(examples.with_optimizer(text % ("step_counter { tag: 1 }", 0)))
    assert config.num_learning_rates == 2
    error = rejected(examples.with_optimizer(text % ("step_counter { tag: 2 }", 0)))
    assert error.field == f"{OPTIMIZER}.frequency_aware_adagrad.step_counter.tag"
    constant = examples.with_optimizer("frequency_aware_adagrad { max_lr_multiplier: 9 }")
    assert load_config(constant).num_learning_rates == 1


def test_all_problems_are_found() -> None:
    proto = edited(
        examples.BY_FEATURE, ("mode: TRAINING", ""), ("dimension: 4", "dimension: 0"), ("beta1: 0.9", "beta1: 2")
    )
    assert [problem.field for problem in problems(proto)] == [
        "mode",
        f"{ITEMS}.dimension",
        f"{ITEMS}.optimization_parameters.adam.beta1",
    ]
