"""device: what a new GPU should be asked, in eight minutes: kernels, head, decoding, whole steps of Qwen3-0.6B.

    python bench.py device                          # on a GPU; a table for each part, all numbers in device.json
    python bench.py device --device cpu             # the same parts at toy size: that they run

Random weights of the published sizes, so nothing is downloaded. Each part stands alone and has a share of --minutes
(benchmarks/guarded.py); the file is written after every row. fp32 and bf16 are both measured, whatever --dtype says.
"""

import contextlib
import statistics
from types import SimpleNamespace
from typing import NamedTuple

import torch

import chunked_kernel
import fsdp
from benchmarks.guarded import PROCESSES, attempt, clean, run_parts
from benchmarks.head import HEADS, HeadInputs
from benchmarks.kernels import DTYPES, kernels, row_pass, row_passes
from benchmarks.measure import MIB, TOY, cached_numbers, interleaved, line, machine, peak_memory, ratios, version
from learner import Row, optimizer_step
from model import ModelConfig, Transformer
from plan import find_config
from sample import RECORDED, Completion, Decoder, generate

PROCESSES.set_forkserver_preload([__name__])  # torch and all the rest are imported once, not once a part
GIB = 2**30


class Size(NamedTuple):
    """What is measured where."""

    device: str
    model: dict  # a config.json; the head is its head
    bytes: int  # of the buffer that is copied
    product: int  # n of the n x n products
    exact_tokens: int  # N of the comparison with float64
    heads: tuple  # of benchmarks/head.py
    head_tokens: tuple  # N
    decode_rows: tuple
    decode_tokens: tuple  # prompt, new
    step_rows: tuple  # completions of a step
    step_tokens: tuple  # prompt, completion
    repeats: int


def full(device):
    model = find_config("qwen3-0.6b").raw
    return Size(device, model, GIB, 8192, 192, tuple(HEADS), (1024, 8192), (1, 8, 64, 256), (128, 256),
                (2, 4, 8, 16, 32, 64), (256, 512), 3)  # fmt: skip


def toy(device):
    return Size(device, TOY, MIB, 64, 24, tuple(HEADS), (64,), (1, 4), (8, 4), (2, 4), (8, 8), 1)


def add_arguments(parser):
    parser.add_argument("--minutes", type=float, default=8, help="for everything")
    parser.set_defaults(json="device.json")


def random_model(size):
    with torch.device(size.device):
        model = Transformer(ModelConfig.from_dict(size.model))
    model.init_weights()
    return model


def rate(f, amount, device, repeats):
    return amount / statistics.median(interleaved({"": f}, repeats, device=device)[""])


# ---------------------------------------------------------------------------------------------------------------------
# The parts: generators of rows


def bandwidth(size):
    """Bytes a second, of a copy: read and written."""
    a = torch.ones(size.bytes, dtype=torch.uint8, device=size.device)
    b = torch.empty_like(a)
    return rate(lambda: b.copy_(a), 2 * size.bytes, size.device, 5)


def floors(size):
    """What this machine can do at best, to read the other tables by."""
    yield {"what": "memory, GB/s", "rate": bandwidth(size) / 1e9}
    for name, dtype in DTYPES.items():
        a = torch.ones(size.product, size.product, dtype=dtype, device=size.device)
        flops = rate(lambda: a @ a, 2 * size.product**3, size.device, size.repeats)
        yield {"what": f"{name} products, TFLOP/s", "rate": flops / 1e12}


def head(size):
    """Time and peak memory of benchmarks/head.py's contestants, each tried alone before they take turns."""
    config = {"vocab": size.model["vocab_size"], "width": size.model["hidden_size"], "device": size.device}
    for dtype_name, dtype in DTYPES.items():
        for frozen in (False, True):
            for tokens in size.head_tokens:
                args = SimpleNamespace(**config, torch_dtype=dtype, chunk_bytes=chunked_kernel.CHUNK_BYTES)
                inputs = HeadInputs(tokens, args, frozen)
                methods = {name: HEADS[name][0] for name in size.heads if not HEADS[name][1] or version(HEADS[name][1])}
                calls = {name: getattr(inputs, method) for name, method in methods.items()}
                if row_passes(size.device)[0] == "triton":
                    calls["chunked_loss, torch"] = row_pass("torch")(inputs.chunked_loss)

                def weigh(f):
                    f()  # compiles its kernels and has cuBLAS take its workspace
                    inputs.clear()
                    return {"MiB beyond dH, dW": (peak_memory(f, size.device) - inputs.gradient_bytes()) / MIB}

                rows = {name: attempt(lambda: weigh(f)) for name, f in calls.items()}
                sound = {name: f for name, f in calls.items() if "failed" not in rows[name]}
                seconds = attempt(lambda: interleaved(sound, size.repeats, inputs.clear, size.device))
                for name, row in rows.items():
                    labels = {"dtype": dtype_name, "weight": "frozen" if frozen else "trained", "tokens": tokens}
                    if name in seconds:
                        row["ms"] = 1000 * statistics.median(seconds[name])
                        if "plain" in seconds:
                            row["x plain"] = ratios(seconds[name], seconds["plain"])[0]
                    elif name in sound:
                        row["failed"] = seconds["failed"]
                    yield labels | {"head": name} | row


@contextlib.contextmanager
def decoding(way, device):
    """Steps are recorded in a CUDA graph and replayed, as sample.RECORDED says of the device, or plain."""
    recorded = device in RECORDED
    if way == "plain":
        RECORDED.discard(device)
    try:
        yield
    finally:
        if recorded:
            RECORDED.add(device)


def decode(size):
    """Tokens a second of sample.generate against the roofline: every step reads all weights and the rows' keys and
    values once, at the bandwidth of a copy. Steps were recorded in an earlier call, as they are from a run's second
    rollout on; prefill is taken out: (time of n tokens - time of one) / (n - 1) a step. "alike": the share of tokens
    that are those of recorded steps."""
    prompt, new = size.decode_tokens
    reach = bandwidth(size)
    for dtype_name, dtype in DTYPES.items():
        model = random_model(size).to(dtype)
        V, token_bytes = model.config.vocab_size, cached_numbers(model.config) * dtype.itemsize
        for rows in size.decode_rows:
            prompts, drawn = torch.randint(V, (rows, prompt)).tolist(), {}
            for way in ("recorded", "plain") if size.device in RECORDED else ("plain",):

                def measure():
                    decoder = Decoder()

                    def sample(n):
                        groups = generate(model, prompts, max_new_tokens=n, kv_bytes=1 << 60, decoder=decoder)
                        drawn[way] = [token for [completion] in groups for token in completion.tokens]

                    contestants = {1: lambda: sample(1), new: lambda: sample(new)}
                    with decoding(way, size.device):
                        seconds = interleaved(contestants, 1, device=size.device)
                    step = (seconds[new][0] - seconds[1][0]) / (new - 1)
                    moved = sum(p.nbytes for p in model.parameters()) + rows * (prompt + new / 2) * token_bytes
                    row = {"tokens/s": round(rows / step), "ms a step": 1000 * step}
                    row["of the roofline"] = moved / step / reach
                    if way == "plain" and "recorded" in drawn:
                        alike = [a == b for a, b in zip(drawn["recorded"], drawn["plain"])]
                        row["alike"] = sum(alike) / len(alike)
                    return row

                yield {"dtype": dtype_name, "rows": rows, "steps": way} | attempt(measure)


def step(size):
    """Seconds of a whole step, and its peak memory beyond weights and AdamW's state: sampling, and one update of all
    its completions in one micro-batch, with gradient checkpointing, so that what grows is the head."""
    world, sampling = fsdp.setup(size.device), {}
    for name in DTYPES:
        for chunked in (True, False):
            yield from steps(size, world, name, chunked, sampling)
            clean()
    fsdp.shutdown()


def steps(size, world, dtype, chunked, sampling):
    """The rows of one type and head; `sampling` keeps (dtype, completions) -> numbers, which do not depend on the head.
    After a size that does not fit none larger is tried, and the model is not used again."""
    from train import Config

    V, (prompt, length) = size.model["vocab_size"], size.step_tokens
    model, gathered, decoder = random_model(size), {}, Decoder()
    model.model.checkpointing = True
    fsdp.shard(model, world, "full", DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for count in size.step_rows:
        G = min(count, 8)
        prompts = torch.randint(V, (count // G, prompt)).tolist()
        rows = [
            Row({"prompt_ids": prompts[i // G]}, i // G, i % G, Completion(ids, [-12.0] * length, False), "",
                advantage=(-1.0) ** i)
            for i, ids in enumerate(torch.randint(V, (count, length)).tolist())
        ]  # fmt: skip
        cfg = Config(device=size.device, num_generations=G, max_completion_length=length, chunked_head=chunked,
                     micro_batch_tokens=1 << 60)  # fmt: skip

        def sample():
            with fsdp.unsharded(model, gathered) as plain:
                generate(plain, prompts, G, max_new_tokens=length, kv_bytes=1 << 60, decoder=decoder)

        def update():
            optimizer_step(model, optimizer, rows, cfg, 0)

        def seconds(f):
            return interleaved({"": f}, 1, device=size.device)[""][0]

        if (dtype, count) not in sampling:
            sampling[dtype, count] = attempt(lambda: {"sampling s": seconds(sample)})
        if not optimizer.state:
            attempt(update)  # makes AdamW's state, which is not the step's own
        row = attempt(lambda: {"peak GiB": peak_memory(update, size.device) / GIB, "update s": seconds(update)})
        fits = row.get("failed") != "out of memory"
        row = sampling[dtype, count] | row
        if "failed" not in row:
            row["step s"] = row["sampling s"] + row["update s"]
            row["tokens/s"] = round(count * length / row["step s"])
        yield {"dtype": dtype, "head": "chunked" if chunked else "plain", "completions": count} | row
        if not fits:
            return


PARTS = {"floors": (floors, 0.05), "kernels": (kernels, 0.15), "head": (head, 0.25), "decode": (decode, 0.2),
         "step": (step, 0.25)}  # fmt: skip


def run(args):
    """Runs the parts one after the other. What is known stands in the file at any time."""
    size = toy(args.device) if args.quick or args.device == "cpu" else full(args.device)
    info = machine(args.device) | {package: version(package) for package in ("triton", "trl", "liger-kernel")}
    info["row passes"] = row_passes(args.device)[0]
    print(line(info))
    run_parts(PARTS, size, args.minutes, {"machine": info, "size": size._asdict()}, args.json)
