"""Blind campaign of learning faults: real tiny runs with one planted mistake each, and healthy runs in between.

    python benchmarks/learning_faults.py prepare DIR           two small models, data files (once)
    python benchmarks/learning_faults.py run DIR --seeds 1000  one run per kind and seed, those that are missing
    python benchmarks/learning_faults.py recipes DIR           shipped recipes for a CPU, those that are missing
    python benchmarks/learning_faults.py score DIR             the table

A case is drawn from its kind and seed: model, algorithm, batch, rate. The score replays what `kintsugi diagnose
--learning` and the watcher would have said after every step, from the run folder alone, and compares the first-ranked
finding with the kind that was planted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CODE = Path(__file__).resolve().parent / "learning_fault_code"
PLAIN = f"{CODE / 'plain.py'}"
STEPS = 30
MODEL_SEEDS = (1, 2)
WARMUP_STEPS, EARLY_STEPS = 220, 160
DONE = "case.done"
MOST_LAG = 8
"""Steps by which the samples of a case with stale batches are older than the weights."""
WINDOW = 20
"""Steps within which a fault is to be named after it has become visible."""
RECIPE_STEPS = 60
"""Most steps of a shipped recipe after its warm-up."""
ALONE = ("actor.workers=1", "actor.logical_shards=1", "generation.servers=1", "rollout.workers=1")
ONE_PROCESS = (
    *("grpo_arithmetic", "dr_grpo_arithmetic", "rloo_arithmetic", "gspo_arithmetic", "ppo_arithmetic"),
    *(
        "reinforce_pp_arithmetic",
        "sft_arithmetic",
        "async_grpo_arithmetic",
        "async_ppo_arithmetic",
        "soak",
        "soak_async",
    ),
)
"""Shipped recipes that `learning_runner.py` can train."""
CLUSTER = (
    *("dapo_arithmetic", "dpo_arithmetic", "reward_model_arithmetic", "ppo_reward_model_arithmetic"),
    *("multi_turn_tool", "reasoning_gym"),
)
"""Shipped recipes with resampling, pairs, a reward model or an environment: trained by a cluster, in this order."""
EXACT = "kintsugi.rollout.rewards.exact_answer"

Change = Callable[[dict[str, Any], Path, random.Random], None]


@dataclass(frozen=True)
class PlantedFault:
    """A mistake, how it changes a recipe, and the kind of finding that names it."""

    kind: str
    plant: Change
    visible: int = 1
    """Step from which on the recorded figures show it."""


def _set(recipe: dict[str, Any], **values: Any) -> None:
    """`_set(recipe, actor__learning_rate=1.0)`."""
    for name, value in values.items():
        *path, last = name.split("__")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value


def _setting(**values: Any) -> Change:
    return lambda recipe, folder, rng: _set(recipe, **values)


def _custom(name: str) -> Change:
    return _setting(algorithm__name=name)


def _punished_entropy(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    """Start with a model that has much to learn: one that is nearly right loses nothing by certainty."""
    _set(recipe, model__path=_early(recipe["model"]["path"]), algorithm__name=f"{PLAIN}:against_entropy")
    recipe["actor"]["learning_rate"] = rng.choice((5e-4, 7e-4))


def _rate_times_100(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    recipe["actor"]["learning_rate"] *= 100


def _hacked(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    easy = rng.choice(("nines", "ones"))
    _set(recipe, algorithm__reward=[f"{EXACT} * 0.1", f"{PLAIN}:{easy}"])
    recipe["actor"]["learning_rate"] = max(recipe["actor"]["learning_rate"], 4e-4)


def _unparsed(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    _set(recipe, algorithm__reward=[f"{PLAIN}:{rng.choice(('tagged_answer', 'boxed_answer'))}"])


def _other_reference(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    other = next(path for path in _models(folder) if str(path) != recipe["model"]["path"])
    _set(recipe, reference__path=str(other), algorithm__beta=rng.choice((0.01, 0.05)))


def _stale_reference(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    _set(recipe, reference__path=_early(recipe["model"]["path"]), algorithm__beta=rng.choice((0.01, 0.05)))


def _many_updates(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    """Move the policy far away from its samples within a step."""
    _set(recipe, algorithm__updates_per_step=8, actor__learning_rate=rng.choice((3e-3, 4e-3)))


def _weak_reference(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    """Move the policy away from its reference, step by step."""
    _set(recipe, algorithm__beta=1e-4, actor__learning_rate=rng.choice((3e-3, 4e-3)))


def _other_tokenizer(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    model = Path(recipe["model"]["path"])
    _set(recipe, model__path=str(model.with_name(f"{model.name}-other-tokenizer")))
    _set(recipe, algorithm={"name": "sft", "steps": STEPS, "batch_size": 32})


def _leak(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    _set(recipe, data__source=str(folder / "leaked.jsonl"))


def _unlearnable_source(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    data = recipe.pop("data")
    recipe["data"] = {
        "sources": [
            {"source": "arithmetic", "num_eval": data["num_eval"], "weight": 2},
            {"source": str(folder / "unlearnable.jsonl"), "num_eval": 10},
        ]
    }


def _stale(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    _set(recipe, asynchrony={"max_staleness": 12, "adaptive": False}, deterministic=False)
    _set(recipe, algorithm__batch_size=8, eval__every=0)
    recipe["actor"]["learning_rate"] = 2e-3


FAULTS: Mapping[str, PlantedFault] = {
    "constant reward": PlantedFault("equal_rewards", _setting(algorithm__reward=[f"{PLAIN}:constant"])),
    "reward never parses": PlantedFault("reward_format", _unparsed),
    "advantage of the wrong sign": PlantedFault("wrong_direction", _custom(f"{PLAIN}:wrong_sign")),
    "loss of the wrong sign": PlantedFault("wrong_direction", _custom(f"{PLAIN}:wrong_loss"), visible=10),
    "rate x 100": PlantedFault("divergence", _rate_times_100),
    "rate 0": PlantedFault("no_update", _setting(actor__learning_rate=1e-12)),
    "all truncated": PlantedFault("length", _setting(sampling__max_new_tokens=1)),
    "length rewarded": PlantedFault(
        "length",
        _setting(
            algorithm__reward=[f"{EXACT} * 0.1", f"{PLAIN}:length"],
            sampling__max_new_tokens=12,
            generation__max_length=24,
            actor__learning_rate=6e-4,
        ),
        visible=10,
    ),
    "other model as reference": PlantedFault("reference_mismatch", _other_reference),
    "stale reference": PlantedFault("reference_mismatch", _stale_reference),
    "many large updates per batch": PlantedFault("divergence", _many_updates),
    "rate x 10 with a weak reference": PlantedFault("divergence", _weak_reference, visible=5),
    "leaked answer": PlantedFault("leaked_answer", _leak),
    "loss mask off by one": PlantedFault("sampler_mismatch", _custom(f"{CODE / 'off_by_one.py'}:algorithm")),
    "other temperature in training": PlantedFault(
        "sampler_mismatch", _custom(f"{CODE / 'hotter.py'}:algorithm")
    ),
    "other tokenizer": PlantedFault("tokenizer_mismatch", _other_tokenizer),
    "hackable reward": PlantedFault("reward_hacking", _hacked, visible=10),
    "source without answers": PlantedFault("source_stuck", _unlearnable_source),
    "gradient always clipped": PlantedFault("gradient_clipped", _setting(actor__max_grad_norm=1e-3)),
    "gradient not finite": PlantedFault("updates_skipped", _custom(f"{PLAIN}:not_finite")),
    "entropy bonus of the wrong sign": PlantedFault("entropy_collapse", _punished_entropy, visible=10),
    "stale batches": PlantedFault("stale_batches", _stale, visible=12),
}


def _healthy(recipe: dict[str, Any], folder: Path, rng: random.Random) -> None:
    variant = rng.randrange(9)
    if variant == 1:
        _set(recipe, algorithm__beta=0.02)
    elif variant == 2:
        _set(recipe, asynchrony={"max_staleness": 2}, deterministic=False)
    elif variant == 3:
        _set(recipe, algorithm__updates_per_step=2)
    elif variant == 4:
        second = {"source": str(folder / "sums.jsonl"), "num_eval": 100, "weight": 2}
        _set(recipe, data={"sources": [{"source": "arithmetic", "num_eval": 100}, second]})
    elif variant == 5:
        _set(recipe, algorithm={"name": "sft", "steps": STEPS, "batch_size": 32})
    elif variant == 6:
        _set(recipe, algorithm__name="ppo", algorithm__group_size=2, critic={"warmup_steps": 3})
    elif variant == 7:
        _set(recipe, algorithm__name="reinforce_pp", algorithm__group_size=1, algorithm__batch_size=128)
    elif variant == 8:
        _set(recipe, algorithm__name="gspo", algorithm__updates_per_step=2)


def _models(folder: Path) -> list[Path]:
    return [folder / f"model-{seed}" for seed in MODEL_SEEDS]


def _early(model: str) -> str:
    """Return the folder of a model as it was early in its training."""
    return f"{model}-early"


def recipe_of(name: str, seed: int, *, folder: Path) -> dict[str, Any]:
    """Return the recipe of a case, drawn from its kind and seed."""
    rng = random.Random(f"{name}/{seed}")
    recipe: dict[str, Any] = {
        "name": "case",
        "seed": seed,
        "model": {"path": str(rng.choice(_models(folder)))},
        "data": {"source": "arithmetic", "num_eval": 200},
        "sampling": {"max_new_tokens": 5},
        "generation": {"servers": 1, "slots": 64, "max_length": 24},
        "rollout": {"workers": 1},
        "actor": {
            "workers": 1,
            "learning_rate": rng.choice((2e-4, 3e-4, 5e-4)),
            "warmup_steps": rng.choice((0, 3)),
        },
        "algorithm": {
            "name": rng.choice(("grpo", "grpo", "dr_grpo", "rloo")),
            "steps": STEPS,
            "batch_size": rng.choice((24, 40)),
            "group_size": rng.choice((4, 8)),
        },
        "eval": {"every": 5, "num_samples": 0},
        "checkpoint": {"every": 0},
    }
    plant = _healthy if name == "healthy" else FAULTS[name].plant
    plant(recipe, folder, rng)
    return recipe


def case_folder(name: str, seed: int, *, folder: Path) -> Path:
    return folder / "cases" / f"{name.replace(' ', '_')}-{seed}"


def in_own_process(*arguments: Any, **options: Any) -> bool:
    """Call `learning_runner.run` in a process of its own: a planted fault may change modules of its process.
    Return whether it succeeded."""
    sys.path.insert(0, str(CODE.parents[1]))
    from benchmarks import learning_runner

    process = multiprocessing.get_context("fork").Process(
        target=learning_runner.run, args=arguments, kwargs=options
    )
    process.start()
    process.join()
    if process.exitcode:
        sys.stderr.write(f"{arguments}: exit code {process.exitcode}\n")
    return process.exitcode == 0


def prepare(folder: Path) -> None:
    """Train the two models that all cases start from, and write the data files of the faults."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, path in zip(MODEL_SEEDS, _models(folder), strict=True):
        if path.exists():
            continue
        _train_model(path, seed=seed, steps=WARMUP_STEPS, folder=folder)
        _train_model(Path(_early(str(path))), seed=seed, steps=EARLY_STEPS, folder=folder)
        _give_other_tokenizer(path)
    _write_data(folder)


def _train_model(path: Path, *, seed: int, steps: int, folder: Path) -> None:
    run_dir = folder / f"run-of-{path.name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = recipe_of("healthy", seed, folder=folder) | {
        "model": {"new": {"seed": seed, "max_positions": 32}},
        "data": {"source": "arithmetic", "num_eval": 200},
        "algorithm": {"name": "sft", "steps": steps, "batch_size": 64},
        "actor": {"workers": 1, "learning_rate": 2e-3},
        "eval": {"every": 0, "num_samples": 0},
    }
    in_own_process(_written(recipe, run_dir, folder=folder), run_dir, save=path)


def _written(recipe: Mapping[str, Any], run_dir: Path, *, folder: Path) -> str:
    path = folder / "recipes" / f"{run_dir.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(dict(recipe)))
    return str(path)


def _give_other_tokenizer(model: Path) -> None:
    """Copy a model folder with the tokens of its characters in another order."""
    other = model.with_name(f"{model.name}-other-tokenizer")
    shutil.copytree(model, other)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    characters = [token for token in vocabulary if len(token) == 1]
    places = [vocabulary[token] for token in characters]
    vocabulary.update(zip(characters, places[5:] + places[:5], strict=True))
    path.write_text(json.dumps(tokenizer))


def _write_data(folder: Path) -> None:
    rng = random.Random(0)
    rows = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(4000)]
    with (folder / "leaked.jsonl").open("w") as file:
        for first, second in rows:
            answer = str(first + second)[::-1]
            prompt = f"{answer}={first}+{second}="
            file.write(json.dumps({"prompt": prompt, "answer": answer, "completion": answer}) + "\n")
    with (folder / "sums.jsonl").open("w") as file:
        for first, second in rows:
            answer = str(first + second)[::-1]
            row = {"prompt": f"{first}+{second}=", "answer": answer, "completion": answer}
            file.write(json.dumps(row) + "\n")
    with (folder / "unlearnable.jsonl").open("w") as file:
        for first, second in rows:
            row = {"prompt": f"{first}+{second}=", "answer": "no such thing", "completion": "0"}
            file.write(json.dumps(row) + "\n")


def run_case(name: str, seed: int, *, folder: Path) -> None:
    run_dir = case_folder(name, seed, folder=folder)
    if (run_dir / DONE).exists():
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = recipe_of(name, seed, folder=folder)
    lag = min(recipe.get("asynchrony", {}).get("max_staleness", 0), MOST_LAG)
    if in_own_process(_written(recipe, run_dir, folder=folder), run_dir, lag=lag):
        (run_dir / DONE).touch()
        sys.stderr.write(f"{run_dir.name}\n")


def run_recipe(name: str, *, folder: Path, steps: int) -> None:
    """Train a shipped recipe with its own model, data and warm-up, and one process of each role."""
    run_dir = folder / "shipped" / name
    if (run_dir / DONE).exists():
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    from kintsugi.config.recipe import load

    shipped = load(name).config
    overrides = [*ALONE, f"algorithm.steps={min(steps, shipped.algorithm.steps)}"]
    if name in CLUSTER:
        if shipped.reward_model is not None:
            model, trained = folder / "reward-model", folder / "shipped" / "reward_model_arithmetic"
            shutil.rmtree(model, ignore_errors=True)
            _command("export", str(trained), "--to", str(model))
            overrides.append(f"reward_model.path={model}")
        is_done = _command("train", name, f"run_dir={run_dir}", *overrides)
    else:
        lag = shipped.asynchrony.max_staleness
        is_done = in_own_process(name, run_dir, lag=lag, overrides=overrides)
    if is_done:
        (run_dir / DONE).touch()
        sys.stderr.write(f"{name}\n")


def _command(*arguments: str) -> bool:
    """Run a command of the package; return whether it succeeded."""
    command = [sys.executable, "-m", "kintsugi", *arguments]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0


def cases(names: list[str], seeds: list[int]) -> Iterator[tuple[str, int]]:
    for seed in seeds:
        for name in names or [*FAULTS, "healthy"]:
            yield name, seed


@dataclass(frozen=True)
class CaseScore:
    """What was said about one run, step by step."""

    name: str
    seed: int
    step: int | None
    """First step at which something was reported."""
    first: str
    """First-ranked finding then, …"""
    final: str
    """… and at the end of the window, or of a healthy run."""

    @property
    def is_right(self) -> bool:
        """Whether a fault was reported in time and is the first cause at the end of the window; of a healthy run,
        whether nothing was reported."""
        if self.name not in FAULTS:
            return self.step is None
        fault = FAULTS[self.name]
        return self.step is not None and self.final == fault.kind and self.step <= fault.visible + WINDOW


def score_case(name: str, seed: int, run_dir: Path) -> CaseScore:
    """Replay what would have been said after every step; of a fault, up to the end of its window."""
    from kintsugi.learning_health import LearningFollower

    follower = LearningFollower(run_dir)
    follower.look(is_over=True)
    until = FAULTS[name].visible + WINDOW if name in FAULTS else sys.maxsize
    said = [each for each in follower.changes if each.step <= until]
    spoken = [each for each in said if each.findings]
    return CaseScore(
        name,
        seed,
        spoken[0].step if spoken else None,
        spoken[0].findings[0].kind.value if spoken else "",
        said[-1].findings[0].kind.value if said and said[-1].findings else "",
    )


def score(folder: Path, seeds: list[int], *, healthy: list[Path]) -> int:
    """Print the table of all cases that were run with these seeds, and of other healthy runs."""
    found = [
        score_case(name, seed, run_dir)
        for name, seed in cases([], seeds)
        if ((run_dir := case_folder(name, seed, folder=folder)) / DONE).exists()
    ]
    found += [score_case(path.name, 0, path) for path in healthy]
    for name in dict.fromkeys([*FAULTS, "healthy", *(each.name for each in found)]):
        mine = [each for each in found if each.name == name]
        if mine:
            wrong = [
                f"{each.seed}: {each.first or 'nothing'} → {each.final or 'nothing'}"
                for each in mine
                if not each.is_right
            ]
            steps = sorted(each.step for each in mine if each.step is not None)
            said_at = f"{steps[len(steps) // 2]}" if steps else "–"
            kind = FAULTS[name].kind if name in FAULTS else "silence"
            right = sum(each.is_right for each in mine)
            sys.stdout.write(
                f"| {name} | {kind} | {right} of {len(mine)} | {said_at} | {'; '.join(wrong)} |\n"
            )
    faults, well = ([each for each in found if (each.name in FAULTS) is planted] for planted in (True, False))
    for what, group in (("faults named", faults), ("healthy runs silent", well)):
        right = sum(each.is_right for each in group)
        sys.stdout.write(f"{what}: {right} of {len(group)} ({right / max(len(group), 1):.1%})\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("prepare", "run", "recipes", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1000])
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=RECIPE_STEPS, help="Most steps of a shipped recipe.")
    parser.add_argument("--healthy", type=Path, nargs="*", default=[], help="Further healthy runs to score.")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.action == "prepare":
        prepare(folder)
        return 0
    if arguments.action == "score":
        shipped = [done.parent for done in sorted((folder / "shipped").glob(f"*/{DONE}"))]
        return score(folder, arguments.seeds, healthy=[*shipped, *arguments.healthy])
    if arguments.action == "recipes":
        for name in arguments.names or (*ONE_PROCESS, *CLUSTER):
            run_recipe(name, folder=folder, steps=arguments.steps)
        return 0
    for name, seed in cases(arguments.names, arguments.seeds):
        run_case(name, seed, folder=folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
