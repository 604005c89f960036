"""Parts of a benchmark that cannot spoil each other: a process and a share of the time each, a file written all along.

A part is a generator of rows (dicts). It runs in a process of its own, so that what poisons a CUDA context, runs out of
memory, hangs or is killed costs that part alone. Once its share of the time is spent it starts no new row; what it
leaves goes to the parts after it.
"""

import gc
import json
import multiprocessing
import time
from pathlib import Path

import torch

from benchmarks.measure import table

PATIENCE = 0.09  # share of all the time: how long beyond its own a part may still work on a row before it is killed
PROCESSES = multiprocessing.get_context("forkserver")  # no CUDA context there, so what it forks may have one


def attempt(f):
    """f's numbers, a dict, or in their place why there are none."""
    try:
        return f()
    except torch.OutOfMemoryError:
        result = {"failed": "out of memory"}
    except Exception as error:
        result = {"failed": one_line(error)}
    clean()  # only here does nothing hold the failed call's tensors any more
    return result


def clean():
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def run_parts(parts, size, minutes, report, path):
    """parts: name -> (generator function of `size`, its share of the minutes). Prints a table each; `report` goes to
    `path` with all their rows, and again after every one."""
    clock, shares = time.monotonic(), 0.0
    for name, (part, share) in parts.items():
        shares += share
        rows, ended = [], None
        for message in messages(part, size, clock + 60 * minutes * shares, 60 * minutes * PATIENCE):
            if isinstance(message, str):
                ended = message
            else:
                rows.append(message)
            report.setdefault("parts", {})[name] = {"ended": ended, "rows": rows}
            Path(path).write_text(json.dumps(report, indent=1))
        failed = sum("failed" in row for row in rows)
        print(f"\n{name}: {ended}; {len(rows)} rows" + (f", {failed} of them failed" if failed else "") + "\n")
        if rows:
            columns = dict.fromkeys(key for row in rows for key in row if key != "failed") | dict.fromkeys(["failed"])
            table([{key: row.get(key) for key in columns} for row in rows])
    print(f"\n{time.monotonic() - clock:.0f} s; all numbers in {path}")


def messages(part, size, deadline, patience):
    """The rows of a part, as its process sends them, and last how it ended, a string. deadline: of time.monotonic,
    which all processes of a machine share."""
    receive, send = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=work, args=(send, part, size, deadline, torch.get_num_threads()))
    process.start()
    send.close()
    message = None
    try:
        while not isinstance(message, str):
            late = not receive.poll(max(0.0, deadline + patience - time.monotonic()))
            message = "killed: its time was long over" if late else receive.recv()
            yield message
    except EOFError:
        process.join()
        yield f"died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def work(pipe, part, size, deadline, threads):
    """In the part's process."""
    try:
        torch.set_num_threads(threads)
        for row in part(size):
            pipe.send(row)
            if time.monotonic() > deadline:
                pipe.send("stopped, its share of the time was spent")
                return
        pipe.send("finished")
    except Exception as error:
        pipe.send(one_line(error))
