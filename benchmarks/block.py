# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one experts block, forward and backward, bf16, EP=1, on one GPU.

    python benchmarks/block.py [--shapes qwen3-30b mixtral-8x7b deepseek-v3-ep4] [--tokens all | N ...]
                               [--routing even zipf idle one] [--contenders NAME ...] [--device cuda|cpu]
                               [--plot docs/performance.png] [--json FILE]

``floor`` is the block's six grouped GEMMs through torch._grouped_mm on rows in order, nothing else. Every contender
runs in a process of its own, one at a time, on the same random weights and tokens, new in every run; before it is
timed, its output and gradients are compared with a float64 loop over the experts. Peak is what a step allocates at
most above weights, inputs and the gradients of the weights; held is what stays from forward to backward, without the
output. A contender whose package is missing is listed with the reason. ``--device cpu`` (shape ``tiny``) only shows
that it works.
"""
import argparse
import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time

from block_report import plot, report

SHAPES = {
    "qwen3-30b": dict(E=128, H=2048, F=768, K=8, T=16384),
    "mixtral-8x7b": dict(E=8, H=4096, F=14336, K=2, T=8192),
    "deepseek-v3-ep4": dict(E=64, H=7168, F=2048, K=8, T=8192),
    "qwen3-next-80b": dict(E=512, H=2048, F=512, K=10, T=16384),
    "tiny": dict(E=8, H=64, F=32, K=2, T=256),
}  # yapf: disable
SWEEP = [1024, 4096, 16384, 65536]
CHECKED = 512  # tokens of the comparison with float64
TOLERANCE = 0.02  # relative; rounding to bf16 at every step gives 0.003 to 0.006
GRADIENTS = ("output", "x", "gate_up", "down", "weights")


def routed(kind, shape, tokens, device, generator):
    """Expert of every (token, choice), distinct in a row but for ``one``."""
    import torch

    experts = shape["E"]
    if kind == "one":
        return torch.full((tokens, shape["K"]), experts // 2, device=device)
    logits = torch.zeros(experts, device=device)
    if kind == "zipf":
        logits -= torch.arange(1, experts + 1, device=device).log()
    elif kind == "idle":
        logits[:int(0.3 * experts)] = -torch.inf
    logits = logits[torch.randperm(experts, device=device, generator=generator)]
    # The K largest of logits plus Gumbel noise are a draw without replacement.
    uniform = torch.rand(tokens, experts, device=device, generator=generator).clamp_(1e-9, 1 - 1e-7)
    return (logits - (-uniform.log()).log()).topk(shape["K"], dim=1).indices


def inputs(kind, shape, tokens, device, generator):
    """x, index, weights and the gradient of the output."""
    import torch

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator)

    x = normal(tokens, shape["H"]).bfloat16().requires_grad_()
    weights = normal(tokens, shape["K"]).softmax(1).requires_grad_()
    return x, routed(kind, shape, tokens, device, generator), weights, normal(tokens, shape["H"]).bfloat16()


def errors(block, gate_up, down, x, index, weights, grad_output):
    """Relative error in norm of the output and of every gradient, against float64 expert by expert."""
    import torch

    out = block(x, index, weights)
    out.backward(grad_output)
    got = dict(zip(GRADIENTS, (out.detach(), x.grad, *block.gradients(), weights.grad)))
    square = {name: torch.zeros(2, dtype=torch.float64, device=x.device) for name in GRADIENTS}

    def compare(name, value, reference):
        square[name] += torch.stack([(value.double() - reference).square().sum(), reference.square().sum()])

    whole = {name: torch.zeros_like(got[name], dtype=torch.float64) for name in ("output", "x", "weights")}
    for expert in range(len(gate_up)):
        token, choice = torch.where(index == expert)
        rows, weight, first, second = (value.detach().double().requires_grad_()
                                       for value in (x[token], weights[token, choice], gate_up[expert], down[expert]))
        gate, up = (rows @ first.T).chunk(2, dim=-1)
        result = torch.nn.functional.silu(gate) * up @ second.T * weight[:, None]
        grads = torch.autograd.grad(result, (rows, weight, first, second), grad_output[token].double())
        whole["output"].index_add_(0, token, result.detach())
        whole["x"].index_add_(0, token, grads[0])
        whole["weights"][token, choice] = grads[1]
        compare("gate_up", got["gate_up"][expert], grads[2])
        compare("down", got["down"][expert], grads[3])
    for name, reference in whole.items():
        compare(name, got[name], reference)
    return {name: float((difference / norm).sqrt()) for name, (difference, norm) in square.items()}


class Floor:
    """The products of one block on rows that are in order, without autograd; forward and backward as two calls."""

    def __init__(self, shape, gate_up, down):
        self.shape, self.gate_up, self.down = shape, gate_up, down

    def prepared(self, x, index, weights, grad_output):
        import torch

        order = index.flatten().argsort()
        counts = torch.histc(index.flatten().float(), bins=self.shape["E"], min=0, max=self.shape["E"] - 1)
        self.offsets = counts.cumsum(0, dtype=torch.int32)
        self.rows, self.grad = (value.detach()[order // index.shape[1]] for value in (x, grad_output))
        self.hidden = self.grad.new_empty(len(order), self.shape["F"]).normal_()
        return self

    def product(self, left, right):
        import torch
        return torch._grouped_mm(left, right, offs=self.offsets)

    def forward(self):
        self.gated = self.product(self.rows, self.gate_up.transpose(1, 2))
        self.product(self.hidden, self.down.transpose(1, 2))

    def backward(self):
        self.product(self.grad, self.down)
        self.product(self.gated, self.gate_up)
        return self.product(self.grad.T, self.hidden), self.product(self.gated.T, self.rows)


class Step:
    """Forward and backward of a contender on its inputs, as two calls that leave no gradient behind."""

    def __init__(self, block, x, index, weights, grad_output):
        self.block, self.arguments, self.grad_output = block, (x, index, weights), grad_output
        self.leaves = [x, weights, *block.parameters()]

    def forward(self):
        self.out = self.block(*self.arguments)

    def backward(self):
        self.out.backward(self.grad_output)
        self.out = None
        for leaf in self.leaves:
            leaf.grad = None


def timed(step, device, seconds):
    """Milliseconds of (forward, forward and backward) of every repeat, which take about ``seconds`` together."""
    import torch

    def now():
        if device == "cpu":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(begin, end):
        return end - begin if device == "cpu" else begin.elapsed_time(end)

    def repeats(count):
        marks = []
        for _ in range(count):
            begin = now()
            step.forward()
            middle = now()
            step.backward()
            marks.append((begin, middle, now()))
        if device == "cuda":
            torch.cuda.synchronize()
        return [(between(begin, middle), between(begin, end)) for begin, middle, end in marks]

    repeats(2)  # compiles
    once = max(repeats(2)[-1][1], 0.05) / 1e3
    repeats(max(2, min(10, int(seconds / 2 / once))))
    return repeats(max(7, min(100, int(seconds / once))))


def memory(step, weight_bytes):
    """(peak, held) bytes; see the text at the top for what they leave out."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.forward()
    held = torch.cuda.memory_allocated() - before - step.out.nbytes
    step.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - weight_bytes, held


def points_of(name, shape_name, options):
    """Yield a record for every routing and number of tokens of one shape; this runs in the contender's process."""
    import torch

    from block_contenders import CONTENDERS

    shape = SHAPES[shape_name]
    generator = torch.Generator(options.device).manual_seed(options.seed)
    gate_up, down = (
        torch.empty(shape["E"], *size, dtype=torch.bfloat16, device=options.device)
        .normal_(std=size[1]**-0.5, generator=generator)
        for size in ((2 * shape["F"], shape["H"]), (shape["H"], shape["F"])))  # yapf: disable
    weight_bytes = gate_up.nbytes + down.nbytes
    block = (Floor if name == "floor" else CONTENDERS[name])(shape, gate_up, down)
    if name != "floor":
        # Some choose a configuration at their first call for all that follow: let it be of the usual size.
        step = Step(block, *inputs(options.routing[0], shape, shape["T"], options.device, generator))
        step.forward()
        step.backward()
        del step
    for routing in options.routing:
        point = dict(contender=name, shape=shape_name, routing=routing)
        if name != "floor":
            values = inputs(routing, shape, min(CHECKED, shape["T"]), options.device, generator)
            yield dict(point, errors=errors(block, gate_up, down, *values))
            for parameter in block.parameters():
                parameter.grad = None
        for tokens in options.tokens or [shape["T"]]:
            try:
                values = inputs(routing, shape, tokens, options.device, generator)
                step = block.prepared(*values) if name == "floor" else Step(block, *values)
                times = timed(step, options.device, options.seconds)
                record = dict(point, tokens=tokens, forward=[a for a, _ in times], both=[b for _, b in times])
                if options.device == "cuda" and name != "floor":
                    record["peak"], record["held"] = memory(step, weight_bytes)
                yield record
            except torch.cuda.OutOfMemoryError:
                yield dict(point, tokens=tokens, failed="out of memory")
            values = step = None
            if options.device == "cuda":
                torch.cuda.empty_cache()


def work(options):
    """Be the process of one contender: import, say so, wait for the turn, then write a line for every record."""
    # Libraries write to the standard output too.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch  # noqa: F401

    from block_contenders import CONTENDERS

    for module in CONTENDERS[options.worker].modules if options.worker != "floor" else ():
        with contextlib.suppress(ImportError):  # said when it is used
            importlib.import_module(module)
    print(file=lines, flush=True)
    sys.stdin.readline()
    for shape in options.shapes:
        try:
            for record in points_of(options.worker, shape, options):
                print(json.dumps(record), file=lines, flush=True)
        except Exception as error:  # of any kind, in code of others: it is a result, and the next shape may do
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(json.dumps(dict(contender=options.worker, shape=shape, skipped=reason)), file=lines, flush=True)


def start(name, arguments, device):
    from block_contenders import CONTENDERS

    environment = dict(os.environ, DS_ACCELERATOR=device, DS_AUTOEP="0", TOKENIZERS_PARALLELISM="false")
    environment.setdefault("LOCAL_SIZE", "1")  # DeepSpeed otherwise counts a CPU machine's devices by its sockets
    if name != "floor":
        environment.update(CONTENDERS[name].environment)
    errors_to = tempfile.TemporaryFile("w+")
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), *arguments, "--worker", name], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors_to,
                             env=environment)  # yapf: disable
    return child, errors_to


def collect(name, child, errors_to, limit):
    """Give a contender its turn; returns its records, the last of them with the reason if it did not finish."""
    timer = threading.Timer(limit, child.kill)
    timer.start()
    began = time.perf_counter()
    try:
        child.stdin.write("\n")
        child.stdin.close()
    except BrokenPipeError:
        pass  # it failed at its imports; the reason is in its output
    records = [json.loads(line) for line in child.stdout if line.strip()]
    code = child.wait()
    if code:
        errors_to.seek(0)
        said = [line.strip() for line in errors_to if line.strip()]
        reason = f"stopped after {limit:.0f} s" if not timer.is_alive() else said[-1] if said else f"exit {code}"
        records.append(dict(contender=name, skipped=reason[:300]))
    timer.cancel()
    print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return records


def save(saved, path):
    with open(f"{path}.part", "w") as file:
        json.dump(saved, file)
    os.replace(f"{path}.part", path)


def parse(arguments):
    from block_contenders import CONTENDERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+")
    parser.add_argument("--tokens", nargs="+", help="numbers, or all; one number that suits each shape by default")
    parser.add_argument("--routing", choices=["even", "zipf", "idle", "one"], nargs="+", default=["even"])
    parser.add_argument("--contenders", choices=CONTENDERS, nargs="+",
                        default=[name for name in CONTENDERS if CONTENDERS[name].default])  # yapf: disable
    parser.add_argument("--seconds", type=float, default=0.5, help="of repeats at each point")
    parser.add_argument("--limit", type=float, default=120, help="seconds a contender may take")
    parser.add_argument("--plot", help="file for a plot of the ratio to the floor over the number of tokens")
    parser.add_argument("--json", help="file for all records")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="random by default")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.shapes = options.shapes or (["tiny"] if options.device == "cpu" else [name for name in SHAPES][:3])
    if options.tokens:
        options.tokens = SWEEP if options.tokens == ["all"] else [int(tokens) for tokens in options.tokens]
    return options


def main():
    options = parse(sys.argv[1:])
    if options.worker:
        return work(options)
    from block_contenders import CONTENDERS

    arguments = [*sys.argv[1:], "--seed", str(options.seed)]
    # They import side by side, which is most of the time of a process, and use the device one after another.
    started = {name: start(name, arguments, options.device) for name in ("floor", *options.contenders)}
    for child, _ in started.values():
        child.stdout.readline()
    notes = {name: CONTENDERS[name].note for name in options.contenders if CONTENDERS[name].note}
    saved = dict(seed=options.seed, device=options.device, shapes={name: SHAPES[name] for name in options.shapes},
                 tolerance=TOLERANCE, checked=CHECKED, notes=notes, records=[])  # yapf: disable
    for name in started:
        saved["records"] += collect(name, *started[name], options.limit)
        if options.json:  # after every one, for a run that is stopped
            save(saved, options.json)
    report(saved)
    if options.plot:
        plot(saved, options.plot)
    return int(any(error > TOLERANCE for record in saved["records"] if record["contender"] in ("ours", "ours-block")
                   for error in record.get("errors", {}).values()))  # yapf: disable


if __name__ == "__main__":
    sys.exit(main())
