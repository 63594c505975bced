# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes per rank that a Mixture-of-Experts model takes under expert parallelism (EP) and ZeRO.

Arithmetic over the sizes of parameters only. What is counted, and what is not, is written down in docs/memory.md.
"""
from dataclasses import dataclass

from deepspeed_autoep.model_sizes import EstimateError, ModelSizes, ceil_div

GIB = 2**30
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FP32 = 4
# Optimizer -> float32 moments that it keeps for each parameter.
MOMENTS = {"adamw": 2, "adam": 2, "lamb": 2, "adagrad": 1, "lion": 1, "sgd-momentum": 1, "sgd": 0}
# What is offloaded -> ZeRO stages that can do it.
OFFLOADS = {"none": (0, 1, 2, 3), "optimizer": (1, 2, 3), "optimizer+params": (3, )}
# DeepSpeed puts expert parameters into optimizer groups of at most this many gathered elements.
EXPERT_GROUP_NUMEL = 178_956_971


@dataclass(frozen=True)
class Settings:
    """What is asked. Sizes in elements and thresholds are those of DeepSpeed's configuration, with its defaults.

    Raises:
        EstimateError: for a value that is not allowed, or an offload that the ZeRO stage does not have.
    """
    ranks: int
    zero: int = 3
    optimizer: str = "adamw"
    offload: str = "none"
    dtype: str = "bf16"
    reshard_bucket_bytes: int = 64 * 2**20
    param_persistence_threshold: int = 100_000
    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000

    def __post_init__(self):
        if self.ranks < 1:
            raise EstimateError(f"--ranks: found {self.ranks}; allowed: 1 or more")
        stages = OFFLOADS[self.offload]
        if self.zero not in stages:
            raise EstimateError(f"--offload: found {self.offload} with --zero {self.zero}; allowed with this stage: "
                                f"{', '.join(name for name, allowed in OFFLOADS.items() if self.zero in allowed)}")

    @property
    def width(self) -> int:
        """Bytes of an element of weights, gradients and communication buffers."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank. Fields marked * come on top of the lasting ones, and not at the same time.

    Args:
        ep: EP degree.
        weights: partitions, and whole copies of what stays gathered.
        gradients: gradient partitions (stages 2 and 3) or gradients.
        optimizer: float32 master weights and moments.
        buffers: the bucket that gradients are reduced from.
        gathered: * the largest layer, gathered for forward.
        backward: * the same layer recomputed, with its whole gradients; prefetched and not yet released layers.
        step: * float32 gradients of the parameter group that the optimizer steps at the moment.
        construct: * while the model is built.
        replace: * while MoE layers are replaced.
        saved: without activation checkpointing, gathered experts of all layers that autograd keeps from forward to
            backward; not part of the peak.
        host: what offloading keeps in host memory instead; not part of the peak.
    """
    ep: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    backward: int
    step: int
    construct: int
    replace: int
    saved: int = 0
    host: int = 0

    @property
    def training(self) -> int:
        """Bytes that are there all the time once training runs."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        """The largest sum at any one moment; construction and replacement come before gradients and optimizer."""
        return max(self.training + max(self.backward, self.step), self.weights + max(self.construct, self.replace))


def allowed_ep_degrees(model: ModelSizes, ranks: int) -> list:
    """EP degrees that divide the number of ranks and the experts of every layer, ascending."""
    counts = set(model.expert_layers.values())
    return [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and all(count % ep == 0 for count in counts)]


def estimate(model: ModelSizes, settings: Settings, ep: int) -> Estimate:
    """Bytes on one rank at EP degree ``ep``.

    Raises:
        EstimateError: when ``ep`` does not divide the number of ranks or the experts of some layer.
    """
    allowed = allowed_ep_degrees(model, settings.ranks)
    if ep not in allowed:
        layer, experts = next(((layer, count) for layer, count in model.expert_layers.items() if ep < 1 or count % ep),
                              next(iter(model.expert_layers.items())))
        raise EstimateError(f"--ep: found {ep} with N={settings.ranks} ranks and num_experts={experts} in {layer}; "
                            f"allowed: {', '.join(map(str, allowed))}")
    held = _stage_3(model, settings, ep) if settings.zero == 3 else _stages_0_to_2(model, settings, ep)
    return Estimate(ep=ep,
                    construct=construct_transient(model, settings, ep),
                    replace=replace_transient(model, settings, ep),
                    **held)


def construct_transient(model: ModelSizes, settings: Settings, ep: int) -> int:
    """Bytes on top of the weights while the model is built.

    Under ``zero.Init`` experts are born as shards; a dense parameter is whole until it is partitioned. Stages below 3
    build every expert on every rank.
    """
    if settings.zero == 3:
        return max(p.numel for p in model.parameters if not p.experts) * settings.width
    return sum(p.numel - p.local(ep) for p in model.parameters) * settings.width


def replace_transient(model: ModelSizes, settings: Settings, ep: int) -> int:
    """Bytes on top of the weights while a MoE layer is replaced, its sources still alive."""
    layer = max(sum(p.numel for p in layer if p.experts) for layer in model.layers())
    if settings.zero == 3:
        return ceil_div(layer, settings.ranks) * settings.width + settings.reshard_bucket_bytes
    return construct_transient(model, settings, ep) + layer // ep * settings.width


@dataclass(frozen=True)
class _LayerElements:
    """Elements of one layer under ZeRO-3: what gathering copies, of which experts, and whole gradients."""
    gathered: int
    gathered_experts: int
    gradients: int

    @classmethod
    def of(cls, layer, settings, ep):
        return cls(gathered=sum(_gathered(p, settings, ep) for p in layer),
                   gathered_experts=sum(_gathered(p, settings, ep) for p in layer if p.experts),
                   gradients=sum(p.local(ep) for p in layer))

    @property
    def in_backward(self):
        # Autograd holds the experts that recomputation gathered while backward gathers them again.
        return self.gathered + self.gathered_experts + self.gradients


def _gathered(param, settings, ep):
    """Elements that gathering allocates: none when one rank holds it all, on the device."""
    alone = param.group_size(settings.ranks, ep) == 1 and settings.offload != "optimizer+params"
    return 0 if alone else param.local(ep)


def _stage_3(model, settings, ep):
    """The parts of ``Estimate`` that ZeRO-3 decides, as keyword arguments."""
    width = settings.width
    partition = sum(p.shard(settings.ranks, ep) for p in model.parameters)
    persistent = [p for p in model.parameters if p.persistent(settings.param_persistence_threshold, ep)]
    kept = sum(_gathered(p, settings, ep) for p in persistent)
    layers = [_LayerElements.of(layer, settings, ep) for layer in model.without(persistent).layers()]
    everything = sum(layer.gathered for layer in layers)
    in_backward = max((layer.in_backward for layer in layers), default=0) + min(
        settings.reduce_bucket_size, sum(layer.gradients for layer in layers))  # copied to be reduced
    # Prefetched, and not released: a parameter used again within the reuse distance stays, which lies as far before
    # the end of forward as it is needed after it.
    in_backward += min(settings.prefetch_bucket_size, everything) + min(settings.max_reuse_distance // 2, everything)
    held = dict(weights=(partition + kept) * width,
                gradients=partition * width,
                optimizer=partition * _optimizer_width(settings),
                buffers=settings.reduce_bucket_size * width,
                gathered=max((layer.gathered for layer in layers), default=0) * width,
                backward=in_backward * width,
                saved=sum(layer.gathered_experts for layer in layers) * width,
                step=_largest_stepped_group(model, settings, ep) * _step_width(width))
    if settings.offload != "none":
        held.update(gradients=0, optimizer=0, step=0)
        held["host"] = partition * (width + FP32 + _optimizer_width(settings))
    if settings.offload == "optimizer+params":
        held["weights"] = kept * width
        held["host"] += partition * width
    return held


def _largest_stepped_group(model, settings, ep):
    """Elements of this rank's partition of the largest group of parameters that one optimizer step works on."""
    dense = _largest_group([p.shard(settings.ranks, ep) for p in model.parameters if not p.experts],
                           settings.sub_group_size)
    experts = _largest_group([p.local(ep) for p in model.parameters if p.experts], EXPERT_GROUP_NUMEL)
    return max(dense, min(ceil_div(experts, settings.ranks // ep), settings.sub_group_size))


def _largest_group(sizes, limit):
    """Largest sum when ``sizes`` are put, in order, into groups of at most ``limit``; a larger one is alone."""
    largest = current = 0
    for size in sizes:
        current = current + size if current + size <= limit else size
        largest = max(largest, current)
    return largest


def _stages_0_to_2(model, settings, ep):
    """The same of the stages that keep local experts and dense parameters whole on every rank."""
    width, low_precision = settings.width, settings.width < FP32
    local = sum(p.local(ep) for p in model.parameters)
    dense = sum(p.numel for p in model.parameters if not p.experts)
    # Each group is flattened and padded to two elements on each rank.
    partition = 2 * (ceil_div(dense, 2 * settings.ranks) + ceil_div(local - dense, 2 * (settings.ranks // ep)))
    largest = max(p.local(ep) for p in model.parameters)
    held = dict(weights=local * width, gathered=0)
    if settings.zero == 0:
        return dict(held,
                    gradients=local * width,
                    optimizer=local * (_optimizer_width(settings) - (0 if low_precision else FP32)),
                    buffers=min(settings.reduce_bucket_size, local) * width,
                    backward=0,
                    step=local * FP32 if low_precision else 0)
    held.update(gradients=(partition if settings.zero == 2 else local) * width,
                optimizer=partition * _optimizer_width(settings),
                buffers=settings.reduce_bucket_size * width,
                backward=largest * width if settings.zero == 2 else 0,
                step=partition * _step_width(width))
    if settings.offload == "optimizer":
        held.update(optimizer=0, step=0, host=partition * (width + FP32 + _optimizer_width(settings)))
        if settings.zero == 2:
            held["gradients"] = 0
    return held


def _optimizer_width(settings):
    """Bytes per element of float32 master weights (also beside float32 weights) and moments."""
    return FP32 * (1 + MOMENTS[settings.optimizer])


def _step_width(width):
    """Bytes per element of the flattened gradients, and of their float32 copy unless they are float32 already."""
    return width + FP32 if width < FP32 else FP32
