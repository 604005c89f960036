"""A run's directory and its voice: metrics.jsonl, samples.jsonl, the progress bar, the last words.

    runs/NAME/  config.json   metrics.jsonl (one object a step)   samples.jsonl   plot.png   checkpoints/   model/

Lives here: what is written and printed, by the first process only; on the others every call does nothing. Not here:
what the numbers mean (train.py, loss.py), checkpoints (fsdp.py), drawing (plot.py).

Try it:  python plot.py runs/tiny-sort-1
"""

import json
import math
import re
from pathlib import Path

from tqdm import tqdm


def choose_directory(output_dir, model: str, data: str, resume: bool) -> Path:
    """As asked, else runs/MODEL-DATA-N with the first free number N, or to resume the last one taken.

    ValueError where a run would write over another.
    """
    if output_dir:
        if (Path(output_dir) / "metrics.jsonl").exists() and not resume:
            raise ValueError(f"{output_dir} holds a run already: --resume it, or choose another --output_dir")
        return Path(output_dir)
    name = re.sub(r"[^\w.-]+", "-", f"{Path(model).name}-{data.replace('.jsonl', '')}").strip("-")
    taken = [int(path.name.rpartition("-")[2]) for path in Path("runs").glob(f"{name}-*")
             if re.fullmatch(re.escape(name) + r"-\d+", path.name)]  # fmt: skip
    return Path("runs") / f"{name}-{max(taken, default=0) + (0 if resume and taken else 1)}"


class Journal:
    def __init__(self, directory: Path, config: dict, active: bool, step: int, max_steps: int):
        """step: the one to go on from; what was logged after it, by a run that was killed, is cut off."""
        self.directory, self.active = directory, active
        self.bar = tqdm(total=max_steps, initial=step, disable=not active, unit="step", dynamic_ncols=True)
        if active:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            for name in ("metrics.jsonl", "samples.jsonl"):
                if (directory / name).exists():
                    kept = [entry for entry in self.read(name) if step and entry["step"] <= step]
                    (directory / "kept.tmp").unlink(missing_ok=True)
                    self.append("kept.tmp", kept)
                    (directory / "kept.tmp").replace(directory / name)  # at once: a kill here must not lose the log

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()  # what comes now, an error too, stands on a line of its own

    def read(self, name: str) -> list[dict]:
        """The objects of a .jsonl file; a half-written last line is passed over."""
        path = self.directory / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def append(self, name: str, entries: list[dict]):
        with open(self.directory / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def say(self, text: str):
        if self.active:
            self.bar.write(text)

    def samples(self, entries: list[dict], show: bool):
        """entries: step, prompt, completion, rewards, advantage, … of each; show: print the best of them."""
        if not self.active:
            return
        self.append("samples.jsonl", entries)
        if show and entries:
            best = max(entries, key=lambda entry: entry["advantage"])
            prompt = best["prompt"] if isinstance(best["prompt"], str) else best["prompt"][-1]["content"]
            rewards = " ".join(f"{name} {value:.2f}" for name, value in best["rewards"].items())
            self.say(f"--- step {best['step']}: {prompt}\n{best['completion']}\n"
                     f"--- {rewards}, advantage {best['advantage']:.2f}")  # fmt: skip

    def metrics(self, step: int, values: dict):
        if not self.active:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self.append("metrics.jsonl", [{"step": step} | finite])
        if "step_time" in values:  # a training step; without a reward where every function returned None
            self.bar.set_postfix_str(f"reward {values.get('reward', math.nan):.3f} "
                                     f"length {values['completions/mean_length']:.0f} "
                                     f"grad_norm {values['grad_norm']:.2f} {values['step_time']:.1f} s")  # fmt: skip
            self.bar.update()
        held_out = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
        if held_out:
            self.say(f"step {step}, held out: " + " ".join(f"{name} {value:.3f}" for name, value in held_out.items()))

    def last_words(self, solved: str, picture, model: Path, command: str):
        """What the run achieved, and where everything is. solved: the reward that says an answer is right; command: how
        to try the model."""
        if not self.active:
            return
        lines = self.read("metrics.jsonl")
        rewards = [line["reward"] for line in lines if "reward" in line]
        share = [(line["step"], line["eval/solved"]) for line in lines if "eval/solved" in line]
        if rewards:  # none where every reward function returned None in every step
            print(f"\nreward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in step {lines[-1]['step']}")
        if share:
            (first, before), (last, after) = share[0], share[-1]
            print(f"held-out problems solved ({solved}): {before:.1%} at step {first}, {after:.1%} at step {last}")
        print(f"plot     {picture}\nsamples  {self.directory / 'samples.jsonl'}\nmodel    {model}   ({command})")
