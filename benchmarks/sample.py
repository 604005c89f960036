"""sample: tokens a second beside transformers.generate, and beside what memory allows.

Three parts, in one interleaved run over the same weights:
- ragged prompts, every row of full length: no token ends it, on either side. The roofline is the time to read the
  weights and the keys and values of every step once at this machine's bandwidth, measured here; on a CPU with many
  rows arithmetic takes longer than reading, so the share reached falls with the batch;
- a rollout, several completions of each prompt, of geometric lengths. On both sides a random 64th of the vocabulary are
  the end tokens and the temperature is so high that all tokens are equally likely: each token ends its row with
  probability 1/64, through the ordinary stop checks. Only tokens up to the end are counted. transformers.generate gets
  the rows as they come, a full batch at a time, ours may hold as many rows at once;
- long answers: one row, time a token by windows, which may grow by attention over the cache only.

transformers: sdpa, its default cache, no truncation of the distribution, in a process that waits while it is not its
turn, with torch's defaults and ("faster matmul") on the matmul route that train.py and sample.py switch on.

    python bench.py sample --batch 1 8 32 --json sample.json
    python bench.py sample --model smollm2-135m-instruct --dtype bfloat16 --parts ragged
"""

import statistics
import tempfile
import time
from functools import partial

import torch

from benchmarks.measure import (MIB, SMALL, TOY, Elsewhere, MatmulRoutes, cached_numbers, interleaved, line, machine,
                                model_directory, ratios, table, version)  # fmt: skip
from cpu import keep_freed_memory
from model import load_model
from sample import generate

PEER = "transformers"
PARTS = ["ragged", "rollout", "long"]
UNIFORM = 1e6  # a temperature at which all tokens are equally likely


def add_arguments(parser):
    parser.add_argument("--model", help="a directory, an alias or a hub id (default: 31.5M parameters, random)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of the first part")
    parser.add_argument("--new_tokens", type=int, default=128, help="of the first part")
    parser.add_argument("--prompt_tokens", type=int, nargs=2, default=[16, 128], help="shortest and longest prompt")
    parser.add_argument("--rollout", type=int, nargs=2, default=[16, 8], help="prompts, and completions of each")
    parser.add_argument("--rows", type=int, default=32, help="that decode at a time in the rollout")
    parser.add_argument("--mean_length", type=int, default=64, help="of a completion of the rollout")
    parser.add_argument("--longest", type=int, default=256, help="completion of the rollout")
    parser.add_argument("--long_tokens", type=int, default=4096, help="of the long answer, by the model tiny")
    parser.add_argument("--window", type=int, default=512, help="tokens that are timed together in the long answer")


def ragged_prompts(count, shortest, longest, V):
    """Lengths spread evenly from shortest to longest, in no order; the longest alone when there is one."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.linspace(longest, shortest, count).round().long()[torch.randperm(count, generator=generator)]
    return [torch.randint(V, (length,), generator=generator).tolist() for length in lengths.tolist()]


def transformers_turns(turns, directory, args):
    """The peer's side, in a process of its own: a turn is the route's name and what `generate` takes."""
    peer, routes = Transformers(directory, args), MatmulRoutes(args.device)
    while True:
        name, *request = turns.begin()
        routes.use(name)
        turns.end(peer.generate(*request))


class Transformers:
    """The peer. `generate` returns tokens of new text, those after an end token not counted."""

    def __init__(self, directory, args):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=args.torch_dtype, attn_implementation="sdpa"
        ).to(args.device).eval()  # fmt: skip
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # not the checkpoint's own rules

    def generate(self, prompts, new_tokens, temperature, stop_ids=()):
        length, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=True, temperature=temperature,
            top_k=0, top_p=1.0, eos_token_id=sorted(stop_ids) or None,
        )[:, length:]  # fmt: skip
        if not stop_ids:
            return out.numel()
        ends = torch.isin(out, torch.tensor(sorted(stop_ids), device=device))
        return int((ends.cumsum(1) - ends.long() == 0).sum())  # up to and with the first end token


def step_bytes(model, lengths, new_tokens):
    """Bytes of weights and of keys and values that one decode step reads, at half of the new tokens."""
    config, weights = model.config, {p.data_ptr(): p.nbytes for p in model.parameters()}
    if not config.tie_word_embeddings:
        del weights[model.model.embed_tokens.weight.data_ptr()]  # a row of it a token
    cached = sum(lengths) + len(lengths) * new_tokens / 2
    return sum(weights.values()) + cached * cached_numbers(config) * model.lm_head.weight.itemsize


def bandwidth(device, size=1 << 28):
    """Bytes a second that this machine reads (the sum of a big tensor) or copies, whichever is more; best of five."""
    x = torch.ones(size, device=device)
    y = torch.empty_like(x)
    seconds = interleaved({"sum": x.sum, "copy": lambda: y.copy_(x)}, 5, device=device)
    return max(x.nbytes / min(seconds["sum"]), 2 * x.nbytes / min(seconds["copy"]))


class Counted:
    """A contestant that keeps how many tokens it made each time."""

    def __init__(self, f):
        self.f, self.tokens = f, []

    def __call__(self):
        self.tokens.append(self.f())


def race(args, routes, ours, peer):
    """ours(), peer(route): the tokens they made. -> contestant -> tokens a second, one number a round."""
    runs = {"ours": Counted(ours)}
    if peer:
        runs |= {name: Counted(partial(peer, name)) for name in routes.names}
    seconds = interleaved(runs | {"ours": routes.on(routes.names[-1], runs["ours"])}, args.repeats, device=args.device)
    return {name: [n / s for n, s in zip(runs[name].tokens[1:], rounds)] for name, rounds in seconds.items()}


def compare(rates):
    """The columns of a race."""
    row = {"tokens/s, ours": statistics.median(rates["ours"])}
    for name in rates:
        if name != "ours":
            label = "transformers" + (", faster matmul" if name == "fast" else "")
            median, lowest, highest = ratios(rates["ours"], rates[name])
            row |= {f"x {label}": median}
            if name == "default":
                row |= {"lowest": lowest, "highest": highest}
    return row


def ragged(args, routes, model, peer, speed):
    """A row for each batch size."""
    rows = []
    for B in args.batch:
        prompts = ragged_prompts(B, *args.prompt_tokens, model.config.vocab_size)

        def ours():
            made = generate(model, prompts, max_new_tokens=args.new_tokens, max_batch=B)
            return sum(len(group[0].tokens) for group in made)

        rates = race(args, routes, ours, peer and (lambda route: peer(route, prompts, args.new_tokens, 1.0)))
        read = step_bytes(model, list(map(len, prompts)), args.new_tokens)
        rows.append({"rows": B} | compare(rates) | {
            "MiB a step": read / MIB, "share of the roofline": statistics.median(rates["ours"]) / B * read / speed,
        })  # fmt: skip
    return rows


def rollout(args, routes, model, peer):
    """One row: P prompts, n completions of each, of geometric lengths."""
    (P, n), V = args.rollout, model.config.vocab_size
    prompts = ragged_prompts(P, *args.prompt_tokens, V)
    stops = set(torch.randperm(V, generator=torch.Generator().manual_seed(1))[: V // args.mean_length].tolist())
    copies = [prompt for prompt in prompts for _ in range(n)]

    def ours():
        made = generate(model, prompts, n, max_new_tokens=args.longest, temperature=UNIFORM, stop_ids=stops,
                        max_batch=args.rows)  # fmt: skip
        return sum(len(completion.tokens) for group in made for completion in group)

    def theirs(route):
        batches = (copies[i : i + args.rows] for i in range(0, len(copies), args.rows))
        return sum(peer(route, batch, args.longest, UNIFORM, stops) for batch in batches)

    return {"prompts": P, "completions": n} | compare(race(args, routes, ours, peer and theirs))


def long_answer(args, routes):
    """A row for each window of one long answer; the median of its rounds."""
    model = load_model("tiny", device=args.device, dtype=args.torch_dtype)
    stamps = []

    def answer():
        stamps.append([])
        clock = time.perf_counter
        generate(model, [[5, 6, 7, 8]], max_new_tokens=args.long_tokens,
                 on_token=lambda prompt, sample, token: stamps[-1].append(clock()))  # fmt: skip

    interleaved({"long": routes.on(routes.names[-1], answer)}, args.repeats, device=args.device)
    rows = []
    for end in range(args.window, args.long_tokens + 1, args.window):
        first = max(end - args.window, 1)  # the first token has no stamp before it
        each = statistics.median((s[end - 1] - s[first - 1]) / (end - first) for s in stamps[1:])
        read = (end - args.window / 2) * cached_numbers(model.config) * model.lm_head.weight.itemsize
        rows.append({"tokens up to": end, "ms a token": each * 1e3, "cache read, MiB": read / MIB})
    for row in rows:
        row["x first"] = row["ms a token"] / rows[0]["ms a token"]
    return rows


def run(args):
    """Tokens a second and ratios of the first three parts, then windows of the last. Returns all numbers."""
    if args.quick:
        args.batch, args.new_tokens, args.prompt_tokens, args.repeats = [1, 3], 8, [2, 9], 1
        args.rollout, args.rows, args.mean_length, args.longest = [3, 2], 4, 4, 16
        args.long_tokens, args.window = 128, 32
    routes = MatmulRoutes(args.device)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as temporary:
        directory = model_directory(args.model, TOY if args.quick else SMALL, temporary)
        model = load_model(directory, device=args.device, dtype=args.torch_dtype)
        peer = Elsewhere(transformers_turns, directory, args) if version(PEER) else None
        speed = bandwidth(args.device, 1 << 20 if args.quick else 1 << 28)
        info = machine(args.device) | {PEER: version(PEER), "model": args.model or "random", "dtype": args.dtype}
        info |= {"parameters": sum(p.numel() for p in model.parameters()), "GB/s": speed / 1e9}
        print(line(info), end="\n\n")
        if peer is None:
            print(f"Ratios are left out: {PEER} is not installed.\n")
        parts = {}
        if "ragged" in args.parts:
            parts["ragged"] = ragged(args, routes, model, peer, speed)
            print("Ragged prompts of {}-{} tokens, {} new tokens each; medians, ratios paired round by round:\n".format(
                  *args.prompt_tokens, args.new_tokens))  # fmt: skip
            table(parts["ragged"])
        if "rollout" in args.parts:
            parts["rollout"] = rollout(args, routes, model, peer)
            print(f"\nLengths geometric, mean {args.mean_length}, cap {args.longest}, {args.rows} rows at a time:\n")
            table([parts["rollout"]])
        if peer:
            peer.close()
    if "long" in args.parts:
        parts["long"] = long_answer(args, routes)
        print("\nOne long answer of tiny:\n")
        table(parts["long"])
    return {"machine": info} | parts
