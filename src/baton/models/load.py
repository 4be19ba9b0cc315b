"""Weights into a model: from a checkpoint, exactly, or seeded ones that need no checkpoint.

The model says which tensors it wants (each module's `fills`); nothing else is read. A tensor
that is missing, misshapen or left over is an error that names it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from baton.core.errors import ModelError
from baton.core.log import get_logger
from baton.layers.weights import Fill, Source, Weighted
from baton.models.checkpoint import Checkpoint
from baton.models.decoder import CausalLM

Progress = Callable[[int, int], None]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_STD = 0.02  # of dummy weights

log = get_logger("models.load")


@dataclass(frozen=True)
class _Target:
    """One region to fill, with the prefix that makes its sources' names absolute."""

    module: Weighted
    prefix: str
    fill: Fill

    def write(self, value: torch.Tensor) -> None:
        self.module.get_parameter(self.fill.parameter).data[self.fill.into] = value

    def zero(self) -> None:
        self.module.get_parameter(self.fill.parameter).data[self.fill.into] = 0.0


def materialise(model: CausalLM) -> None:
    """Memory on the model's device in the place of every meta parameter, and of what is made of
    them: zeros on a GPU, so that steps can run before it is filled; on a CPU uninitialised."""
    new = torch.empty if model.device.type == "cpu" else torch.zeros
    for module in model.modules():
        if isinstance(module, Weighted):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    turned = model.device.type == "cpu" and name in module.columns_first
                    shape = parameter.shape[::-1] if turned else parameter.shape
                    # not `empty_like`, which imports sympy to look at a meta tensor
                    memory = new(shape, dtype=parameter.dtype, device=model.device)
                    memory = memory.mT if turned else memory
                    module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
    _derive(model)


@dataclass(frozen=True)
class Matched:
    """A checkpoint that fits a model: the tensor of each region that has one, sorted by name, so
    that a stacked tensor with many regions is read once and then let go."""

    model: CausalLM
    checkpoint: Checkpoint
    found: list[tuple[str, Source, _Target]]

    def load(self, progress: Progress | None = None) -> None:
        """Give the model memory on its device, if it has none, and fill it.

        Args:
            progress: called with (regions filled, regions in all) after each.

        Raises:
            ModelError: naming file and tensor, when one cannot be read.
        """
        materialise(self.model)
        held, tensor = "", torch.empty(0)
        for done, (name, source, target) in enumerate(self.found, 1):
            if name != held:
                held, tensor = name, self.checkpoint.read(name)
            target.write(tensor[source.take])
            if progress is not None:
                progress(done, len(self.found))
        for target in _targets(self.model):
            if not target.fill.sources:
                target.zero()
        _derive(self.model)


def match_weights(model: CausalLM, checkpoint: Checkpoint) -> Matched:
    """Find each of the model's tensors in `checkpoint`. Needs no memory for either.

    Args:
        model: as `registry.build` returns it.

    Raises:
        ModelError: naming file and tensor, when one is missing, has another shape than the
            config says, or belongs to nothing in the model. MTP layers and rotary tables are
            known and skipped.
    """
    names = set(checkpoint.names())
    found: list[tuple[str, Source, _Target]] = []
    for target in _targets(model):
        if target.fill.sources:
            found.append((*_find(target, model, names, checkpoint), target))
    _refuse_leftovers(model, names - {name for name, _, _ in found}, checkpoint)
    for name, source, _ in found:
        if checkpoint.shape(name) != source.shape:
            raise ModelError(
                file=checkpoint.file(name),
                tensor=name,
                problem=f"has shape {list(checkpoint.shape(name))}",
                expected=f"{list(source.shape)}",
            )
    found.sort(key=lambda item: item[0])
    return Matched(model, checkpoint, found)


def dummy_weights(model: CausalLM, seed: int) -> None:
    """Give `model` memory on its device, if it has none, and fill it with seeded weights, made
    there.

    Norms are 1, router biases 0, everything else N(0, 0.02). A tensor's values depend on the
    seed, its name and the kind of device only, so that every split over ranks is the same model.
    """
    materialise(model)
    generator = torch.Generator(device=model.device)
    for target in _targets(model):
        fill = target.fill
        if fill.dummy == "zero" or not fill.sources:
            target.zero()
            continue
        source = fill.sources[0]
        if fill.dummy == "one":
            target.write(torch.ones(source.shape, device=model.device)[source.take])
            continue
        name = target.prefix + source.name
        generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.empty(source.shape, device=model.device)
        target.write(values.normal_(0.0, _STD, generator=generator)[source.take])
    _derive(model)


def _targets(model: nn.Module) -> Iterator[_Target]:
    """Every region of every parameter."""
    for path, module in model.named_modules():
        if isinstance(module, Weighted):
            # Sources are named from the module's parent: `self_attn.qkv_proj` wants `q_proj`.
            prefix = path.rpartition(".")[0]
            for fill in module.fills:
                yield _Target(module, f"{prefix}." if prefix else "", fill)


def _derive(model: nn.Module) -> None:
    """Let every module make what it computes of its parameters once."""
    for module in model.modules():
        if isinstance(module, Weighted):
            module.derive()


def _find(
    target: _Target, model: CausalLM, names: set[str], checkpoint: Checkpoint
) -> tuple[str, Source]:
    """The first of the target's sources, under any of its names, that the checkpoint has."""
    for source in target.fill.sources:
        name = target.prefix + source.name
        for candidate in (name, *model.aliases(name)):
            if candidate in names:
                return candidate, source
    first = target.fill.sources[0]
    some = next(iter(names), None)
    raise ModelError(
        file=checkpoint.file(some) if some else "checkpoint",
        tensor=target.prefix + first.name,
        problem="is missing",
        expected=f"shape {list(first.shape)}",
    )


def _refuse_leftovers(model: CausalLM, left: set[str], checkpoint: Checkpoint) -> None:
    """Report MTP layers, pass over tables and a tied head, raise for anything else."""
    mtp: set[int] = set()
    for name in sorted(left):
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= model.config.num_layers:
            mtp.add(int(layer[1]))
        elif name.endswith("rotary_emb.inv_freq") or (
            model.config.tie_embeddings and name == "lm_head.weight"
        ):
            continue
        else:
            raise ModelError(
                file=checkpoint.file(name),
                tensor=name,
                problem="belongs to nothing in the model",
                expected=f"only tensors of a {model.config.family} with "
                f"{model.config.num_layers} layers",
            )
    if model.config.mtp:
        mtp.discard(model.config.num_layers)  # what is left of it are copies of embedding and head
    if mtp:
        log.info("checkpoint has %d MTP layer(s), not loaded: %s", len(mtp), sorted(mtp))
