"""
Measure it: what the parts cost, beside what others take for the same, as ratios from one interleaved run.

    python bench.py head                  # log-probs, loss and gradients of N tokens: plain, chunked, TRL's, Liger's
    python bench.py head --quick          # the same at toy size, in seconds: that it runs, not how fast
    python bench.py head --tokens 512 --repeats 9 --json head.json --out head.png

Rules. Whatever is compared takes turns, round after round in one process, so that a busy or throttled machine slows all
alike; a first round warms up and is dropped; numbers are medians. A floor stands beside them: what the machine's own
matrix products alone take. Peak memory is counted, not sampled: on CPU every allocation that torch.profiler reports (it
sees temporaries inside an operator, not a BLAS library's own workspace), on CUDA torch.cuda.max_memory_allocated.
Measure on an idle machine; OMP_NUM_THREADS sets the cores.

What does not live here: curves of training runs (plot.py).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler prints two lines a run

import torch
import torch.nn.functional as F

from chunked_kernel import CHUNK_BYTES, chunk_tokens, chunked_logprobs, chunked_loss
from model import fast_cpu_matmul

MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def interleaved(contestants, repeats, prepare=lambda: None, device="cpu"):
    """name -> function, each called in turn, round after round. -> name -> its seconds, one number a round."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = {name: [] for name in contestants}
    for _ in range(repeats + 1):
        for name, f in contestants.items():
            prepare()
            synchronize()
            start = time.perf_counter()
            f()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: rounds[1:] for name, rounds in seconds.items()}


def peak_memory(f, device="cpu"):
    """Most bytes that f held at once beyond what was there before, gradients it leaves behind included."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        f()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        f()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["args"]["Ev Idx"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


class MatmulRoutes:
    """The fp32 matmul routes of this machine, by name: torch's default, and fast_cpu_matmul's where it may be used."""

    def __init__(self, device):
        self.names = ["default"]
        if device == "cpu":
            self.switch = torch.backends.mkldnn.matmul
            self.settings = {"default": self.switch.fp32_precision}
            if fast_cpu_matmul():
                self.names.append("fast")
                self.settings["fast"] = self.switch.fp32_precision
                self.switch.fp32_precision = self.settings["default"]

    def on(self, name, f):
        """f, to be called on that route."""
        if name == "default":
            return f

        def call():
            self.switch.fp32_precision = self.settings[name]
            f()
            self.switch.fp32_precision = self.settings["default"]

        return call


def version(package):
    """Its version where it is installed, else None."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package.replace("-", "_")) else None


def machine(device):
    name = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def table(rows):
    """Prints dicts with the same keys as a Markdown table."""
    cells = [list(rows[0])] + [["" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in r.values()]
                               for r in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells)]
    for i, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


# ---------------------------------------------------------------------------------------------------------------------
# head: from hidden states to log-probs, a policy-gradient loss and both gradients


class HeadInputs:
    """N hidden states as sequences of up to 128 tokens, a weight, and the loss -E[ratio A] that everybody computes."""

    def __init__(self, tokens, args, frozen):
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // 128), min(tokens, 128))

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(args.device, args.torch_dtype)

        self.hidden = normal(*shape, args.width).requires_grad_()  # (B, T, D)
        self.weight = (normal(args.vocab, args.width) / args.width**0.5).requires_grad_(not frozen)
        self.targets = torch.randint(args.vocab, shape, generator=generator).to(args.device)
        self.advantages = torch.randn(shape[0], generator=generator).to(args.device)  # (B,)
        self.tokens, self.chunk = self.targets.numel(), chunk_tokens(args.vocab, args.chunk_bytes)

    def clear(self):
        self.hidden.grad = self.weight.grad = None

    def gradient_bytes(self):
        return sum(x.grad.nbytes for x in (self.hidden, self.weight) if x.grad is not None)

    def loss(self, logp, entropy=None, rows=slice(None)):
        advantages = self.advantages[:, None].expand(self.targets.shape).reshape(-1)[rows]
        return -((logp - logp.detach()).exp() * advantages).sum() / self.tokens

    def plain(self):
        logits = F.linear(self.hidden.flatten(0, 1), self.weight).float()
        self.loss(logits.log_softmax(-1).gather(-1, self.targets.view(-1, 1)).squeeze(-1)).backward()

    def chunked_loss(self):
        hidden, targets = self.hidden.flatten(0, 1), self.targets.flatten()
        chunked_loss(hidden, self.weight, targets, self.loss, chunk=self.chunk)[0].backward()

    def chunked_logprobs(self):
        hidden, targets = self.hidden.flatten(0, 1), self.targets.flatten()
        self.loss(chunked_logprobs(hidden, self.weight, targets, chunk=self.chunk)[0]).backward()

    def trl(self):
        from trl.kernels import ChunkedLogProbFunction

        hidden, targets = self.hidden.flatten(0, 1), self.targets.flatten()
        tile = min(32768, len(self.weight))  # of the vocabulary, as its GRPOTrainer takes it
        logp, *_ = ChunkedLogProbFunction.apply(hidden, self.weight, None, targets, 1.0, tile, None, 1.0, ("entropy",))
        self.loss(logp).backward()

    def liger(self):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        head = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
        mask = torch.ones_like(self.targets)
        head(self.hidden, self.weight, self.targets, mask, self.advantages)[0].backward()

    def products(self):
        """The floor: the bare matrix products (three, two for a frozen weight), chunk by chunk, into kept buffers."""
        hidden, weight = self.hidden.detach().flatten(0, 1), self.weight.detach()
        if not hasattr(self, "buffers"):
            rows = -(-self.tokens // -(-self.tokens // self.chunk))
            self.buffers = hidden.new_empty(rows, len(weight)), hidden.new_empty(rows, weight.shape[1]), weight.clone()
        logits, dH, dW = self.buffers
        for h in hidden.split(len(logits)):
            torch.mm(h, weight.t(), out=logits[: len(h)])
            torch.mm(logits[: len(h)], weight, out=dH[: len(h)])
            if self.weight.requires_grad:
                dW.addmm_(logits[: len(h)].t(), h)


HEADS = {  # name -> (method, the package it needs, whether it is also timed on the faster matmul route)
    "plain": ("plain", None, True),
    "chunked_loss": ("chunked_loss", None, True),
    "chunked_logprobs": ("chunked_logprobs", None, True),
    "TRL": ("trl", "trl", False),
    "Liger": ("liger", "liger-kernel", False),
    "products alone": ("products", None, True),
}


def head(args):
    """Time and peak memory of every head that is installed here, over N tokens, trained and frozen."""
    if args.quick:
        args.vocab, args.width, args.tokens, args.memory_tokens, args.repeats = 4096, 64, [64, 256], [64, 256, 1024], 1
        args.chunk_bytes = 4 * args.vocab * 64
    routes = MatmulRoutes(args.device)
    heads = {name: how for name, how in HEADS.items() if how[1] is None or version(how[1])}
    info = machine(args.device) | {package: version(package) for package in ("triton", "trl", "liger-kernel")}
    info |= {"vocab": args.vocab, "width": args.width, "dtype": args.dtype, "chunk_bytes": args.chunk_bytes}
    print(", ".join(f"{key} {value}" for key, value in info.items()), end="\n\n")
    if routes.names == ["default"] and args.device == "cpu":
        print("The faster matmul route is not open on this CPU (see model.fast_cpu_matmul).\n")

    times, memory = [], []
    for frozen in (False, True):
        kind = "frozen" if frozen else "trained"
        for tokens in args.tokens:
            inputs = HeadInputs(tokens, args, frozen)
            contestants = {
                (name, route): routes.on(route, getattr(inputs, method))
                for name, (method, _, on_every_route) in heads.items()
                for route in (routes.names if on_every_route else ["default"])
            }
            seconds = interleaved(contestants, args.repeats, inputs.clear, args.device)
            flops = (4 if frozen else 6) * inputs.tokens * args.vocab * args.width
            for (name, route), rounds in seconds.items():
                to_plain = [a / b for a, b in zip(rounds, seconds["plain", "default"])]
                median = statistics.median(rounds)
                times.append({
                    "weight": kind, "tokens": inputs.tokens, "head": name, "matmul": route, "seconds": median,
                    "x plain": statistics.median(to_plain), "lowest": min(to_plain), "highest": max(to_plain),
                    "GFLOP/s": flops / median / 1e9,
                })  # fmt: skip
        for tokens in args.memory_tokens:
            inputs = HeadInputs(tokens, args, frozen)
            for name, (method, _, _) in heads.items():
                if name != "products alone":
                    inputs.clear()
                    peak = peak_memory(getattr(inputs, method), args.device)
                    beyond = (peak - inputs.gradient_bytes()) / MIB
                    memory.append({"weight": kind, "tokens": inputs.tokens, "head": name, "MiB beyond dH, dW": beyond,
                                   "MiB in all": peak / MIB})  # fmt: skip
    print("Time, medians; ratios to the plain head on the default route, paired round by round:\n")
    table(times)
    print(f"\nPeak memory beyond the inputs; a chunk's logits may take {args.chunk_bytes / MIB:.4g} MiB:\n")
    table(memory)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": info, "times": times, "memory": memory}, indent=1))
    if args.out:
        plot_head(times, memory, args.out)


def plot_head(times, memory, path):
    """Time relative to the plain head, and peak memory, over N, for a trained weight."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for axis, rows, value in ((left, times, "x plain"), (right, memory, "MiB beyond dH, dW")):
        lines = {}
        for row in rows:
            if row["weight"] == "trained":
                lines.setdefault((row["head"], row.get("matmul", "default")), []).append((row["tokens"], row[value]))
        for (name, route), points in lines.items():
            label, style = (name, "o-") if route == "default" else (f"{name}, faster matmul", "o--")
            axis.plot(*zip(*points), style, label=label, markersize=4, color=f"C{list(HEADS).index(name)}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens N")
        axis.legend(fontsize=7)
    left.set_title("time of head, loss and gradients, relative to plain")
    right.set_title("peak memory beyond gradients, MiB")
    right.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


# ---------------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("head", help=head.__doc__)
    command.set_defaults(run=head)
    command.add_argument("--vocab", type=int, default=151936, help="V (default: Qwen3's)")
    command.add_argument("--width", type=int, default=1024, help="D (default: Qwen3-0.6B's)")
    command.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024], help="N to time")
    command.add_argument("--memory_tokens", type=int, nargs="+", default=[256, 1024, 4096], help="N to weigh")
    command.add_argument("--chunk_bytes", type=int, default=CHUNK_BYTES, help="logits buffer of the chunked heads")
    command.add_argument("--quick", action="store_true", help="toy size")

    for command in commands.choices.values():
        command.add_argument("--repeats", type=int, default=5, help="rounds after the first, which is dropped")
        command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        command.add_argument("--device", choices=["cpu", "cuda"], default=device)
        command.add_argument("--json", help="write the numbers here")
        command.add_argument("--out", help="draw a plot here (needs matplotlib)")
    args = parser.parse_args()
    args.torch_dtype = getattr(torch, args.dtype)
    args.run(args)


if __name__ == "__main__":
    main()
