"""Processes: start them, shard the model over them, gather it for sampling, add up over them, save and resume.

    ZeRO-3 / FSDP:  each of R processes keeps 1/R of every fp32 parameter, its gradient and its optimizer state;
                    a block's weights are gathered in the compute type just before use, its gradient summed after.

ZeRO: Rajbhandari et al., arXiv:1910.02054. FSDP: Zhao et al., arXiv:2304.11277. Built on torch's own `fully_shard`
(FSDP2), DeviceMesh and torch.distributed.checkpoint.

This is the only file that knows there is more than one process: alone, every function here does the obvious thing
without communicating, so the algorithm in train.py has no `if distributed`. Gradients are sums over ranks, never
averages: the loss already carries the global denominator. Not here: what is sampled or trained, and the Hugging Face
format (`export` hands whole tensors to a function that writes them).

Functions marked "collective" must be called by every rank, in the same order.

Try it:  torchrun --nproc_per_node 2 fsdp.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

# ---------------------------------------------------------------------------------------------------------------------
# Processes


class World(NamedTuple):
    rank: int
    size: int
    device: torch.device


def launched() -> tuple[int, int]:
    """Rank and number of processes as torchrun says, or of one alone; known before setup."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if "RANK" in os.environ else (0, 1)


def launcher() -> list[str]:
    """The words in front of a script that start it on as many processes again, as far as a process can tell."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return ["python"]
    here, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nodes = ["--nnodes", str(world // here)] if world > here else []
    return ["torchrun", *nodes, "--nproc_per_node", str(here)]


def setup(device: str | None = None, timeout: float = 600.0) -> World:
    """Joins the processes that torchrun started, or stands alone; nccl (and gloo for what is on the CPU) with GPUs.

    device   "cpu" or "cuda"; None takes the GPU if there is one. Process i of a machine takes its GPU i.
    timeout  seconds after which a collective that not every rank has joined is an error.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not known; known: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch sees no GPU on this machine (no driver, or a CPU build); use cpu")
    (rank, size), local = launched(), int(os.environ["LOCAL_RANK"]) if "RANK" in os.environ else 0
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"process {local} of this machine has no GPU: it has {gpus}; use --nproc_per_node {gpus}")
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=None if "RANK" in os.environ else dist.HashStore(),  # alone: no port, no network
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    return World(rank, size, torch.device(device, local if device == "cuda" else None))


def shutdown():
    """Collective: leaves together, after a run that went well. After an error just exit: torchrun ends the others."""
    global saving_group
    wait_for_save()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        saving_group = None


def alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def is_first() -> bool:
    return alone() or dist.get_rank() == 0


def barrier(group=None):
    if not alone():
        dist.barrier(group)


def all_sum(x):
    """Collective. A tensor or a number -> its sum over ranks, the same on each; a new object unless alone."""
    if alone():
        return x
    if isinstance(x, torch.Tensor):
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
    total = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)
    dist.all_reduce(total)
    return total.item()


def gather_objects(items: list, group=None) -> list:
    """Collective. A list of Python objects -> the lists of all ranks one after the other, in rank order, on each."""
    if alone():
        return items
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items, group)
    return [item for part in parts for item in part]


def deal(total: int, world: World) -> range:
    """Which of `total` global indices are this rank's: consecutive, disjoint, together all, sizes differing by one at
    most. gather_objects of what the ranks make of them is in global order again."""
    return range(total * world.rank // world.size, total * (world.rank + 1) // world.size)


@contextmanager
def stop_signals():
    """SIGTERM (a scheduler that needs the machine) and SIGINT ask for a stop; a second one ends the process at once.

    Second is what comes more than a second later: Slurm asks every process, and torchrun passes on what it was asked.

    Gives a function, collective: True once any rank has been asked.
    """
    asked = []

    def ask(number, frame):
        if asked:
            if time.monotonic() > asked[0] + 1:
                os._exit(128 + number)
            return
        asked.append(time.monotonic())
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: stopping after this step, with a checkpoint; once more stops at once\n".encode())

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: all_sum(len(asked)) > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters and gradients


def shard(model, world: World, mode: str = "full", dtype=torch.float32, cpu_offload: bool = False):
    """Shards a Transformer in place, by block and root, on the meta device or with its weights; then call it as before.

    mode   full    over all ranks.
           hybrid  inside each machine; machines hold copies. Gradients cross machines once, weights never.
           none    every rank holds a copy; only gradients are communicated.
    dtype  of the weights that compute and of activations. Masters, their gradients, the sums over ranks and the
           optimizer stay in the parameters' own type, fp32.
    cpu_offload  masters, gradients and optimizer state live in CPU memory between uses.
    Apply it last, after adapters, activation checkpointing and compiling. A single process in fp32 has nothing to
    gather, reduce or cast, so there the model stays as it is (FSDP would copy every weight in each pass).
    """
    if mode not in ("full", "hybrid", "none"):
        raise ValueError(f"shard mode {mode!r} is not known; known: full, hybrid, none")
    if world.size == 1 and dtype == torch.float32 and not cpu_offload:
        return
    if mode == "full":
        mesh = init_device_mesh(world.device.type, (world.size,))
    else:
        inside = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) if mode == "hybrid" else 1
        if world.size % inside:
            raise ValueError(f"shard mode hybrid: {world.size} ranks are no multiple of the {inside} of this machine")
        mesh = init_device_mesh(world.device.type, (world.size // inside, inside), mesh_dim_names=("copy", "shard"))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=mode != "none", **options)
    fully_shard(model, **options)  # embedding, last norm and head: a tied head is one parameter of one group
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP averages over ranks; both are needed for a plain sum on gloo and nccl alike.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def unsharded(model, kept: dict | None = None):
    """Collective. The model as a plain module over weights gathered once in the compute type, freed afterwards.

    What it gives has no hooks and never communicates, so each rank may decode as many steps as it likes. It shares
    buffers and gathered parameters with the model: for reading, under no_grad. An unsharded model is given as it is.

    kept   a dict of the caller's, filled with the gathered weights by name. These are not freed, and lie where they lay
           the next time: what was recorded over them (CUDA graphs) stays valid.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded and kept is not None:
        yield gathered_into(kept, model, sharded)
        return
    for module in sharded:
        module.unshard()
    try:
        yield without_hooks(model, {}) if sharded else model
    finally:
        for module in sharded:
            module.reshard()


@torch.no_grad()
def gathered_into(kept: dict, model, sharded: list) -> nn.Module:
    """Collective. A plain module over the tensors of `kept`, which take the weights of one FSDP module at a time."""
    for module in sharded:
        module.unshard()
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):  # of this module; those of all others are shards
                if name not in kept:
                    kept[name] = nn.Parameter(torch.empty_like(p), requires_grad=False)
                kept[name].copy_(p)
        module.reshard()
    plain, names = without_hooks(model, {}), {p: name for name, p in model.named_parameters()}
    for module in plain.modules():
        module._parameters.update({key: kept[names[p]] for key, p in module._parameters.items() if p is not None})
    return plain


HOOKS_AND_CHILDREN = {*vars(nn.Module()), "_compiled_call_impl"} - {"training", "_non_persistent_buffers_set"}


def without_hooks(module: nn.Module, done: dict) -> nn.Module:
    """A copy of the module tree, of any classes, over the same parameters, buffers and attributes."""
    if module not in done:
        kind = type(module)
        if isinstance(module, FSDPModule):
            kind = kind.__mro__[2]  # fully_shard makes class FSDPBlock(FSDPModule, Block) of a Block
        done[module] = plain = kind.__new__(kind)
        nn.Module.__init__(plain)
        vars(plain).update({key: value for key, value in vars(module).items() if key not in HOOKS_AND_CHILDREN})
        plain._parameters.update(module._parameters)
        plain._buffers.update(module._buffers)
        plain._modules.update({name: without_hooks(child, done) for name, child in module._modules.items()})
    return done[module]


@torch.no_grad()
def clip_grad_norm(model, max_norm: float) -> float:
    """Collective. The 2-norm of all gradients over all ranks, the same on each; above max_norm, scales them down to it.

    A norm that is NaN or infinite is returned and the gradients are left alone: do not step.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    # Under "hybrid" and "none" the ranks hold each element several times, and the sum over ranks counts it as often.
    mesh = grads[0].device_mesh if grads and isinstance(grads[0], DTensor) else None
    copies = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    squares = torch.stack(torch._foreach_norm(grads)).double().square().sum().item() if grads else 0.0
    norm = (all_sum(squares) / copies) ** 0.5
    if max_norm < norm < float("inf"):
        torch._foreach_mul_(grads, max_norm / norm)
    return norm


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: run_dir/checkpoints/step_000100/ holds torch.distributed.checkpoint's shards, trainer_state.json, and
# checksums.json, written last, with a checksum of every other file (torch.load does not notice a flipped bit).

SAVER = ThreadPoolExecutor(1)
COPY = StagingOptions(*[False] * 4)  # a plain copy, finished when async_save returns; no pinned or shared memory
saving: Future | None = None  # the save that goes on in the background
saving_group = None


def save_checkpoint(directory, model, optimizer, state: dict, keep: int = 2, background: bool = False):
    """Collective. Saves trainable parameters, optimizer state and `state` (what JSON can say) as `directory`.

    Written under a temporary name, synced to disk, and renamed once every rank's part is there: what has its name is
    whole. Then, if it is called step_N, all but the `keep` newest step_* beside it are removed, and any of a later
    step, which this run has gone back behind.
    Frozen parameters are not saved: they come again from where they came from. Persistent buffers are.
    background  returns once everything is copied to CPU memory, and writes while training goes on. The next save and
                shutdown wait for it; they raise what went wrong.
    """
    global saving, saving_group
    wait_for_save()
    directory = Path(directory)
    unfinished = directory.with_name(directory.name + ".tmp")
    if is_first():
        directory.parent.mkdir(parents=True, exist_ok=True)
        for stale in directory.parent.glob("step_*.tmp"):
            shutil.rmtree(stale)
    barrier()
    names = {p: name for name, p in model.named_parameters()}
    moments = {f"{key}.{names[p]}": value for p, values in optimizer.state.items() for key, value in values.items()}
    tensors, writer = {"model": own_tensors(model), "optimizer": moments}, dcp.FileSystemWriter(unfinished)

    def finish(write, group=None):
        try:
            write()
            commit(unfinished, directory, state, keep, group)
        except (CheckpointException, OSError) as error:  # torch's holds what each rank raised, with tracebacks
            causes = [f"rank {rank}: {cause}" for rank, (cause, _) in getattr(error, "failures", {}).items()]
            raise OSError(f"{directory} cannot be saved: {causes[0] if causes else error}") from None

    if not background:
        finish(partial(dcp.save, tensors, storage_writer=writer))
        return
    if saving_group is None:  # its messages must not mix with those of training
        saving_group = dist.new_group(backend="gloo")
    places = {"storage_writer": writer, "process_group": saving_group, "async_stager": DefaultStager(COPY)}
    written = dcp.async_save(tensors, **places)
    saving = SAVER.submit(finish, written.result, saving_group)


def commit(unfinished: Path, directory: Path, state: dict, keep: int, group=None):
    """What turns written shards into a checkpoint: checksums, the trainer's state, and the name."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    checksums = gather_objects([(path.name, checksum(path)) for path in unfinished.glob(f"__{rank}_*")], group)
    if is_first():
        write_json(unfinished / "trainer_state.json", state)
        checksums += [(name, checksum(unfinished / name)) for name in (".metadata", "trainer_state.json")]
        write_json(unfinished / "checksums.json", dict(checksums))
        sync_directory(unfinished)
        if directory.exists():
            retire(directory)
        unfinished.rename(directory)
        sync_directory(directory.parent)
        if re.fullmatch(r"step_\d+", directory.name):
            found = newest_first(directory.parent)
            earlier = [path for path in found if step_of(path) <= step_of(directory)]
            for path in set(found) - set(earlier[:keep]):
                retire(path)
    barrier(group)


def wait_for_save():
    """Until a save in the background is done; raises what went wrong in it."""
    global saving
    if saving is not None:
        done, saving = saving, None
        done.result()


def own_tensors(model) -> dict:
    """What of the model a checkpoint holds, by name: trainable parameters and persistent buffers."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    kept = model.state_dict().keys()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def load_checkpoint(directory, model, optimizer) -> dict:
    """Collective. Reads what save_checkpoint wrote, on any number of ranks, into model and optimizer; returns `state`.

    ValueError where the checkpoint is of another model. Its files are taken as whole: latest_checkpoint checks them.
    """
    directory = Path(directory)
    reader = dcp.FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    tensors = own_tensors(model)
    shapes = {key.removeprefix("model."): entry.size for key, entry in saved.items() if key.startswith("model.")}
    differing = [name for name in sorted(shapes.keys() | tensors.keys())
                 if name not in tensors or shapes.get(name) != tensors[name].shape]  # fmt: skip
    if differing:
        raise ValueError(
            f"{directory} was saved from another model: {len(differing)} tensors are missing here or there or differ "
            f"in shape, the first is {differing[0]}"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments, states = {}, {p: {} for p in parameters}
    for key, entry in saved.items():
        if key.startswith("optimizer."):
            _, kind, name = key.split(".", 2)
            p, dtype = model.get_parameter(name), entry.properties.dtype
            empty = torch.empty_like(p, dtype=dtype) if entry.size == p.shape else torch.empty(entry.size, dtype=dtype)
            moments[f"{kind}.{name}"] = states[p][kind] = empty
    dcp.load({"model": tensors, "optimizer": moments}, storage_reader=reader)
    optimizer.load_state_dict({
        "state": {i: states[p] for i, p in enumerate(parameters) if states[p]},
        "param_groups": optimizer.state_dict()["param_groups"],
    })  # fmt: skip
    return json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))


def latest_checkpoint(run_dir) -> Path | None:
    """Collective. The whole checkpoint of run_dir with the highest step, or None; says which it passed over, and why.

    Every file is read once for its checksum, each rank its share.
    """
    folder = Path(run_dir) / "checkpoints"
    found = gather_objects([newest_first(folder, r"step_\d+(\.tmp)?") if is_first() else None])[0]
    rank, size = (0, 1) if alone() else (dist.get_rank(), dist.get_world_size())
    for path in found:
        problems = []
        try:
            if path.suffix == ".tmp":
                raise ValueError("its saving was interrupted")
            checksums = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
            problems += [f"{name} is damaged" for name, expected in sorted(checksums.items())[rank::size]
                         if checksum(path / name) != expected]  # fmt: skip
        except FileNotFoundError as error:
            problems.append(f"{Path(error.filename).name} is missing")
        except (OSError, ValueError, AttributeError) as error:
            problems.append(str(error))
        problems = gather_objects(problems)
        if not problems:
            return path
        if is_first():
            print(f"passing over {path}: {problems[0]}", file=sys.stderr)
    return None


def step_of(path: Path) -> int:
    return int(path.name.split("_")[1].split(".")[0])


def newest_first(folder: Path, pattern: str = r"step_\d+") -> list[Path]:
    """The checkpoints in folder by number: step_1000 comes before step_999."""
    names = (path for path in folder.glob("step_*") if re.fullmatch(pattern, path.name))
    return sorted(names, key=step_of, reverse=True)


def retire(path: Path):
    """Removes a checkpoint; interrupted halfway it is no longer under its name."""
    path.rename(path.with_name(path.name + ".old.tmp"))
    shutil.rmtree(path.with_name(path.name + ".old.tmp"))


def write_json(path: Path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            value = zlib.crc32(piece, value)
    return value


@torch.no_grad()
def export(model, write: Callable):
    """Collective. Rank 0 calls write(pairs) with (name, whole CPU tensor) of each parameter, a tied one once.

    Only one parameter is whole at a time, and on rank 0 only; the others send their rows.
    """
    pairs = whole_parameters(model)
    if is_first():
        write(pairs)
    else:
        for _ in pairs:
            pass
    barrier()


def whole_parameters(model):
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            yield name, p.detach().cpu()
            continue
        group, ranks = p.device_mesh.get_group(-1), p.device_mesh.size(-1)
        if p.device_mesh.ndim == 2 and p.device_mesh.get_local_rank(0) > 0:
            continue  # a copy of what the ranks with rank 0 hold
        rows = -(-p.shape[0] // ranks)  # equal parts, the last ones filled up
        part = torch.zeros(rows, *p.shape[1:], dtype=p.dtype)
        part[: len(p.to_local())] = p.to_local()
        parts = [torch.empty_like(part) for _ in range(ranks)] if is_first() else None
        dist.gather(part, parts, dst=0, group=group)
        if is_first():
            yield name, torch.cat(parts)[: p.shape[0]]


def main():
    """Shows what each rank holds of the tiny model, and that the gathered model answers on its own."""
    from model import load_model

    world = setup()
    torch.manual_seed(0)
    model = load_model("tiny", device=world.device, prepare=lambda model: shard(model, world))
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    with unsharded(model) as plain, torch.no_grad():
        hidden = plain(torch.ones(1, 4 + world.rank, dtype=torch.long, device=world.device))
    for line in gather_objects([f"rank {world.rank} of {world.size} on {world.device}: {local:,} parameters, "
                                f"hidden states {tuple(hidden.shape)}"]):  # fmt: skip
        if world.rank == 0:
            print(line)
    shutdown()


if __name__ == "__main__":
    main()
