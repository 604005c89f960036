"""A file of JSON objects, one a line: a user's own problems, and the reader of GSM8K's files.

Here: lines -> rows, with every fault named by file and line. Not here: what is done with the columns; all but `prompt`
reach the reward functions as they are, so that {"prompt": "2+2=", "answer": "4", "level": 1} gives a reward function
`answer` and `level` (rewards.py).

Try it:  python -c "import data; print(data.load_data('problems.jsonl:held_out.jsonl')[1])"
"""

import json
from pathlib import Path

# Names under which a reward function is given something else.
RESERVED = ("prompts", "prompt_ids", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


def rows(path, required=("prompt",)):
    """Yields ("path:line", object) for each line that is not blank. ValueError for a line that is not a JSON object or
    lacks a required key, whose keys are not those of the first line, and for a file without any line."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"data: no file {path}")
    first = None
    with open(path, "rb") as lines:  # bytes: json finds the encoding, and a bad byte becomes an error with its line
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON (cut off?): {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected an object with {', '.join(required)}, found {type(row).__name__}")
            for key in (*required, *(first or row)):
                if key not in row:
                    raise ValueError(f"{where}: the key {key!r} is missing")
            first = first or row
            for key in row:
                if key not in first:
                    raise ValueError(f"{where}: the key {key!r} is not in the first line; all lines need the same keys")
            yield where, row
    if first is None:
        raise ValueError(f"{path}: no lines")


def problems(path):
    """The file's rows as problems; `prompt` is text or a list of messages {"role": str, "content": str}."""
    found = []
    for where, row in rows(path):
        prompt = row["prompt"]
        if isinstance(prompt, list):
            good = prompt and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in prompt
            )
        else:
            good = isinstance(prompt, str) and prompt
        if not good:
            raise ValueError(
                f"{where}: 'prompt' must be text or a list of {{'role': ..., 'content': ...}}, "
                f"not {repr(prompt)[:80]}"
            )
        for key in RESERVED:
            if key in row:
                raise ValueError(f"{where}: the key {key!r} is reserved for what reward functions are given besides")
        found.append(row)
    return found
