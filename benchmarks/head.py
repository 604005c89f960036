"""head: from hidden states to log-probs, a policy-gradient loss and both gradients.

Plain, both doors of chunked_kernel.py, and TRL's and Liger's where installed, over N tokens, trained and frozen; the
machine's own matrix products are the floor.

    python bench.py head --tokens 512 --repeats 9 --json head.json --out head.png
"""

import statistics

import torch
import torch.nn.functional as F

from benchmarks.measure import MIB, MatmulRoutes, interleaved, line, machine, peak_memory, ratios, table, version
from chunked_kernel import CHUNK_BYTES, chunk_tokens, chunked_logprobs, chunked_loss


def add_arguments(parser):
    parser.add_argument("--vocab", type=int, default=151936, help="V (default: Qwen3's)")
    parser.add_argument("--width", type=int, default=1024, help="D (default: Qwen3-0.6B's)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024], help="N to time")
    parser.add_argument("--memory_tokens", type=int, nargs="+", default=[256, 1024, 4096], help="N to weigh")
    parser.add_argument("--chunk_bytes", type=int, default=CHUNK_BYTES, help="logits buffer of the chunked heads")
    parser.add_argument("--out", help="draw a plot here (needs matplotlib)")


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


def run(args):
    """Time and peak memory of every head that is installed here, over N tokens, trained and frozen. Returns both."""
    if args.quick:
        args.vocab, args.width, args.tokens, args.memory_tokens, args.repeats = 4096, 64, [64, 256], [64, 256, 1024], 1
        args.chunk_bytes = 4 * args.vocab * 64
    routes = MatmulRoutes(args.device)
    heads = {name: how for name, how in HEADS.items() if how[1] is None or version(how[1])}
    info = machine(args.device) | {package: version(package) for package in ("triton", "trl", "liger-kernel")}
    info |= {"vocab": args.vocab, "width": args.width, "dtype": args.dtype, "chunk_bytes": args.chunk_bytes}
    print(line(info), end="\n\n")
    if routes.names == ["default"] and args.device == "cpu":
        print("The faster matmul route is not open on this CPU (see cpu.fast_cpu_matmul).\n")

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
                to_plain, lowest, highest = ratios(rounds, seconds["plain", "default"])
                median = statistics.median(rounds)
                times.append({
                    "weight": kind, "tokens": inputs.tokens, "head": name, "matmul": route, "seconds": median,
                    "x plain": to_plain, "lowest": lowest, "highest": highest,
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
    if args.out:
        plot_head(times, memory, args.out)
    return {"machine": info, "times": times, "memory": memory}


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
