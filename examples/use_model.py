# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Use a model that one of the scripts trained and saved: Transformers alone, in one process.

    python examples/use_model.py --save runs/train --prompt "def main("
"""
import sys

import torch
from transformers import AutoModelForCausalLM

from tiny_moe import argument_parser, datasets, logits_file


@torch.no_grad()
def main():
    parser = argument_parser("train")
    parser.add_argument("--prompt", default="def __init__(", help="what a line begins with (default: %(default)s)")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.save).eval()
    first = datasets(model)[1][0]["input_ids"][None]
    trained = torch.load(logits_file(args.summary))
    print(f"largest difference of a logit: {(model(input_ids=first).logits - trained).abs().max():.1e}")
    prompt = torch.tensor([list(args.prompt.encode())])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    line = bytes(generated[0].tolist()).decode(errors="replace").splitlines()[0]
    print(f"a line of code, after so little training: {line}")
    if "deepspeed" in sys.modules:
        sys.exit("DeepSpeed was loaded")


if __name__ == "__main__":
    main()
