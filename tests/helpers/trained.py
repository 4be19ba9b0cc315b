"""Models of the training code, as if they were trained."""

from __future__ import annotations

import torch

from training.model import Model, Shape


def some_model(shape: Shape) -> Model:
    """Weights as if trained: nothing is zero, everything is a BF16 value."""
    torch.manual_seed(0)
    model = Model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.05)
            parameter.copy_(parameter.bfloat16().float())
        for layer in model.routed():
            layer.bias.normal_(0, 0.05)
    return model
