"""Several real processes on one machine, over gloo: what they compute together is what one computes alone."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader

import fsdp
from chunked_kernel import chunked_loss
from lora import add_lora
from model import TINY, ModelConfig, Transformer, load_model, save_model, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = multiprocessing.get_context("forkserver")  # imports this once, then each launch costs a second
PROCESSES.set_forkserver_preload([__name__])


@contextlib.contextmanager
def running(check, ranks, *args):
    """Starts check(world, *args) in that many processes -> (processes, results); kills what is left at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = PROCESSES.SimpleQueue()
    processes = [PROCESSES.Process(target=rank_main, args=(results, check, rank, ranks, port, args))
                 for rank in range(ranks)]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))  # for the fork server's imports
        for process in processes:
            process.start()
    try:
        yield processes, results
    finally:
        for process in processes:
            process.kill()


def launch(check, ranks, *args, limit=60):
    """Runs check(world, *args) in that many processes -> what each returned. What one raises ends all, and is said."""
    returned, deadline = {}, time.monotonic() + limit
    with running(check, ranks, *args) as (processes, results):
        while len(returned) < ranks:
            if results.empty():
                dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
                assert not dead, f"a rank died with exit code {dead[0]}"
                assert time.monotonic() < deadline, f"ranks {set(range(ranks)) - set(returned)} hang after {limit} s"
                time.sleep(0.01)
                continue
            rank, result, error = pickle.loads(results.get())
            assert error is None, f"rank {rank}: {error}"
            returned[rank] = result
        for process in processes:
            process.join(10)
        assert [process.exitcode for process in processes] == [0] * ranks
    return [returned[rank] for rank in range(ranks)]


def rank_main(results, check, rank, ranks, port, args):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    torch.set_num_threads(1)
    try:
        result = check(fsdp.setup("cpu", timeout=30), *args)
        fsdp.shutdown()
        results.put(pickle.dumps((rank, result, None)))
    except BaseException:
        results.put(pickle.dumps((rank, None, traceback.format_exc())))
        raise


def small(**changes) -> ModelConfig:
    """Nothing in it is a multiple of 2 or 4 where it need not be: 13 tokens, width 12, norms of 6 for queries."""
    return ModelConfig.from_dict(TINY | {
        "vocab_size": 13, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 6} | changes)  # fmt: skip


def small_model(seed=0, **changes) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(small(**changes))
    with torch.no_grad():
        for p in model.parameters():  # the usual start hides mistakes in biases, norms and heads
            p.normal_(std=0.3)
    return model


# Six sequences, of 1 to 9 tokens: dealt over 4 ranks one and two each; rows 0, 1 have no token to learn from.
TOKENS = torch.randint(0, 13, (6, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(9) < torch.tensor([0, 0, 4, 9, 1, 6])[:, None]


def train(model, rows, steps=3, micro=1, optimizer=None):
    """A few steps on this rank's rows of the batch, as train.py does: the head inside forward, a global denominator,
    equal numbers of micro-batches -> (losses, gradient norms)."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    tokens, mask = TOKENS[rows], MASK[rows]
    denominator = fsdp.all_sum(float(mask.sum()))
    most = max(fsdp.gather_objects([len(tokens)]))
    losses, norms = [], []
    for _ in range(steps):
        total = 0.0
        for i in range(0, most, micro):
            x, m = tokens[i : i + micro], mask[i : i + micro]
            if not len(x):  # another rank has more: take part with weight 0
                x, m = tokens[:1], torch.zeros_like(mask[:1])

            def head(hidden, weight):
                keep = m[:, 1:].flatten()
                at, to = hidden[:, :-1].flatten(0, 1)[keep], x[:, 1:].flatten()[keep]
                return chunked_loss(at, weight, to, lambda logp, entropy, rows: -logp.sum() / denominator, chunk=4)[0]

            loss = model(x, head=head)
            loss.backward()
            total += loss.item()
        losses.append(fsdp.all_sum(total))
        norms.append(fsdp.clip_grad_norm(model, 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def weights(model) -> dict:
    """name -> whole parameter, on rank 0 (elsewhere empty)."""
    found = {}
    fsdp.export(model, found.update)
    return found


def prepare(kind):
    model = small_model(tie_word_embeddings=kind != "untied", attention_bias=kind == "untied")
    if kind == "lora":
        torch.manual_seed(5)
        add_lora(model, r=3, alpha=6)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.3)
    if kind == "nf4":
        add_lora(model, r=3, alpha=6, base="nf4")
    if kind == "frozen":
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
    if kind == "checkpointing":
        model.model.checkpointing = True
    return model


# ---------------------------------------------------------------------------------------------------------------------


def check_collectives(world):
    assert fsdp.all_sum(float(world.rank + 1)) == sum(range(1, world.size + 1))
    assert isinstance(fsdp.all_sum(world.rank), int)
    x = torch.tensor([1.0, world.rank])
    assert fsdp.all_sum(x).tolist() == [world.size, sum(range(world.size))]
    assert x.tolist() == [1.0, world.rank], "all_sum wrote into its argument"
    items = [f"item {i}" for i in fsdp.deal(5, world)]  # 5 over 2 ranks: an evaluation that counts none twice
    return fsdp.gather_objects(items)


def test_collectives():
    for gathered in launch(check_collectives, 2):
        assert gathered == [f"item {i}" for i in range(5)]


def test_deal_is_even_and_loses_nothing():
    for total, size in [(100, 8), (3, 2), (2, 4), (0, 3)]:
        parts = [fsdp.deal(total, fsdp.World(rank, size, torch.device("cpu"))) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


KINDS = ["tied", "untied", "lora", "nf4", "frozen", "checkpointing"]


def check_training(world, cases):
    found = []
    for kind, mode, micro in cases:
        model = prepare(kind)
        fsdp.shard(model, world, mode, cpu_offload=kind == "untied")
        found.append((*train(model, fsdp.deal(6, world), micro=micro), weights(model)))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_the_same_on_any_number_of_processes(ranks):
    if ranks == 2:
        cases = [(kind, "full", 1) for kind in KINDS] + [("tied", "none", 2), ("lora", "none", 1)]
    else:
        cases = [("tied", "full", 1), ("lora", "full", 1), ("tied", "hybrid", 2), ("untied", "hybrid", 1)]
    on_ranks = launch(check_training, ranks, cases)
    for i, (kind, mode, _) in enumerate(cases):
        model = prepare(kind)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        losses, norms = train(model, slice(None), micro=6)
        assert min(norms) > 0.05 and losses[-1] < losses[0], "the case is too easy: nothing is clipped or learned"
        for rank in range(ranks):
            assert on_ranks[rank][i][0] == pytest.approx(losses, rel=1e-5), (kind, mode)
            assert on_ranks[rank][i][1] == pytest.approx(norms, rel=1e-5), (kind, mode)
            assert on_ranks[rank][i][1] == on_ranks[0][i][1], "the norm must be the same number on every rank"
        after = on_ranks[0][i][2]
        assert list(after) == [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            torch.testing.assert_close(after[name], p.detach(), rtol=1e-5, atol=2e-6, msg=f"{kind} {mode} {name}")
            assert torch.equal(after[name], before[name]) == (not p.requires_grad), (kind, name)


def check_training_in_bf16(world):
    model = prepare("tied")
    fsdp.shard(model, world, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = weights(model)
    train(model, fsdp.deal(6, world), steps=10, optimizer=optimizer)
    after = weights(model)
    with fsdp.unsharded(model) as plain:
        compute = {p.dtype for p in plain.parameters()}
    moved = [(after[name] != before[name]).float().mean().item() for name in after]
    moments = {state["exp_avg"].dtype for state in optimizer.state.values()}
    return compute, {p.dtype for p in after.values()}, moved, moments


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_computes_but_small_steps_still_move_the_weights(ranks, world):
    # In bf16 itself a weight of 0.02 stays 0.02 at a learning rate of 1e-6, step after step.
    found = check_training_in_bf16(world) if ranks == 1 else launch(check_training_in_bf16, ranks)[0]
    compute, master, moved, moments = found
    assert compute == {torch.bfloat16} and master == {torch.float32} and moments == {torch.float32}
    assert min(moved) > 0.9


class OneRow(nn.Module):
    """Two weights in two rows, so that each of two ranks has one."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        self.weight = nn.Parameter(torch.full((2, 1), 0.02))

    def forward(self, slope):
        return (self.weight[:, 0] * slope).sum()


def check_gradient(world):
    slopes = [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 3.0])]  # their sum over ranks is (3, 4)
    model = OneRow()
    fsdp.shard(model, world)
    model(slopes[world.rank]).backward()
    summed = model.weight.grad.full_tensor().flatten().tolist()
    norm = fsdp.clip_grad_norm(model, 1.0)
    clipped = model.weight.grad.full_tensor().flatten().tolist()
    bf16 = OneRow()
    fsdp.shard(bf16, world, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(bf16.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        bf16(torch.tensor([1.0, 1.0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.weight.grad.to_local().fill_(float("nan"))
    return summed, norm, clipped, bf16.weight.full_tensor().flatten().tolist(), fsdp.clip_grad_norm(model, 1.0)


def test_gradients_are_summed_and_clipped_by_their_global_norm():
    for summed, norm, clipped, after, broken in launch(check_gradient, 2):
        assert summed == [3.0, 4.0]  # not averaged: the loss has the global denominator already
        assert norm == 5.0  # not 3 on one rank and 4 on the other
        assert clipped == pytest.approx([0.6, 0.8], rel=1e-6)
        assert after == pytest.approx([0.0198, 0.0198], rel=1e-5)
        assert broken != broken


def check_unsharded(world, kind, mode, dtype):
    model = prepare(kind)
    model.eval()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    fsdp.shard(model, world, mode, dtype)
    train(model, fsdp.deal(6, world), steps=1)
    with torch.no_grad(), fsdp.unsharded(model) as plain:
        assert type(plain) is Transformer and not any(isinstance(m, fsdp.FSDPModule) for m in plain.modules())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules())
        assert plain.lm_head.weight is plain.model.embed_tokens.weight and not plain.training
        assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert {p.dtype for p in plain.parameters()} == {dtype}
        row = TOKENS[:1, :1]
        for _ in range(3 if world.rank == 0 else 40):  # one rank's completions end long before the other's
            row = torch.cat([row, plain(row)[:, -1:].matmul(plain.lm_head.weight.T).argmax(-1)], 1)
        gathered = [p for p in plain.parameters()]
        logits = plain(TOKENS, head=lambda hidden, weight: hidden @ weight.T).float()
    assert all(p.untyped_storage().size() == 0 for p in gathered), "the gathered weights were not freed"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    losses, _ = train(model, fsdp.deal(6, world), steps=1)  # and training goes on
    return row[0].tolist(), logits, losses


@pytest.mark.parametrize("kind, mode, dtype", [("nf4", "full", torch.float32), ("lora", "none", torch.bfloat16)])
def test_ranks_decode_on_their_own_with_the_trained_weights(kind, mode, dtype):
    (short, logits, losses), (long, other, _) = launch(check_unsharded, 2, kind, mode, dtype)
    assert torch.equal(logits, other) and len(short) == 4 and len(long) == 41
    alone = prepare(kind)
    train(alone, slice(None), steps=1, micro=6)
    with torch.no_grad():
        expected = alone(TOKENS, head=lambda hidden, weight: hidden @ weight.T)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert long[:4] == short
    assert losses == pytest.approx(train(alone, slice(None), steps=1, micro=6)[0], rel=tolerance)


def check_kept(world, kind, mode, dtype):
    model, kept, places, head = prepare(kind), {}, [], lambda hidden, weight: hidden @ weight.T
    fsdp.shard(model, world, mode, dtype)
    for _ in range(3):
        with torch.no_grad():
            with fsdp.unsharded(model) as plain:
                expected = plain(TOKENS, head=head)
            with fsdp.unsharded(model, kept) as plain:
                assert type(plain) is Transformer
                assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
                assert {p.dtype for p in plain.parameters()} == {dtype}
                assert torch.equal(plain(TOKENS, head=head), expected)
                assert all(isinstance(p, fsdp.DTensor) for p in model.parameters())  # nothing is gathered twice
                places.append([p.data_ptr() for p in plain.parameters()])
                assert not any(p.requires_grad for p in plain.parameters())
        losses, _ = train(model, fsdp.deal(6, world), steps=1)
    return places, expected, losses


@pytest.mark.parametrize("kind, mode, dtype, ranks", [
    ("nf4", "full", torch.float32, 2), ("lora", "none", torch.bfloat16, 2), ("tied", "full", torch.bfloat16, 1),
    ("untied", "hybrid", torch.float32, 2),
])  # fmt: skip
def test_gathered_weights_may_stay_where_they_are(kind, mode, dtype, ranks, world):
    found = [check_kept(world, kind, mode, dtype)] if ranks == 1 else launch(check_kept, ranks, kind, mode, dtype)
    for places, logits, losses in found:
        assert places[0] == places[1] == places[2]
        assert torch.equal(logits, found[0][1]) and losses == found[0][2]


def test_alone_in_fp32_sharding_changes_nothing(world):
    model = small_model()
    fsdp.shard(model, world)
    assert type(model) is Transformer
    kept = {}
    for arguments in [(), (kept,)]:
        with fsdp.unsharded(model, *arguments) as plain:
            assert plain is model and not kept


def check_loading(world, directory, mode):
    torch.manual_seed(3)
    read = load_model(directory, prepare=lambda model: fsdp.shard(model, world, mode))
    local = sum(p.to_local().numel() for p in read.parameters())
    tiny = load_model("tiny", prepare=lambda model: fsdp.shard(model, world, mode))
    return local, weights(read), weights(tiny)


@pytest.mark.parametrize("ranks, mode", [(3, "full"), (2, "none")])
def test_each_rank_reads_its_own_rows_only(tmp_path, ranks, mode):
    model = small_model(head_dim=2)  # norms of 2 elements: a third rank has none of them
    save_model(model, tmp_path)
    results = launch(check_loading, ranks, str(tmp_path), mode)
    total = sum(p.numel() for p in model.parameters())
    assert sum(local for local, _, _ in results) == total * (1 if mode == "full" else ranks)
    _, read, tiny = results[0]
    for name, p in model.named_parameters():
        assert torch.equal(read[name], p), name
    torch.manual_seed(3)
    for name, p in load_model("tiny").named_parameters():
        assert torch.equal(tiny[name], p), f"{name}: random weights depend on the number of processes"


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def start(kind, world, mode="full"):
    model = prepare(kind)
    fsdp.shard(model, world, mode)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def check_saving(world, run):
    found = {}
    for kind, background in (("tied", True), ("lora", False)):
        model, optimizer = start(kind, world)
        train(model, fsdp.deal(6, world), steps=2, optimizer=optimizer)
        path = f"{run}/{kind}/checkpoints/step_2"
        fsdp.save_checkpoint(path, model, optimizer, {"step": 2, "name": "Füße"}, background=background)
        found[kind] = train(model, fsdp.deal(6, world), steps=2, micro=3, optimizer=optimizer), weights(model)
    return found


def check_resuming(world, run, modes):
    found = {}
    for mode in modes:
        for kind in ("tied", "lora"):
            model, optimizer = start(kind, world, mode)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5 if p.requires_grad else 1)  # what was there must not matter
            path = fsdp.latest_checkpoint(f"{run}/{kind}")
            assert fsdp.load_checkpoint(path, model, optimizer) == {"step": 2, "name": "Füße"}
            trained = train(model, fsdp.deal(6, world), steps=2, micro=6 // world.size, optimizer=optimizer)
            found[mode, kind] = trained, weights(model)
    return found


def test_saved_on_two_ranks_resumed_on_any_number(world, tmp_path):
    saved = launch(check_saving, 2, str(tmp_path))[0]
    names = FileSystemReader(tmp_path / "lora/checkpoints/step_2").read_metadata().state_dict_metadata
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}, "the frozen base was saved too"
    alone = check_resuming(world, str(tmp_path), ["full"])
    two, three = (launch(check_resuming, ranks, str(tmp_path), modes)[0]
                  for ranks, modes in [(2, ["full", "none"]), (3, ["full"])])  # fmt: skip
    for resumed in (alone, two, three):
        for (mode, kind), ((losses, norms), after) in resumed.items():
            (expected_losses, expected_norms), expected = saved[kind]
            tolerance = 0 if resumed is two and mode == "full" else 1e-5
            assert losses == pytest.approx(expected_losses, rel=tolerance)
            assert norms == pytest.approx(expected_norms, rel=tolerance)
            for name in expected:
                torch.testing.assert_close(after[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.fixture
def world():
    yield fsdp.setup("cpu")
    fsdp.shutdown()


def run_of(path, steps, **options):
    """Saves a checkpoint at each of these steps, the step in the first weight and in the state."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, slice(None), steps=1, micro=6, optimizer=optimizer)
    for step in steps:
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        fsdp.save_checkpoint(path / "checkpoints" / f"step_{step:06d}", model, optimizer, {"step": step}, **options)
    return model, optimizer


def shards(path):
    return sorted(path.glob("*.distcp"))[0]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # torch.load would not notice
    path.write_bytes(data)


DAMAGE = {
    "a bit of a shard": lambda path: flip(shards(path)),
    "half a shard": lambda path: os.truncate(shards(path), shards(path).stat().st_size // 2),
    "no shard": lambda path: shards(path).unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "half a state": lambda path: os.truncate(path / "trainer_state.json", 5),
    "no state": lambda path: (path / "trainer_state.json").unlink(),
    "half the checksums": lambda path: os.truncate(path / "checksums.json", 20),
    "an empty directory": lambda path: [file.unlink() for file in path.iterdir()],
    "a name that was never given": lambda path: path.rename(path.with_name(path.name + ".tmp")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over(world, tmp_path, capsys, how):
    model, optimizer = run_of(tmp_path, [999, 1000], keep=2)
    newest = tmp_path / "checkpoints" / "step_001000"
    assert fsdp.latest_checkpoint(tmp_path) == newest and not capsys.readouterr().err
    DAMAGE[how](newest)
    found = fsdp.latest_checkpoint(tmp_path)
    assert found.name == "step_000999" and "step_001000" in capsys.readouterr().err
    assert fsdp.load_checkpoint(found, model, optimizer) == {"step": 999}
    assert model.model.norm.weight.unique().tolist() == [999]


def test_the_newest_is_by_number_and_only_so_many_are_kept(world, tmp_path):
    folder = tmp_path / "checkpoints"
    assert fsdp.latest_checkpoint(tmp_path) is None
    run_of(tmp_path, [1, 9, 10, 11], keep=3)
    assert sorted(os.listdir(folder)) == ["step_000009", "step_000010", "step_000011"]
    (folder / "step_000011").rename(folder / "step_11")
    (folder / "step_000009").rename(folder / "step_9")
    assert fsdp.latest_checkpoint(tmp_path).name == "step_11"  # by name, step_9 would come last
    run_of(tmp_path, [10])  # gone back to 9 and on again: what came after is of another course
    assert sorted(os.listdir(folder)) == ["step_000010", "step_9"]


def test_a_checkpoint_of_any_name_is_saved_and_leaves_those_of_steps_alone(world, tmp_path):
    """"final" beside step_000001 was written, and then died of its name while the old ones were counted."""
    model, optimizer = run_of(tmp_path, [1, 2])
    folder = tmp_path / "checkpoints"
    for name in ("final", "a_b"):
        fsdp.save_checkpoint(folder / name, model, optimizer, {"name": name}, keep=1)
        assert fsdp.load_checkpoint(folder / name, model, optimizer) == {"name": name}
    assert sorted(os.listdir(folder)) == ["a_b", "final", "step_000001", "step_000002"]


def test_saving_a_sharded_model_says_where_it_is_whole(world, tmp_path):
    model = small_model()
    fsdp.shard(model, world, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sharded.*unsharded.*export"):
        save_model(model, tmp_path / "model")


def test_a_checkpoint_of_another_model_is_refused(world, tmp_path):
    run_of(tmp_path, [1])
    other = small_model(intermediate_size=8)
    with pytest.raises(ValueError, match="another model.*layers.0.mlp.down_proj.weight"):
        fsdp.load_checkpoint(tmp_path / "checkpoints/step_000001", other, torch.optim.AdamW(other.parameters()))


def save_for_ever(world, run):
    model, optimizer = start("tied", world)
    for step in range(1, 10_000):
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        path = f"{run}/checkpoints/step_{step}"
        fsdp.save_checkpoint(path, model, optimizer, {"step": step}, background=step % 2 == 0)


def killed_while_saving(run, after):
    """Two ranks save and save until both are killed; what is found then is whole: the step it says."""
    deadline = time.monotonic() + 60
    with running(save_for_ever, 2, str(run)):
        while not (run / "checkpoints" / "step_2").exists():
            assert time.monotonic() < deadline, "the first saves take more than a minute"
            time.sleep(0.01)
        time.sleep(after)
    model, optimizer = start("tied", fsdp.World(0, 1, torch.device("cpu")))
    path = fsdp.latest_checkpoint(run)
    assert fsdp.step_of(path) >= 1
    assert fsdp.load_checkpoint(path, model, optimizer) == {"step": fsdp.step_of(path)}
    assert model.model.norm.weight.unique().tolist() == [fsdp.step_of(path)]


def test_killed_at_any_moment_what_is_found_is_whole(world, tmp_path):
    for i in range(3):
        killed_while_saving(tmp_path / str(i), after=0.11 * i)


@pytest.mark.slow
def test_killed_at_many_moments_what_is_found_is_whole(world, tmp_path):
    for i in range(20):
        killed_while_saving(tmp_path / str(i), after=0.023 * i)


def peak_bytes(run):
    """The most that was allocated at once while run() ran, by the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def check_export(world, directory):
    model = load_model("tiny", prepare=lambda model: fsdp.shard(model, world))
    train(model, fsdp.deal(6, world), steps=1)

    def write(pairs):
        write_checkpoint(directory, model.config, pairs, torch.float32, shard_bytes=2_000_000)

    peak = peak_bytes(lambda: fsdp.export(model, write))
    return peak, sum(p.numel() * 4 for p in model.parameters()), weights(model)


def test_export_streams_to_rank_0(tmp_path):
    (_, size, exported), (peak, _, nothing) = launch(check_export, 2, str(tmp_path))
    # A thread of gloo frees some buffers where the profiler does not see it, so they count until the end.
    assert not nothing and 0 < peak < 0.5 * size, f"rank 1 held {peak} of {size} bytes"
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1  # in pieces, whatever the size of `tiny`
    for name, p in load_model(str(tmp_path)).named_parameters():
        assert torch.equal(p, exported.pop(name)), name
    assert not exported


# ---------------------------------------------------------------------------------------------------------------------
# Starting and failing


def test_bad_values_are_one_clear_line():
    with pytest.raises(ValueError, match="device 'tpu' is not known; known: cpu, cuda"):
        fsdp.setup("tpu")
    with pytest.raises(ValueError, match="mode 'ful' is not known; known: full, hybrid, none"):
        fsdp.shard(small_model(), fsdp.World(0, 1, torch.device("cpu")), "ful")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_without_a_gpu_is_one_clear_line():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        fsdp.setup("cuda")


FAILS = """
import sys, time, fsdp
world = fsdp.setup("cpu")
fsdp.all_sum(1)
if world.rank == 1:
    raise RuntimeError("the reward function of rank 1 failed")
fsdp.all_sum(1)
time.sleep(100)
"""


def test_one_failing_rank_ends_all_with_its_own_error_first(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "fails.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode != 0 and time.monotonic() - began < 50
    errors = [line for line in run.stderr.splitlines() if "Error: " in line]
    assert "the reward function of rank 1 failed" in errors[0], run.stderr
