from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kintsugi.config.recipe import anchored, dump, given, load, load_config
from kintsugi.config.schema import AlgorithmSection, Config, ModelSection, NewModel, WarmupSection
from kintsugi.errors import ConfigError

RECIPES = Path(__file__).parents[3] / "kintsugi" / "recipes"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_a_recipe_takes_from_what_it_extends_and_the_command_line_has_the_last_word(write: Write) -> None:
    write("base.yaml", "name: base\nseed: 1\nactor: {workers: 2, learning_rate: 0.1}")
    write(
        "sub/middle.yaml", "extends: ../base.yaml\nactor: {learning_rate: 0.2}\nsampling: {max_new_tokens: 4}"
    )
    path = write("mine.yaml", "extends: sub/middle.yaml\nname: mine")
    resolved = load(path, ["actor.learning_rate=3e-4"])
    config = resolved.config
    assert (config.name, config.seed, config.actor.workers) == ("mine", 1, 2)
    assert config.actor.learning_rate == 3e-4
    assert resolved.origins["name"] == str(path)
    assert resolved.origins["seed"] == "extends base.yaml"
    assert resolved.origins["sampling.max_new_tokens"] == "extends middle.yaml"
    assert resolved.origins["actor.learning_rate"] == "command line"
    assert resolved.origins["actor.beta1"] == "default"


def test_every_value_has_an_origin() -> None:
    resolved = load(RECIPES / "grpo_arithmetic.yaml")
    assert "warmup.steps" in resolved.origins
    assert set(resolved.origins.values()) == {
        str(RECIPES / "grpo_arithmetic.yaml"),
        "extends base_cpu.yaml",
        "default",
    }


def test_null_takes_a_section_away_and_a_dotted_field_brings_it_back(write: Write) -> None:
    path = write("a.yaml", "name: a\nwarmup: {steps: 7, batch_size: 3}")
    resolved = load(path, ["warmup=null"])
    assert resolved.config.warmup is None
    assert resolved.origins["warmup"] == "command line"
    assert load(path, ["warmup=null", "warmup.steps=5"]).config.warmup == WarmupSection(steps=5)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("3E4", 3e4), ("1", 1.0), (".5", 0.5), ("-2.5e+1", -25.0), ("1.", 1.0)],
)
def test_numbers_are_read_as_people_write_them(write: Write, text: str, value: float) -> None:
    config = load(write("a.yaml", "name: a"), [f"actor.learning_rate={text}"]).config
    assert config.actor.learning_rate == value


def test_words_that_other_yaml_readers_take_for_booleans_stay_words(write: Write) -> None:
    assert load(write("a.yaml", "name: no")).config.name == "no"
    assert "got 'yes'" in refusal(write("b.yaml", "name: b\ndeterministic: yes"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "actor.learning_rat=1",
            ["`actor.learning_rat`", "command line", "did you mean `actor.learning_rate`"],
        ),
        ("learning_rate=1", ["no such field", "`actor.learning_rate`"]),
        ("actor.zzz=1", ["`actor.zzz`", "expected one of beta1"]),
        ("actor.workers=two", ["`actor.workers`", "a whole number", "'two'", "command line"]),
        ("actor.workers=2.5", ["`actor.workers`", "a whole number", "2.5"]),
        ("actor.workers=true", ["`actor.workers`", "true"]),
        ("actor.workers=010", ["`actor.workers`", "'010'"]),
        ("actor.workers=", ["`actor.workers`", "nothing"]),
        ("actor=3", ["`actor`", "a section", "3"]),
        ("warmup=3", ["`warmup`", "a section with fields or null", "3"]),
        ("algorithm.name=pppo", ["`algorithm.name`", "sft, reward_model, dpo", "'pppo'"]),
        ("algorithm.reward=3", ["`algorithm.reward`", "a list", "3"]),
        ("algorithm.reward=[1]", ["`algorithm.reward[0]`", "text", "1"]),
        ("name=3", ["`name`", "text", "3"]),
        ("seed", ["command line", "`seed`", "like `actor.learning_rate=3e-4`"]),
        ("=3", ["`=3`"]),
        ("a..b=3", ["`a..b=3`"]),
        ("seed={", ["valid YAML"]),
        ("extends=other.yaml", ["`extends`", "no such field"]),
    ],
)
def test_a_bad_override_is_named_with_what_was_found_and_what_is_expected(
    write: Write, override: str, parts: list[str]
) -> None:
    message = refusal(write("a.yaml", "name: a"), override)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


def test_a_bad_value_is_traced_to_the_file_it_stands_in(write: Write) -> None:
    write("base.yaml", "actor: {workers: many}")
    message = refusal(write("mine.yaml", "extends: base.yaml\nname: mine"))
    assert "`actor.workers` (from extends base.yaml)" in message
    assert "'many'" in message


def test_a_name_must_be_given(write: Write) -> None:
    assert "`name`" in refusal(write("a.yaml", "seed: 1"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "nothing"),
        ("- 1", "[1]"),
        ("name: [", "valid YAML"),
        ("name: a\nname: b", "`name` is there twice"),
        ("3: 4", "a field name"),
        ("extends: [a]", "expected one path"),
        ("extends: nowhere.yaml", "found nothing there (named by `extends` in"),
        ("name: !!python/object/apply:os.getcwd []", "valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(write: Write, text: str, part: str) -> None:
    assert part in refusal(write("a.yaml", text))


def test_a_file_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    assert "found nothing there" in refusal(tmp_path / "nowhere.yaml")
    assert "readable" in refusal(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(tmp_path / "bytes.yaml")


def test_a_link_that_leads_to_itself_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=r"loop.yaml: expected a readable recipe file"):
        load(tmp_path / "loop.yaml")


def test_recipes_that_extend_in_a_circle_are_refused_with_the_circle(write: Write) -> None:
    write("b.yaml", "extends: c.yaml")
    write("c.yaml", "extends: b.yaml")
    assert "b.yaml → c.yaml → b.yaml" in refusal(write("a.yaml", "extends: b.yaml"))


def test_what_is_dumped_reads_back_equal(tmp_path: Path) -> None:
    config = load(RECIPES / "grpo_arithmetic.yaml", ["actor.epsilon=1e-12", "name=no"]).config
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_dumped_configuration_with_a_field_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    dump(Config(name="a"), path)
    path.write_text(path.read_text() + "colour: red\n")
    with pytest.raises(ConfigError, match=r"`colour` .*config\.yaml.*no such field"):
        load_config(path)


def test_paths_become_absolute_so_that_other_folders_can_use_them() -> None:
    config = load(
        RECIPES / "sft_arithmetic.yaml", ["model.path=here", "model.new=null", "run_dir=there"]
    ).config
    fixed = anchored(config)
    assert fixed.model.path == str(Path.cwd() / "here")
    assert fixed.run_dir == str(Path.cwd() / "there")
    assert fixed.data.source == "arithmetic"


def test_fields_left_out_of_a_new_section_get_its_defaults(write: Write) -> None:
    config = load(write("a.yaml", "name: a\nmodel: {new: {num_layers: 3}}")).config
    assert config.model.new == msgspec.structs.replace(NewModel(), num_layers=3)


def test_a_configuration_built_in_python_is_checked_and_remembers_what_was_said() -> None:
    built = Config(name="mine", algorithm=AlgorithmSection(steps=3), model=ModelSection(path="folder"))
    resolved = given(built, ["seed=4"])
    assert resolved.config == msgspec.structs.replace(built, seed=4)
    origins = {field: resolved.origins[field] for field in ("name", "algorithm.steps", "seed", "eval.every")}
    assert origins == {
        "name": "Python",
        "algorithm.steps": "Python",
        "seed": "command line",
        "eval.every": "default",
    }


def test_a_reward_in_a_file_is_anchored_and_one_of_a_module_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = ("rewards.py:right", "package.module.brevity * 0.1")
    config = Config(name="mine", algorithm=AlgorithmSection(reward=rewards))
    assert anchored(config).algorithm.reward == (f"{tmp_path}/rewards.py:right", rewards[1])
