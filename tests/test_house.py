"""The house rules that no single file can hold: who imports whom, and that what README and headers say can be done."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

import loss
import rewards
from train import config_from

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("benchmarks/*.py")])
LEAVES = ["model.py", "sample.py", "rewards.py", "loss.py", "chunked_kernel.py", "lora.py", "fsdp.py", "cli.py", "cpu.py",
          "plot.py", *(f"data/{path.name}" for path in ROOT.glob("data/*.py"))]  # fmt: skip
SIBLINGS = {path.stem for path in ROOT.glob("*.py")} | {"data", "benchmarks"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def imported(nodes):
    """Names of all modules that these syntax nodes import: "data.tokenizer", "torch.nn"."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def on_loading(tree):
    """The nodes that run when the module is imported: all but what stands in functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node)
                    if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]  # fmt: skip


def roots(names):
    return {name.partition(".")[0] for name in names}


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_import_no_sibling(name):
    """A leaf can be read, copied and tested alone. Its command line, a function, may import what it shows."""
    found = imported(on_loading(parse(ROOT / name)))
    if name == "data/__init__.py":
        found = {module for module in found if module.partition(".")[0] != "data"}  # its own tasks
    assert roots(found) & SIBLINGS == set()


def test_the_rule_finds_what_it_forbids():
    text = "try:\n    from data.tokenizer import x\nexcept ImportError:\n    import model as m\ndef main():\n    import train\n"
    assert roots(imported(on_loading(ast.parse(text)))) & SIBLINGS == {"data", "model"}


def test_nobody_imports_train():
    for path in FILES:
        if path.parent.name != "benchmarks":  # plan.py's command line, a function, takes train.py's flags
            nodes = on_loading(parse(path)) if path.name == "plan.py" else ast.walk(parse(path))
            assert "train" not in roots(imported(nodes)), path.name


def test_no_framework_does_the_work():
    """transformers, TRL and the rest are what this is measured against: only where they are, and when asked."""
    forbidden = {"transformers", "trl", "vllm", "accelerate", "peft", "datasets", "deepspeed", "liger_kernel", "bitsandbytes"}
    for path in FILES:
        tree = parse(path)
        assert roots(imported(on_loading(tree))) & forbidden == set(), path.name
        if path.parent.name != "benchmarks" and path.name != "check_loss.py":  # comparisons, in functions of their own
            assert roots(imported(ast.walk(tree))) & forbidden == set(), path.name
    needed = (ROOT / "requirements.txt").read_text().split()
    assert not {re.split(r"[<>=\[;]", word)[0] for word in needed} & forbidden


def test_every_file_introduces_itself_and_says_how_to_try_it():
    for path in FILES:
        text = ast.get_docstring(parse(path))
        assert text, path.name
        assert len(text) < 4500 and (path.parent.name in ("data", "benchmarks") or re.search(r"(python|torchrun|pytest) ", text)), path.name


def test_there_is_no_drawer_for_everything():
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]


# ---------------------------------------------------------------------------------------------------------------------
# README


def commands(text):
    """Every command line of a text: what stands after `python`, `torchrun`, `pip` or `pytest` at a line's start."""
    for line in text.splitlines():
        line = re.sub(r"\s+#\s.*", "", line.strip())
        line = re.sub(r"^Try(?: it)?:\s+", "", line)
        if re.match(r"(python|torchrun|pip|pytest)( |$)", line):
            for command in line.split("&&"):
                try:
                    yield shlex.split(re.sub(r"\s{2,}\(.*", "", command))
                except ValueError:
                    pytest.fail(f"not a command: {command}")


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """README's Python blocks as the files that its commands name."""
    monkeypatch.chdir(tmp_path)
    for block in python_blocks():
        for mark, name in [("@register(", "my_loss.py"), ("def my_fn(", "my_rewards.py")]:
            if mark in block:
                (tmp_path / name).write_text(block)
    before = dict(loss.LOSSES)
    yield tmp_path
    loss.LOSSES.clear()
    loss.LOSSES.update(before)


def check_command(words):
    if words[0] == "pip":
        files = [word for flag, word in zip(words, words[1:]) if flag == "-r"]
        assert files and all((ROOT / file).is_file() for file in files), words
    elif words[0] != "pytest" and "-c" not in words and "-m" not in words:
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        assert at is not None and (ROOT / words[at]).is_file(), words
        flags = words[at + 1 :]
        if words[at] == "train.py":
            if "--help" not in flags:
                config_from(flags)
        else:
            source = (ROOT / words[at]).read_text(encoding="utf-8")
            source += (ROOT / "check_loss.py").read_text(encoding="utf-8") if words[at] == "loss.py" else ""
            if words[at] == "bench.py":
                source += (ROOT / "benchmarks" / f"{words[at + 1]}.py").read_text(encoding="utf-8")
            for flag in flags:
                assert not flag.startswith("--") or flag.partition("=")[0] in source, f"{words[at]} knows no {flag}"


def test_every_command_of_the_readme_can_be_typed(examples):
    found = list(commands(README))
    for words in found:
        check_command(words)
    assert len([words for words in found if "train.py" in words]) >= 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_of_a_header_can_be_typed(path, examples):
    for words in commands(ast.get_docstring(parse(path))):
        check_command(words)


def test_the_check_refuses_what_cannot_be_typed():
    for line in ("torchrun train.py --modell tiny", "python trane.py", "pip install -r nothing.txt", "python plot.py --nothing x",
                 "torchrun train.py --loss_type dpao", "torchrun --nproc_per_node 2 train.py --num_generations 1"):  # fmt: skip
        (words,) = commands(f"    {line}   # a comment")
        with pytest.raises((AssertionError, ValueError)):
            check_command(words)


def test_the_first_screen_has_the_two_commands_and_ci_runs_the_second():
    top = README.split("\n## ")[0].splitlines()
    shown = [line.strip() for line in top if line.startswith("    ") and line.strip()]
    assert shown == ["pip install -r requirements.txt && torchrun train.py", "pip install -r requirements-dev.txt && pytest"]
    assert len(top) < 40
    assert shown[1] in (ROOT / ".ci" / "run").read_text()


def test_every_file_the_readme_names_exists():
    names = set(re.findall(r"`([\w./-]+\.(?:py|txt|toml|sh))`", README))
    names = {name for name in names if not name.startswith("my")}
    assert {"train.py", "loss.py", "model.py"} <= names
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "data" / name).exists(), name
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_file_is_in_the_readmes_table():
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in table, path.name


def test_the_readmes_reward_gets_what_it_names(examples):
    loaded = rewards.load_rewards("my_rewards.py:my_fn:0.5")
    chats = [[{"role": "assistant", "content": text}] for text in ("it is 4", "it is 5")]
    values = rewards.score(loaded, ["2+2="] * 2, chats, [[1], [2]], {"answer": ["4", "4"]})
    assert values.tolist() == [[1.0], [0.0]]


def test_the_readmes_loss_is_a_variant_that_passes_the_check(examples):
    variant = loss.find_loss("my_loss.py:mine")
    assert variant.pointwise and variant.aggregate == "tokens"
    cfg = loss.LossConfig(loss_type="my_loss.py:mine")
    logp, old = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.0, -3.0]])
    value, _ = loss.policy_loss(cfg, logp, old, None, torch.tensor([1.0]), torch.ones(1, 2), 2)
    assert value.item() == pytest.approx(-(1 + 2) / 2)  # e capped at 2


def test_every_metric_of_the_glossary_is_written_somewhere():
    """A name that the code no longer writes is a promise of the README that nobody keeps."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    glossary = re.findall(r"^\| (`[^|]+) \|", README.split("## What a run writes")[-1].split("\n## ")[0], re.MULTILINE)
    names = [name for row in glossary for name in re.findall(r"`([\w/@]+)`", row) if not name.startswith("/")]
    assert len(names) > 10
    for name in names:
        assert re.sub(r"/NAME/mean$|@k$|_$", "", name) in code, name
