"""Words to values: what half of all option parsers get wrong, for every flag of train.py's Config."""

import re
from dataclasses import MISSING, fields

import pytest

from cli import check_choice, help_text, parse_flags
from train import PRESETS, Config

BOOLEANS = [f.name for f in fields(Config) if f.type.startswith("bool")]
KINDS = {f.name: f.type.removesuffix(" | None") for f in fields(Config)}


def test_every_flag_takes_its_value_with_dashes_and_underscores():
    samples = {"int": ("3", 3), "float": ("0.25", 0.25), "str": ("word", "word"), "bool": ("true", True)}
    for name, kind in KINDS.items():
        text, value = samples[kind]
        for flag in (name, name.replace("_", "-")):
            assert parse_flags(Config, [f"--{flag}", text]) == {name: value}
            assert parse_flags(Config, [f"--{flag}={text}"]) == {name: value}


@pytest.mark.parametrize("name", BOOLEANS)
def test_every_boolean_reads_yes_and_no_in_all_their_spellings(name):
    """`bool("False")` is True, which switches on what was switched off."""
    for text in ("true", "True", "1", "yes"):
        assert parse_flags(Config, [f"--{name}", text]) == {name: True}
        assert parse_flags(Config, [f"--no-{name}", text]) == {name: False}
    for text in ("false", "False", "FALSE", "0", "no"):
        assert parse_flags(Config, [f"--{name}={text}"]) == {name: False}
    assert parse_flags(Config, [f"--{name}"]) == {name: True}
    assert parse_flags(Config, [f"--{name}", "--seed", "1"]) == {name: True, "seed": 1}
    assert parse_flags(Config, [f"--no-{name.replace('_', '-')}", "--seed", "1"]) == {name: False, "seed": 1}
    for text in ("maybe", "2", "", "None", "tru"):
        with pytest.raises(ValueError, match=f"--{name} '{text}'.*true, false"):
            parse_flags(Config, [f"--{name}={text}"])


@pytest.mark.parametrize("argv, said", [
    (["--learning_rat", "3"], "'--learning_rat'.*did you mean --learning_rate"),
    (["--num-generation", "3"], "did you mean --num_generations"),
    (["--zzz"], "unknown argument '--zzz'"),
    (["sort"], "unknown argument 'sort'"),
    (["-seed", "3"], "unknown argument '-seed'"),
    (["--no-seed", "5"], "unknown argument '--no-seed'"),  # once seed = not 5
    (["--seed", "1.5"], "--seed '1.5': a whole number"),
    (["--seed", "many"], "--seed 'many': a whole number"),
    (["--beta", "small"], "--beta 'small': a number"),
    (["--seed"], "--seed needs a value"),
    (["--model", "--seed", "3"], "--model needs a value"),  # once the model named --seed
    (["--resume", "please"], "--resume 'please'"),
])  # fmt: skip
def test_a_wrong_word_is_named_with_what_would_be_right(argv, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_flags(Config, argv)
    assert "\n" not in str(caught.value)


def test_values_may_be_negative_hold_equals_signs_and_come_twice():
    assert parse_flags(Config, ["--top_k", "-1", "--beta", "-2e-3"]) == {"top_k": -1, "beta": -2e-3}
    assert parse_flags(Config, ["--model=a=b"]) == {"model": "a=b"}
    assert parse_flags(Config, ["--seed", "1", "--seed", "2"]) == {"seed": 2}
    assert parse_flags(Config, []) == {}


def test_a_choice_is_one_of_them_or_an_error_with_the_closest():
    check_choice("kl", "k1", ("k1", "k2"))
    with pytest.raises(ValueError, match=r"--dtype 'float3' is unknown, did you mean float32\? \(choices: float32, bfloat16\)"):
        check_choice("dtype", "float3", ("float32", "bfloat16"))


def test_help_lists_every_flag_with_its_default_and_a_comment():
    """Made from Config's own lines by pattern: a field whose line does not match would be missing in silence."""
    lines = help_text(Config).splitlines()
    for f in fields(Config):
        assert f.default is not MISSING
        line = next((line for line in lines if re.match(rf"  --{f.name} ", line)), None)
        assert line, f.name
        assert KINDS[f.name].upper() in line
        assert len(line.split()) > 3  # says what it is
        if f.default is not None and KINDS[f.name] in ("bool", "str"):
            assert str(f.default) in line
    groups = [line for line in lines if line and not line.startswith(" ")]
    assert len(groups) >= 5


def test_presets_name_flags_and_values_of_their_kind():
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    for preset in PRESETS.values():
        for name, value in preset.items():
            assert type(value) is kinds[KINDS[name]], name
