"""Inputs -> one KeyedJaggedTensor with checked ids and the gains of the combiners."""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.preprocessing.bags import FeatureBags, to_bags  # noqa: E402
from tpuemb_torch.preprocessing.deduplication import DeduplicationData, deduplicate  # noqa: E402
from tpuemb_torch.preprocessing.distinct import SortedIds, sort_ids  # noqa: E402
from tpuemb_torch.preprocessing.gains import COMBINERS, combiner_codes, gains  # noqa: E402
from tpuemb_torch.preprocessing.id_checks import ID_POLICIES, KeyInfo, check_ids  # noqa: E402
from tpuemb_torch.preprocessing.inputs import InputError, Ragged, Sparse  # noqa: E402
from tpuemb_torch.preprocessing.keyed import Key, KeyedPreparation, PreparedInput  # noqa: E402
from tpuemb_torch.preprocessing.slots import SlotLayout  # noqa: E402

__all__ = [
    "COMBINERS",
    "ID_POLICIES",
    "DeduplicationData",
    "FeatureBags",
    "InputError",
    "Key",
    "KeyInfo",
    "KeyedPreparation",
    "PreparedInput",
    "Ragged",
    "SlotLayout",
    "SortedIds",
    "Sparse",
    "check_ids",
    "combiner_codes",
    "deduplicate",
    "gains",
    "sort_ids",
    "to_bags",
]
