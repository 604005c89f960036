"""The command line of a dataclass: every field is a flag, its comment is its help.

    learning_rate: float = 1e-6  # the peak      ->     --learning_rate 1e-5, --learning-rate=1e-5, a line of --help

Lives here: words to values, values to help. Not here: which knobs there are (train.py's Config), and what they may be
together.

Try it:  python train.py --help
"""

import difflib
import inspect
import re
from dataclasses import fields


def parse_flags(config_class, argv) -> dict:
    """["--beta", "0.04", "--no-resume", …] -> {field: value}. - and _ are alike; a flag alone is true, --no-flag false.

    ValueError names an unknown flag with its closest, or the value that is of the wrong kind.
    """
    known = {f.name: f.type.removesuffix(" | None") for f in fields(config_class)}
    given, words = {}, list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        negated = known.get(name.removeprefix("no_")) == "bool" and name not in known
        name = name.removeprefix("no_") if negated else name
        if not word.startswith("--") or name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean --{close[0]}?" if close else ""
            raise ValueError(f"unknown argument {word!r}{hint} (--help lists all)")
        if not has_value:
            alone = known[name] == "bool" and (not words or words[0].startswith("--"))
            if not alone and (not words or words[0].startswith("--")):
                raise ValueError(f"--{name} needs a value ({known[name]})")
            value = "true" if alone else words.pop(0)
        value = parse_value(name, known[name], value)
        given[name] = not value if negated else value
    return given


def parse_value(name: str, kind: str, value: str):
    if kind == "bool":
        if value.lower() in ("true", "1", "yes", "false", "0", "no"):
            return value.lower() in ("true", "1", "yes")
        raise ValueError(f"--{name} {value!r}: a yes or no is needed (true, false, 1, 0, yes, no)")
    try:
        if kind == "float" and value.strip().lower().lstrip("+-") == "nan":
            raise ValueError  # float() takes it, and it would pass every check of a range
        return {"int": int, "float": float, "str": str}[kind](value)
    except ValueError:
        raise ValueError(f"--{name} {value!r}: {'a whole number' if kind == 'int' else 'a number'} is needed") from None


def check_choice(what: str, value, choices):
    """ValueError, with the choices and the closest of them, unless `value` is one of them."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"--{what} {value!r} is unknown{hint} (choices: {', '.join(choices)})")


def help_text(config_class) -> str:
    """The fields, in the order and groups of the class's own lines: `# Group`, `name: type = default  # comment`."""
    lines = []
    for line in inspect.getsource(config_class).splitlines():
        if group := re.match(r"    # (.+)", line):
            lines += ["", group[1]]
        elif knob := re.match(r"    (\w+): (.+?) = (.+?)  # (.+)", line):
            name, kind, default, comment = knob.groups()
            flag = f"--{name} {kind.removesuffix(' | None').upper()}"
            lines.append(f"  {flag:36} {comment}" + ("" if default == "None" else f" [{default}]"))
    return "\n".join(lines)
