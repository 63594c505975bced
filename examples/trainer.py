# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The same training through the Trainer of Transformers, which is given DeepSpeed's configuration and no more.

    python examples/tiny_moe.py runs/tiny_moe
    torchrun --nproc-per-node 2 examples/trainer.py --model runs/tiny_moe
"""
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tiny_moe import argument_parser, datasets, write_summary


def main():
    parser = argument_parser("trainer")
    parser.add_argument("--config", default="examples/ds_zero3_ep.json", help="DeepSpeed's configuration")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints, in runs/trainer (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the last of them, on any number of ranks")
    args = parser.parse_args()

    # Before the model: from then on from_pretrained loads each rank's part only.
    training = TrainingArguments(
        deepspeed=args.config,
        per_device_train_batch_size=4,  # this and the learning rate: as in args.config
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        eval_on_start=True,
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or args.steps,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # unsaid, each rank trains as if alone
        output_dir="runs/trainer")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    blocks, held_out = datasets(model)
    trainer = Trainer(model=model, args=training, train_dataset=blocks, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.evaluate()
    losses, held_out = ([entry[name] for entry in trainer.state.log_history if name in entry]
                        for name in ("loss", "eval_loss"))  # yapf: disable
    write_summary(args.summary, trainer.model, losses, held_out)
    trainer.save_model(args.save)
    trainer.accelerator.wait_for_everyone()  # no rank leaves while another still talks to it
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
