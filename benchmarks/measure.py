"""How everything here is measured: contestants that take turns, counted memory, matmul routes, a table.

Whatever is compared takes turns, round after round in one run, so that a busy or throttled machine slows all alike; a
first round warms up and is dropped. A peer that is a whole program takes its turns in a process of its own. Peak memory
is counted, not sampled: on CPU every allocation that torch.profiler reports (it sees temporaries inside an operator,
not a BLAS library's own workspace), on CUDA what the caching allocator says.
"""

import importlib.metadata
import importlib.util
import json
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from cpu import fast_cpu_matmul
from model import ModelConfig, Transformer, find_checkpoint, save_model

MIB = 2**20
# 31.5 million parameters in Qwen3's proportions, 18.9 of them the embedding, which is the head, too.
SMALL = {
    "model_type": "qwen3", "vocab_size": 49152, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
TOY = SMALL | {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


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

    def use(self, name):
        if self.names != ["default"]:
            self.switch.fp32_precision = self.settings[name]

    def on(self, name, f):
        """f, to be called on that route."""

        def call():
            self.use(name)
            f()
            self.use("default")

        return call


class Elsewhere:
    """A peer in a process of its own, where whatever ours switches on in this one (matmul route, allocator) stays off,
    and where threads are its alone: two pools in one process keep each other from waiting awake.

    target(turns, *args) runs there: turns.begin() waits for a call of this object and gives its arguments, turns.end(x)
    is what the call returns. Between its turns it sleeps.
    """

    def __init__(self, target, *args):
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=play, args=(other, target, args), daemon=True)
        self.process.start()
        other.close()

    def __call__(self, *arguments):
        self.connection.send(arguments)
        error, result = self.connection.recv()
        if error:
            raise RuntimeError(error)
        return result

    def close(self):
        self.connection.close()
        self.process.join()


class Turns:
    def __init__(self, connection):
        self.connection = connection

    def begin(self):
        try:
            return self.connection.recv()
        except EOFError:
            raise SystemExit from None

    def end(self, result=None):
        if torch.cuda.is_initialized():  # the turn lasts until the device is done
            torch.cuda.synchronize()
        self.connection.send((None, result))


def play(connection, target, args):
    try:
        target(Turns(connection), *args)
    except Exception as error:
        connection.send((f"{type(error).__name__}: {error}", None))
        raise


def model_directory(name, config, temporary):
    """Where the checkpoint `name` is; without a name, a model of this config with random weights is written first."""
    if name:
        return find_checkpoint(name)
    torch.manual_seed(0)
    model = Transformer(ModelConfig.from_dict(config))
    model.init_weights()
    save_model(model, Path(temporary) / "model")
    return str(Path(temporary) / "model")


def version(package):
    """Its version where it is installed, else None."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package.replace("-", "_")) else None


def machine(device):
    name = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def ratios(a, b):
    """Median, lowest and highest of a/b, paired round by round."""
    paired = [x / y for x, y in zip(a, b)]
    return statistics.median(paired), min(paired), max(paired)


def cached_numbers(config):
    """Of keys and values, a token, over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def line(info):
    """A dict as one line."""
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())


def table(rows):
    """Prints dicts with the same keys as a Markdown table."""
    cells = [list(rows[0])] + [["" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in r.values()]
                               for r in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells)]
    for i, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
