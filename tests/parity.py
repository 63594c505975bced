# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Train an engine on several ranks and the unmodified Hugging Face model in one process, and compare them.

Both see the same tokens: the reference gets the batches of all ranks, concatenated. Every rank runs the reference by
itself, so that comparing needs no communication beyond gathering the engine's own tensors.
"""
import torch
import torch.nn.functional as F

from engines import ADAMW, autoep_layers, engine_of


def make_batches(world_size, steps, vocabulary, length=6, all_padding_rank=None, distinct_tokens=None, seed=7):
    """Return ``batches[step]``: input_ids, attention_mask and labels of all ranks, two rows each.

    Args:
        all_padding_rank: a rank whose rows are padding only.
        distinct_tokens: draw from the first so many ids, so that some experts see no token.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        ids = torch.randint(1, distinct_tokens or vocabulary, (2 * world_size, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1::2, length - 2:] = 0  # every second row ends in padding
        if all_padding_rank is not None:
            mask[2 * all_padding_rank:2 * all_padding_rank + 2] = 0
        labels = ids.masked_fill(mask == 0, -100)
        batches.append(dict(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask, labels=labels))
    return batches


def _loss(logits, labels, tokens):
    """Cross entropy summed over this call's labels, divided by the number of labels of all ranks."""
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / tokens


def _labelled(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def _inputs(batch):
    return dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)


def _set(optimizer, hyperparameters):
    for group in optimizer.param_groups:
        group.update(hyperparameters)


def reference_run(checkpoint, batches, hyperparameters, **from_pretrained):
    """Losses, gradients per step and float32 weights after the last step, of the plain model in one process.

    In a dtype below float32 the optimizer steps on float32 copies of the weights, as DeepSpeed's does.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", **from_pretrained).train()
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), **ADAMW)
    losses, gradients = [], []
    for batch, changed in zip(batches, hyperparameters):
        loss = _loss(model(**_inputs(batch)).logits, batch["labels"], _labelled(batch))
        loss.backward()
        losses.append(loss.item())
        for name, param in model.named_parameters():
            masters[name].grad = param.grad.float()
        gradients.append({name: master.grad.clone() for name, master in masters.items()})
        _set(optimizer, changed)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        model.zero_grad()
    return losses, gradients, masters


def engine_run(engine, batches, hyperparameters=None):
    """The same of an engine, under the plain model's parameter names; losses are summed over ranks.

    ``hyperparameters=None`` leaves them to the engine's scheduler.
    """
    import deepspeed.comm as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses, gradients = [], []
    for step, batch in enumerate(batches):
        mine = {key: value[2 * rank:2 * rank + 2] for key, value in batch.items()}
        loss = _loss(engine(**_inputs(mine)).logits, mine["labels"], _labelled(batch))
        engine.backward(loss * world_size)  # the engine averages gradients over ranks
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        gradients.append(gathered(engine.module, safe_get_full_grad))
        if hyperparameters is not None:
            _set(engine.optimizer, hyperparameters[step])
        engine.step()
    return losses, gradients, gathered(engine.module, safe_get_full_fp32_param)


def gathered(model, read):
    """``read(param)`` of every trainable parameter in float32, with Hugging Face's names and experts of all ranks."""
    found = {name: read(param).float().clone() for name, param in model.named_parameters() if param.requires_grad}
    for layer, module in autoep_layers(model).items():
        if hasattr(module, "family_class"):  # only the experts were replaced
            for name in [f"{layer}.{name}" for name, _ in module.named_parameters(recurse=False)]:
                if name in found:  # once, where modules share it
                    found[name] = _of_all_experts(found[name], module.ep_group)
            continue
        local = {weight: found.pop(f"{layer}.experts.{weight}") for weight in ("w1", "w2", "w3")}
        w1, w2, w3 = (_of_all_experts(local[weight], module.ep_group) for weight in ("w1", "w2", "w3"))
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        found[f"{layer}.experts.down_proj"] = w2
        for name in [name for name in found if name.startswith(layer)]:
            found[_name_before_replacement(name, layer, model.config.model_type)] = found.pop(name)
    return found


def _name_before_replacement(name, layer, model_type):
    name = name.replace(f"{layer}.router.gate.", f"{layer}.gate.")
    if model_type.startswith("qwen"):  # one shared expert, in the singular
        name = name.replace(f"{layer}.shared_experts", f"{layer}.shared_expert")
    return name


def _of_all_experts(local, ep_group):
    import deepspeed.comm as dist

    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group=ep_group))]
    dist.all_gather(parts, local.contiguous(), group=ep_group)
    return torch.cat(parts)


def relative_errors(found, expected):
    """By name, the largest difference over the largest element of the expected tensor.

    A tensor whose elements are below a hundredth of the largest one of all is compared with that hundredth: what
    cancels to (almost) zero, such as the gradient of a key projection's bias, has no more digits than its summands.
    """
    assert found.keys() >= expected.keys(), expected.keys() - found.keys()
    floor = max(tensor.abs().max().item() for tensor in expected.values()) / 100
    return {
        name: ((found[name] - tensor.float()).abs().max() / max(tensor.abs().max().item(), floor)).item()
        for name, tensor in expected.items()
    }


def compare(checkpoint,
            config,
            batches,
            engine_checkpoint=None,
            hyperparameters=None,
            initialize=None,
            scheduled=False,
            **from_pretrained):
    """Run both on this rank and return the errors by name: ``{"loss": {}, "gradient": {}, "weight": {}}``.

    Args:
        engine_checkpoint: another checkpoint for the engine, as a negative control.
        hyperparameters: per step, what is set in every parameter group before the optimizer steps.
        initialize: further arguments of ``deepspeed.initialize``, see ``engine_of``.
        scheduled: whether the engine's scheduler sets the hyperparameters instead.

    Also returned: ``"idle"``, names of expert gradients of the reference with an expert that saw no token.
    """
    hyperparameters = hyperparameters or [{}] * len(batches)
    expected_losses, expected_gradients, expected_weights = reference_run(checkpoint, batches, hyperparameters,
                                                                          **from_pretrained)
    with engine_of(engine_checkpoint or checkpoint, config, initialize, **from_pretrained) as engine:
        losses, gradients, weights = engine_run(engine, batches, None if scheduled else hyperparameters)
    idle = [
        name for name, gradient in expected_gradients[0].items()
        if name.endswith("down_proj") and gradient.dim() == 3 and (gradient.flatten(1).abs().sum(1) == 0).any()
    ]
    return {
        "loss": dict(enumerate(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses))),
        "gradient": {
            f"{name}@{step}": error
            for step, expected in enumerate(expected_gradients)
            for name, error in relative_errors(gradients[step], expected).items()
        },
        "weight": relative_errors(weights, expected_weights),
        "idle": idle,
    }
