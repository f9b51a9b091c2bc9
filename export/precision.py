"""In which arithmetic the four projections of a layer are computed: float32, float16, or int8 with dynamic activations.

Scores, softmax and the average of the values stay float32 at every precision, so masks, lengths of 0 and large scores
mean the same at all of them. Imports torch and model only.
"""

import copy
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from model.attention import MultiHeadAttention

PRECISIONS: Final = ("fp32", "fp16", "int8")
PROJECTIONS: Final = ("W_q", "W_k", "W_v", "W_o")

ACTIVATION_STEPS: Final = 127
"""Steps from 0 to the largest value of a row of activations."""

WEIGHT_STEPS: Final = 64
"""Steps from 0 to the largest weight of an output feature.

CPUs without VNNI add two products of uint8 and int8 in 16 bits with saturation: 2 x 255 x 64 fits, 2 x 255 x 127 is
wrong by up to the whole answer (docs/decisions/0008).
"""

# Far below any activation that matters, and its reciprocal is finite.
_SMALLEST: Final = 1e-30


def at_precision(layer: MultiHeadAttention, precision: str) -> MultiHeadAttention:
    """A layer in eval mode that computes its projections at `precision`; fp32 is the layer itself."""
    if precision == "fp32":
        return layer
    lower = {"fp16": _HalfLinear, "int8": _QuantisedLinear}[precision]
    changed = copy.deepcopy(layer)
    for name in PROJECTIONS:
        setattr(changed, name, lower(getattr(layer, name)))
    return changed.eval()


@final
class _HalfLinear(nn.Module):
    """x W^T + b in float16 of float32 activations, as float32. What lies beyond 65504 overflows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.register_buffer("weight", linear.weight.detach().half())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().half())
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.half(), self.weight, self.bias).float()


@final
class _QuantisedLinear(nn.Module):
    """x W^T + b with W in int8, a step for each output feature, and x in uint8, a step for each row.

    The step of a row is taken from that row alone, not from the whole tensor (as `DynamicQuantizeLinear` takes it): an
    answer must not depend on what else is in the batch. In torch the integers are computed as float64; the graph has
    QuantizeLinear and DequantizeLinear around MatMul, which ONNX Runtime computes in integers.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        weight = linear.weight.detach()  # (out, in)
        step = (weight.abs().amax(dim=1) / WEIGHT_STEPS).clamp_min(_SMALLEST)
        self.register_buffer("weight", torch.round(weight / step[:, None]).to(torch.int8).T.contiguous())  # (in, out)
        self.register_buffer("step", step / ACTIVATION_STEPS)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.register_buffer("unit", torch.tensor(1.0))
        self.register_buffer("zero", torch.tensor(128, dtype=torch.uint8))
        self.weight: Tensor
        self.step: Tensor
        self.bias: Tensor | None
        self.unit: Tensor
        self.zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST)
        steps = x * (ACTIVATION_STEPS / largest)  # each row within -127 and 127
        product = self._in_graph(steps) if torch.onnx.is_in_onnx_export() else self._in_torch(steps)
        y = product * largest
        return y if self.bias is None else y + self.bias

    def _in_torch(self, steps: Tensor) -> Tensor:
        return (torch.round(steps).double() @ self.weight.double()).float() * self.step

    def _in_graph(self, steps: Tensor) -> Tensor:
        shape = steps.shape
        rounded = _node("QuantizeLinear", (steps, self.unit, self.zero), torch.uint8, shape)
        activations = _node("DequantizeLinear", (rounded, self.unit, self.zero), torch.float32, shape)
        weight = _node("DequantizeLinear", (self.weight, self.step), torch.float32, self.weight.shape, axis=1)
        return activations @ weight


def _node(
    operator: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: torch.Size, **attributes: Any
) -> Tensor:
    made: Tensor = torch.onnx.ops.symbolic(f"::{operator}", inputs, attributes, dtype=dtype, shape=shape)
    return made
