"""The optimizers of the TPU embedding layer: one file per algorithm, and the common step around them."""

from tpuemb_torch.optimizers.adadelta import Adadelta
from tpuemb_torch.optimizers.adagrad import Adagrad
from tpuemb_torch.optimizers.adagrad_momentum import AdagradMomentum
from tpuemb_torch.optimizers.adam import Adam
from tpuemb_torch.optimizers.assign import Assign
from tpuemb_torch.optimizers.base import Slot, UpdateRule, create_rule, rule_class, rules, slots_of
from tpuemb_torch.optimizers.bounded_adagrad import BoundedAdagrad
from tpuemb_torch.optimizers.centered_rms_prop import CenteredRmsProp
from tpuemb_torch.optimizers.frequency_aware_adagrad import FrequencyAwareAdagrad
from tpuemb_torch.optimizers.frequency_estimator import FrequencyEstimator
from tpuemb_torch.optimizers.ftrl import Ftrl
from tpuemb_torch.optimizers.lion import Lion
from tpuemb_torch.optimizers.mdl_adagrad_light import MdlAdagradLight
from tpuemb_torch.optimizers.momentum import Momentum
from tpuemb_torch.optimizers.online_yogi import OnlineYogi
from tpuemb_torch.optimizers.proximal_adagrad import ProximalAdagrad
from tpuemb_torch.optimizers.proximal_yogi import ProximalYogi
from tpuemb_torch.optimizers.quantization import quantize, quantize_reference
from tpuemb_torch.optimizers.rms_prop import RmsProp
from tpuemb_torch.optimizers.sgd import StochasticGradientDescent
from tpuemb_torch.optimizers.step import StepNumbers, apply_step, reference_step
from tpuemb_torch.optimizers.user_defined_program import UserDefinedProgram

__all__ = [
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Assign",
    "BoundedAdagrad",
    "CenteredRmsProp",
    "FrequencyAwareAdagrad",
    "FrequencyEstimator",
    "Ftrl",
    "Lion",
    "MdlAdagradLight",
    "Momentum",
    "OnlineYogi",
    "ProximalAdagrad",
    "ProximalYogi",
    "RmsProp",
    "Slot",
    "StepNumbers",
    "StochasticGradientDescent",
    "UpdateRule",
    "UserDefinedProgram",
    "apply_step",
    "create_rule",
    "quantize",
    "quantize_reference",
    "reference_step",
    "rule_class",
    "rules",
    "slots_of",
]
