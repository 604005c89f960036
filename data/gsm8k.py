"""GSM8K, grade school mathematics in words (Cobbe et al., Training Verifiers to Solve Math Word Problems, 2110.14168).

Here: where the two files come from, and how a row of theirs becomes a problem. Not here: reading lines (data/jsonl.py),
judging an answer (rewards.py: correctness and the four beside it, gsm8k_number).

Columns: prompt (a system and a user message), answer (str), question (str). The gold answer is what follows `####` in
the worked solution, without the thousands commas that 79 train and 14 test rows write, so that "5,600" is "5600" both
for `correctness`, which compares text, and for `gsm8k_number`, which compares numbers.

Try it:  python -c "import data; print(data.load_data('gsm8k')[0][0])"
"""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

# The authors' files (MIT licence) at a fixed commit. The environment variable NANOGRPO_GSM8K_URL names a mirror.
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
URL = f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data"
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}

SYSTEM_PROMPT = """\
Solve the problem step by step. Write your whole reply in exactly this form, each tag on a line of its own:
<reasoning>
your working
</reasoning>
<answer>
the final number, nothing else
</answer>"""


# Worked examples as earlier turns of the chat, ours, not GSM8K's: (question, working, answer).
SHOTS = [
    ("Tom has 3 bags of 4 apples and eats 2. How many apples are left?",
     "3 bags of 4 apples are 3 * 4 = 12 apples. He eats 2, so 12 - 2 = 10 are left.", "10"),
    ("A pen costs $2 and a book costs $7. What do 3 pens and a book cost?",
     "3 pens cost 3 * 2 = 6 dollars. With the book that is 6 + 7 = 13 dollars.", "13"),
    ("Ann runs 5 miles a day. How far does she run in a week?",
     "A week has 7 days. She runs 5 * 7 = 35 miles.", "35"),
]  # fmt: skip


def problem(row, where, few_shot=0):
    """A row {"question", "answer"} of the files -> a problem, after `few_shot` worked examples (a model that never hits
    the format by chance has nothing to learn from). `where`, its file and line, stands in errors."""
    if not 0 <= few_shot <= len(SHOTS):
        raise ValueError(f"few_shot is {few_shot}, but must be from 0 to {len(SHOTS)}, the worked examples there are")
    if "####" not in row["answer"]:
        raise ValueError(f"{where}: 'answer' has no '####' with the final answer after it")
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    for question, working, answer in SHOTS[:few_shot]:
        reply = f"<reasoning>\n{working}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {
        "prompt": messages + [{"role": "user", "content": row["question"]}],
        "answer": row["answer"].split("####")[1].strip().replace(",", ""),
        "question": row["question"],
    }


def files(directory=None):
    """Paths of train.jsonl and test.jsonl: in `directory` (as they are, also shortened or your own), or the originals,
    downloaded once to ~/.cache/nanogrpo/gsm8k (XDG_CACHE_HOME honoured).

    Raises ValueError for a directory without them or a download with the wrong sha256, ConnectionError where there is
    no network.
    """
    if directory is None:
        return [fetch(name) for name in SHA256]
    paths = [Path(directory).expanduser() / name for name in SHA256]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"gsm8k: no {path}; the directory must hold {' and '.join(SHA256)}")
    return paths


def fetch(name):
    """The cached path of file `name`, downloaded if it is not there or not whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanogrpo" / "gsm8k"
    path = cache / name
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]:
        return path
    url = f"{os.environ.get('NANOGRPO_GSM8K_URL', URL).rstrip('/')}/{name}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"gsm8k: {url} is not downloadable now ({error}); go online once, or give --data gsm8k:DIRECTORY "
            f"with {' and '.join(SHA256)} in it"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"gsm8k: {url} has sha256 {found}, expected {SHA256[name]}; nothing was kept")
    cache.mkdir(parents=True, exist_ok=True)
    part = cache / f".{name}.{os.getpid()}"  # every rank may come here at once; whoever renames last changes nothing
    part.write_bytes(content)
    part.replace(path)
    return path
