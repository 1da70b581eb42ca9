"""Inputs -> one KeyedJaggedTensor with checked ids and the gains of the combiners."""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.preprocessing.bags import FeatureBags, to_bags  # noqa: E402
from tpuemb_torch.preprocessing.batches import BatchPreparation  # noqa: E402
from tpuemb_torch.preprocessing.deduplication import DeduplicationData  # noqa: E402
from tpuemb_torch.preprocessing.distinct import SortedIds, sort_ids  # noqa: E402
from tpuemb_torch.preprocessing.gains import COMBINERS, combiner_codes, gains  # noqa: E402
from tpuemb_torch.preprocessing.id_checks import ID_POLICIES, check_ids  # noqa: E402
from tpuemb_torch.preprocessing.inputs import InputError, Ragged, Sparse, rejecting  # noqa: E402
from tpuemb_torch.preprocessing.keyed import Key, KeyedPreparation  # noqa: E402
from tpuemb_torch.preprocessing.prepared import PreparedBatch, PreparedInput  # noqa: E402
from tpuemb_torch.preprocessing.slots import SlotLayout, over_slots  # noqa: E402

__all__ = [
    "COMBINERS",
    "ID_POLICIES",
    "BatchPreparation",
    "DeduplicationData",
    "FeatureBags",
    "InputError",
    "Key",
    "KeyedPreparation",
    "PreparedBatch",
    "PreparedInput",
    "Ragged",
    "SlotLayout",
    "SortedIds",
    "Sparse",
    "check_ids",
    "combiner_codes",
    "gains",
    "over_slots",
    "rejecting",
    "sort_ids",
    "to_bags",
]
