"""What every test may rely on: the repository's files import by name, and torch keeps to one thread, because tiny
matrices on several threads of a shared machine mostly wait for one another."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)


class Recording(TorchDispatchMode):
    """CUDA graphs on a CPU: every operator with the very tensors it read and wrote, to be run again on those. What
    Python computes while recording (sizes, which tensor an attribute names) is thereby frozen, as in a real graph."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("waits for the device while recording")
        for x, argument in zip(args, function._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                storage = x.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.calls:
            if function._schema.is_mutable:
                function(*args, **kwargs)
            elif not any(r.alias_info for r in function._schema.returns):  # a view is still the same view
                again = function(*args, **kwargs)
                for x, new in zip(*([y] if isinstance(y, torch.Tensor) else y for y in (out, again))):
                    x.copy_(new) if isinstance(x, torch.Tensor) else None


@pytest.fixture
def recorded(monkeypatch):
    """Decoding records and replays, on this CPU. Gives what happened: "record" and "replay" in order."""
    import sample

    events = []

    def record(step, pool):
        assert pool in (None, "the first one's")
        recording = Recording()
        with recording:
            step()
        for storage, before in recording.before.values():  # recording computes nothing
            storage.copy_(before)
        events.append("record")
        return SimpleNamespace(
            replay=lambda: events.append("replay") or recording.replay(), pool=lambda: "the first one's"
        )

    monkeypatch.setattr(sample, "record", record)
    sample.RECORDED.add("cpu")
    yield events
    sample.RECORDED.discard("cpu")
