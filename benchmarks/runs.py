"""Runs of train.py for benchmarks: a model, prompts of an exact length, a reward that costs nothing, no words.

step.py times them, adapters.py weighs them.
"""

import json
import random
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from benchmarks.measure import SMALL, TOY, model_directory
from data.tokenizer import load_tokenizer


def add_arguments(parser):
    parser.add_argument("--model", help="a directory, an alias or a hub id (default: 31.5M parameters, random)")
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--generations", type=int, default=8, help="G, completions of each")
    parser.add_argument("--prompt_tokens", type=int, default=48)
    parser.add_argument("--new_tokens", type=int, default=64)


def odd_share(completion_ids, **_):
    """The reward: a share that differs from row to row and costs nothing."""
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def write_words(directory):
    """A tokenizer for a random model: token i is the word "w<i>"."""
    directory = Path(directory)
    V = json.loads((directory / "config.json").read_text())["vocab_size"]
    words = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(V)}, "unk_token": "w0"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(words))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", "pad_token": "w0"}))


def write_prompts(directory, path, count, length):
    """`count` prompts of exactly `length` tokens, of random words, as a .jsonl file."""
    tokenizer, rng = load_tokenizer(directory), random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            words, held = [], 0
            while held < length:
                word = tokenizer.decode([rng.randrange(tokenizer.vocab_size)]).strip()
                longer = len(tokenizer.encode_prompt(" ".join([*words, word])))
                if word.isascii() and word.isalnum() and held < longer <= length:
                    words, held = [*words, word], longer
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")


def model_and_prompts(args, work, count):
    """(directory of args.model or of a random one, .jsonl file of `count` prompts for it), made in `work`."""
    directory, data = model_directory(args.model, TOY if args.quick else SMALL, work), str(Path(work) / "prompts.jsonl")
    if not args.model:
        write_words(directory)
    write_prompts(directory, data, count, args.prompt_tokens)
    return directory, data


def quiet_run(flags):
    """train.py's Run of these flags, with odd_share as its reward; no token ends a completion."""
    from train import Run, config_from

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # what a run says, and its progress bar
        flags = flags | {"rewards": f"{__file__}:odd_share"}
        run = Run(config_from([f"--{name}={value}" for name, value in flags.items()]))
    run.tokenizer.stop_ids = set()
    return run
