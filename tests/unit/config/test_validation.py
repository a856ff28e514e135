from __future__ import annotations

import json
import socket
import string
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kintsugi.config.recipe import load
from kintsugi.config.schema import Config, NewModel
from kintsugi.config.validation import validate
from kintsugi.errors import UserError
from kintsugi.model.architecture import num_parameters, parameter_shapes
from kintsugi.model.plan import new_model_config, plan_model
from kintsugi.model.tokenizer import character_tokenizer
from tests.unit.model.tied_model import write_tied_model

RECIPES = Path(__file__).parents[3] / "kintsugi" / "recipes"


GRPO = (
    "algorithm.steps=150",
    "algorithm.batch_size=32",
    "algorithm.group_size=8",
    "warmup.batch_size=64",
    "actor.logical_shards=4",
    "sampling.max_new_tokens=5",
    "model.new.max_positions=32",
)
"""What the messages below are about, whatever the recipe is tuned to."""


def resolved(*overrides: str) -> Config:
    return load(RECIPES / "grpo_arithmetic.yaml", (*GRPO, *overrides)).config


def refusal(*overrides: str) -> str:
    result = load(RECIPES / "grpo_arithmetic.yaml", (*GRPO, *overrides))
    with pytest.raises(UserError) as caught:
        validate(result.config, origins=result.origins)
    return str(caught.value)


@pytest.mark.parametrize(
    "recipe", ["grpo_arithmetic", "sft_arithmetic", "async_grpo_arithmetic", "soak_async"]
)
def test_the_recipes_of_the_project_are_valid(recipe: str) -> None:
    validate(load(RECIPES / f"{recipe}.yaml").config)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.group_size=1", ["`algorithm.group_size`", "at least 2", "grpo", "got 1", "command line"]),
        ("algorithm.gamma=0.9", ["`algorithm.gamma`", "nothing: grpo does not use it", "got 0.9"]),
        ("algorithm.kl=k3", ["`algorithm.kl`", "`algorithm.beta` is 0", "got 'k3'"]),
        ("algorithm.entropy_weight=-1", ["`algorithm.entropy_weight`", "zero or more", "got -1"]),
        ("critic.learning_rate=0.1", ["`critic.learning_rate`", "grpo has no critic", "got 0.1"]),
        ("reference.moving_average=1", ["`reference.moving_average`", "less than 1"]),
        ("asynchrony.max_staleness=-1", ["`asynchrony.max_staleness`", "zero or more", "got -1"]),
        ("asynchrony.overtake=1", ["`asynchrony.overtake`", "nothing is sampled during a step", "got 1"]),
        ("asynchrony.running=interrupt", ["`asynchrony.running`", "keep while", "got 'interrupt'"]),
        ("generation.servers=0", ["`generation.servers`", "at least 1", "got 0"]),
        ("sampling.top_p=0.9", ["`sampling.top_p`", "1.0", "distribution", "got 0.9"]),
        ("sampling.top_k=5", ["`sampling.top_k`", "got 5"]),
        ("sampling.min_p=0.1", ["`sampling.min_p`"]),
        ("sampling.repetition_penalty=1.1", ["`sampling.repetition_penalty`"]),
        ("sampling.temperature=0", ["`sampling.temperature`", "at least 0.01", "greedy"]),
        ("sampling.temperature=0.009", ["`sampling.temperature`", "at least 0.01", "got 0.009"]),
        ("sampling.max_new_tokens=0", ["`sampling.max_new_tokens`", "positive"]),
        (
            "actor.workers=3",
            [
                "`actor.logical_shards`",
                "a multiple of `actor.workers`=3",
                "4 parts are shared evenly by 1, 2 or 4",
                "got 4",
            ],
        ),
        ("actor.workers=1000", ["`actor.workers`", "64 samples", "got 1000"]),
        ("actor.layout.shards=3", ["`actor.layout.shards`", "a divisor of `actor.workers`=2", "got 3"]),
        ("actor.layout.shards=0", ["`actor.layout.shards`", "a positive number", "got 0"]),
        ("actor.logical_shards=512", ["`actor.logical_shards`", "64 samples"]),
        ("rollout.workers=33", ["`rollout.workers`", "`algorithm.batch_size`=32"]),
        ("generation.servers=500", ["`generation.servers`", "256 samples"]),
        ("generation.slots=3", ["`generation.slots`", "at least 4"]),
        ("generation.kv_cache_gib=0", ["`generation.kv_cache_gib`", "positive", "got 0"]),
        ("generation.urls=[http://a]", ["`generation.urls`", "0 addresses", "embedded"]),
        ("generation.backend=vllm", ["`deterministic`", "false", "vllm"]),
        ("generation.max_length=10", ["`generation.max_length`", "at least 11", "6 tokens", "got 10"]),
        ("generation.max_length=100", ["`generation.max_length`", "32 positions"]),
        ("model.new=null", ["`model.path` and `model.new`", "neither"]),
        ("model.path=x", ["`model.path` and `model.new`", "both", "`model.new=null`"]),
        ("model.new.hidden_size=97", ["`model.new.hidden_size`", "a multiple of `model.new.num_heads`=4"]),
        ("model.new.num_kv_heads=3", ["`model.new`", "num_kv_heads"]),
        ("model.new.alphabet='0012'", ["`model.new`", "distinct"]),
        ("model.new.alphabet='0123456789'", ["`data.source`", "no token", "+"]),
        ("data.num_eval=9000", ["`data.num_eval`", "8100 rows"]),
        ("data.num_eval=8100", ["train"]),
        ("data.num_eval=0", ["`data.num_eval`", "held-out"]),
        ("data.max_digits=9", ["`data.max_digits`", "1 to 3"]),
        (
            "data.sources=[{source: arithmetic, weight: 0}]",
            ["`data.sources[0].weight`", "positive", "got 0.0"],
        ),
        (
            "data.sources=[{source: arithmetic, weight: .nan}]",
            ["`data.sources[0].weight`", "positive", "got nan"],
        ),
        (
            "data.sources=[{weight: 1000000}, {source: 'arithmetic:words'}]",
            ["`data.sources[1].weight`", "a thousandth", "got 1.0"],
        ),
        (
            "data.sources=[{source: 'stream:p'}, {source: 'stream:p'}]",
            ["`data.sources[1].source`", "no other source", "'stream:p'"],
        ),
        ("data.chat_template=true", ["`data.chat_template`", "no chat template"]),
        ("data.sources=[{source: no.jsonl}]", ["`data.sources[0].source`", "'no.jsonl'"]),
        ("data.sources=[{num_eval: 9000}]", ["`data.sources[0].num_eval`", "8100 rows"]),
        ("data.options={seed: 1}", ["`data.options`", "reasoning-gym", "got a section"]),
        ("data.system=Hello", ["`data.system`", "`data.chat_template=true`", "'Hello'"]),
        ("data.max_bad_share=1", ["`data.max_bad_share`", "less than 1"]),
        ("data.source=nowhere.jsonl", ["`data.source`", "'nowhere.jsonl'"]),
        ("algorithm.steps=-1", ["`algorithm.steps`", "positive", "got -1"]),
        ("actor.learning_rate=.nan", ["`actor.learning_rate`", "finite"]),
        ("actor.learning_rate=0", ["`actor.learning_rate`", "positive"]),
        ("actor.beta2=1.0", ["`actor.beta2`", "less than 1"]),
        ("actor.warmup_steps=151", ["`actor.warmup_steps`", "150 optimizer updates"]),
        ("cluster.hosts=7", ["`cluster.hosts`", "at most 6", "got 7"]),
        ("cluster.port=70000", ["`cluster.port`", "65535"]),
        ("logging.samples_gib=0", ["`logging.samples_gib`", "positive", "got 0"]),
        ("monitoring.port=-1", ["`monitoring.port`", "65535", "got -1"]),
        ("monitoring.webhook=ftp://a/b", ["`monitoring.webhook`", "http or https", "its scheme is 'ftp'"]),
        ("cluster.bandwidth.samples=0", ["`cluster.bandwidth.samples`", "positive", "got 0"]),
        ("name=a/b", ["`name`", "'a/b'"]),
        ("seed=-1", ["`seed`"]),
        ("algorithm.reward=[]", ["`algorithm.reward`", "at least one"]),
        ("algorithm.reward=[f]", ["`algorithm.reward`", "dotted"]),
        ("algorithm.reward=[no_such_module.f]", ["`algorithm.reward`", "no_such_module"]),
        ("algorithm.reward=[kintsugi.rollout.rewards.nothing]", ["`algorithm.reward`", "'nothing'"]),
        (
            "algorithm.reward=[os.path.join]",
            ["`algorithm.reward`", "completions, prompts, answer", "os.path.join"],
        ),
    ],
)
def test_what_can_not_run_is_refused_by_name(override: str, parts: list[str]) -> None:
    message = refusal(override)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_without_a_number_of_shards_every_worker_has_one(workers: int) -> None:
    config = resolved("actor.logical_shards=null", f"actor.workers={workers}")
    validate(config)
    assert config.actor.num_shards == workers
    assert resolved().actor.num_shards == 4


def test_too_few_shards_for_more_workers_name_the_field_to_set() -> None:
    message = refusal("actor.workers=8")
    assert "`actor.logical_shards`" in message and "or null for one part per worker" in message


def test_sft_learns_a_row_once() -> None:
    assert "`algorithm.group_size`" in refusal("algorithm.name=sft", "algorithm.group_size=2")


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in refusal(f"cluster.port={port}")
    validate(resolved(f"cluster.port={port}"))


def test_a_run_folder_that_exists_is_refused(tmp_path: Path) -> None:
    message = refusal(f"run_dir={tmp_path}")
    assert "`run_dir`" in message and str(tmp_path) in message
    (tmp_path / "file").touch()
    assert "is a file" in refusal(f"run_dir={tmp_path}/file/deeper")
    validate(resolved(f"run_dir={tmp_path}/new/one"))


def test_a_reward_that_wants_a_column_the_data_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanting_rewards.py").write_text("def f(completions, colour, **columns): return []")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("algorithm.reward=[wanting_rewards.f]")
    assert "'colour'" in message and "wanting_rewards.f" in message
    sys.modules.pop("wanting_rewards")


def test_a_source_beside_several_is_refused() -> None:
    message = refusal("data.sources=[{source: arithmetic}]", "data.num_eval=3")
    assert "`data.num_eval`" in message and "together with `data.sources`" in message


class TestDataFiles:
    """Overrides for a JSON Lines file in place of generated sums."""

    def overrides(self, path: Path, *more: str) -> tuple[str, ...]:
        return (f"data.source={path}", "data.num_eval=1", "data.completion_column=answer", *more)

    def rows(self, path: Path, *rows: object) -> Path:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    def test_a_file_with_every_column_is_taken(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl", *[{"prompt": "1+1=", "answer": "2"}] * 3)
        validate(resolved(*self.overrides(path)))

    def test_pairs_need_no_reward_function_where_nothing_is_sampled(self, tmp_path: Path) -> None:
        pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
        path = self.rows(tmp_path / "a.jsonl", *[pair] * 3)
        given = (f"data.source={path}", "data.num_eval=1", "warmup=null", "algorithm.group_size=null")
        validate(resolved(*given, "algorithm.name=reward_model", "generation.servers=0"))
        message = refusal(*given, "algorithm.name=dpo", "algorithm.beta=0.1")
        assert "`algorithm.reward`" in message and "exact_answer" in message

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl")
        assert "a.jsonl" in refusal(*self.overrides(path))

    def test_a_missing_column_is_refused_by_file_line_and_column(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"}, {"question": "1+1="})
        message = refusal(*self.overrides(path))
        assert "a.jsonl, line 2" in message and "'prompt'" in message and "question" in message

    def test_sft_needs_a_column_to_learn(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl", *[{"prompt": "1+1=", "answer": "2"}] * 3)
        assert "`data.completion_column`" in refusal(*self.overrides(path, "data.completion_column=null"))

    def test_a_row_longer_than_the_model_is_refused(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl", *[{"prompt": "1+1=", "answer": "2" * 40}] * 3)
        assert "32 positions, got 45 tokens" in refusal(*self.overrides(path))

    def test_an_empty_prompt_is_refused(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.jsonl", *[{"prompt": "", "answer": "2"}] * 3)
        assert "at least one token" in refusal(*self.overrides(path))


class TestModelFolders:
    """A folder that is almost a model."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "model"
        tokenizer = character_tokenizer("0123456789+=")
        tokenizer.save(folder)
        model, _ = plan_model(resolved())
        (folder / "config.json").write_text(json.dumps(model.to_huggingface()))
        zeros = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model).items()}
        save_file(zeros, folder / "model.safetensors")
        return folder

    def refusal(self, folder: Path) -> str:
        return refusal("model.new=null", f"model.path={folder}")

    def edit(self, path: Path, **fields: object) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def test_a_whole_folder_is_taken(self, folder: Path) -> None:
        validate(resolved("model.new=null", f"model.path={folder}"))

    def test_a_reference_of_another_vocabulary_is_refused(self, folder: Path) -> None:
        message = refusal(
            "algorithm.beta=0.1", f"reference.path={folder}", "model.new.alphabet='0123456789+=-'"
        )
        assert "`reference.path`" in message and "vocabulary of 15 tokens" in message and "got 14" in message

    def test_a_reward_model_without_a_head_is_refused(self, folder: Path) -> None:
        message = refusal(f"reward_model.path={folder}")
        assert "`reward_model.path`" in message and "head" in message and "found none" in message

    def test_a_missing_folder_is_refused(self, tmp_path: Path) -> None:
        message = self.refusal(tmp_path / "nowhere")
        assert "`model.path`" in message and "nowhere" in message and "found nothing" in message

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_a_missing_file_is_refused_by_name(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert name in self.refusal(folder)

    def test_another_family_is_refused_with_those_that_are_supported(self, folder: Path) -> None:
        self.edit(folder / "config.json", model_type="gpt2")
        message = self.refusal(folder)
        assert "'gpt2'" in message and "llama, qwen2, qwen3" in message

    @pytest.mark.parametrize("token", ["eos_token", "pad_token"])
    def test_a_tokenizer_without_end_or_padding_is_refused(self, folder: Path, token: str) -> None:
        self.edit(folder / "tokenizer_config.json", **{token: None})
        message = self.refusal(folder)
        assert f"`{token}`" in message and "tokenizer_config.json" in message

    def test_a_tokenizer_larger_than_the_model_is_refused(self, folder: Path) -> None:
        self.edit(folder / "config.json", vocab_size=8)
        assert "`vocab_size`=8" in self.refusal(folder)

    def test_cut_weights_are_refused_by_file_and_tensor(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        message = self.refusal(folder)
        assert "`model.path`" in message and "model.safetensors is cut" in message and ".weight" in message

    def test_weights_of_another_model_are_refused_by_tensor(self, folder: Path) -> None:
        self.edit(folder / "config.json", intermediate_size=512)
        assert "mlp.gate_proj.weight (expected [512, 96]" in self.refusal(folder)

    def test_a_damaged_configuration_is_refused(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        assert "config.json" in self.refusal(folder)


@pytest.mark.parametrize("recipe", ["grpo_smollm2_arithmetic", "grpo_smollm2_gsm8k"])
def test_the_recipes_for_real_weights_are_valid_with_a_model_and_data(tmp_path: Path, recipe: str) -> None:
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save(tmp_path / "model")
    new = NewModel(
        hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, max_positions=512
    )
    model = new_model_config(new, tokenizer=tokenizer)
    (tmp_path / "model" / "config.json").write_text(json.dumps(model.to_huggingface()))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model).items()}
    save_file(zeros, tmp_path / "model" / "model.safetensors")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "How many are 1 and 1?", "answer": "They are 2.\n#### 2"}) + "\n")
    files = (f"data.source={rows}", f"data.eval_source={rows}") if "gsm8k" in recipe else ()
    fitting = ("generation.max_length=512", f"model.path={tmp_path}/model", *files)
    validate(load(RECIPES / f"{recipe}.yaml", fitting).config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_new_model_is_of_its_family(family: str) -> None:
    config = resolved(f"model.new.family={family}")
    assert config.model.new is not None
    model = new_model_config(config.model.new, tokenizer=character_tokenizer("01"))
    assert (model.attention_bias, model.qk_norm) == (family == "qwen2", family == "qwen3")
    assert model.vocab_size == 4
    assert num_parameters(model) > 200_000


def test_a_warm_up_is_counted_in_updates_of_which_a_step_may_have_several() -> None:
    validate(resolved("algorithm.updates_per_step=2", "actor.warmup_steps=300"))
    told = refusal("algorithm.updates_per_step=2", "actor.warmup_steps=301")
    assert "at most the stage's 300 optimizer updates, got 301" in told


def test_nothing_is_offloaded_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kintsugi.config.validation.ACCELERATORS", ())
    validate(resolved("cluster.share_device=keep"))
    message = refusal("cluster.share_device=offload")
    assert "`cluster.share_device`" in message and "without an accelerator" in message


def test_servers_of_another_make_share_no_device() -> None:
    remote = ("generation.backend=vllm", "generation.servers=1", 'generation.urls=["http://127.0.0.1:1"]')
    message = refusal("cluster.share_device=keep", "deterministic=false", *remote)
    assert "`cluster.share_device`" in message and "servers of another backend" in message


def test_figures_are_handed_out_at_a_port_that_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "in use" in refusal(f"monitoring.port={port}")
    assert "another port than" in refusal(f"monitoring.port={port}", f"cluster.port={port}")
    validate(resolved(f"monitoring.port={port}"))
    assert "`monitoring.port`" in refusal(f"monitoring.port={port}", "monitoring.host=203.0.113.7")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("actor.layout.replicas=2",), ["`actor.layout.replicas`", "expected 1 (", "got 2"]),
        (("cluster.share_device=offload",), ["`actor.layout.shards`", "moves whole states"]),
        (
            ("algorithm.beta=0.1", "reference.moving_average=0.9"),
            ["`actor.layout.shards`", "a reference that moves is not cut"],
        ),
        (
            ("algorithm.name=ppo", "actor.dtype=bfloat16"),
            ["`actor.layout.shards`", "or a `critic.path`", "float32"],
        ),
    ],
)
def test_what_a_cut_state_does_not_allow_is_refused_by_name(
    overrides: tuple[str, ...], parts: list[str]
) -> None:
    message = refusal("actor.workers=2", "actor.layout.shards=2", *overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("actor.layout.shards=1",), ["every worker has all weights"]),
        (("actor.workers=4", "actor.layout.stages=2"), ["not combined with `actor.layout.stages`=2"]),
        (("actor.logical_slices=2",), ["not combined with `actor.logical_slices`=2"]),
        (("algorithm.beta=0.1",), ["or a `reference.path`, or no warm-up", "begins as the trained actor"]),
    ],
)
def test_what_needs_whole_weights_is_refused_by_name_where_they_are_gathered_by_layer(
    overrides: tuple[str, ...], parts: list[str]
) -> None:
    by_layer = ("actor.workers=2", "actor.layout.shards=2", "actor.layout.gather=layer")
    message = refusal(*by_layer, *overrides)
    assert all(part in message for part in ["`actor.layout.gather`", "expected step", *parts]), message


def test_weights_are_gathered_by_layer_also_for_a_reference_of_the_first_stage() -> None:
    by_layer = ("actor.workers=2", "actor.layout.shards=2", "actor.layout.gather=layer")
    validate(resolved(*by_layer, "algorithm.beta=0.1", "warmup=null"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("actor.logical_slices=3",), ["`actor.logical_slices`", "a power of two", "got 3"]),
        (("actor.logical_slices=0",), ["`actor.logical_slices`", "a power of two", "got 0"]),
        (("actor.logical_slices=64",), ["`actor.logical_slices`=64", "`num_kv_heads` divisible by"]),
        (
            ("actor.logical_slices=2", "actor.layout.tensors=4", "actor.workers=4"),
            ["`actor.layout.tensors`", "a divisor of `actor.logical_slices`=2", "got 4"],
        ),
        (
            ("actor.logical_slices=2", "actor.layout.tensors=2", "weights.transport=disk"),
            ["`weights.transport`", "auto or stream", "`actor.layout.tensors`=2"],
        ),
    ],
)
def test_slices_that_a_model_or_its_ranks_can_not_have_are_refused_by_name(
    overrides: tuple[str, ...], parts: list[str]
) -> None:
    message = refusal("actor.workers=2", *overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("actor.workers=3",), ["`actor.layout.stages`", "a divisor of `actor.workers`=3", "got 2"]),
        (
            ("actor.workers=6", "actor.layout.shards=2"),
            ["`actor.layout.shards`=2 × `actor.layout.stages`", "a divisor of `actor.workers`=6", "got 2"],
        ),
        (("actor.layout.stages=3", "actor.workers=3"), ["`actor.layout.stages`", "layers, 2", "got 3"]),
        (
            ("actor.layout.replicas=2",),
            ["`actor.layout.replicas`", "expected 1 (", "`actor.layout.stages`=2"],
        ),
        (
            ("actor.layout.tensors=2", "actor.workers=4"),
            ["`actor.layout.tensors`", "a divisor of `actor.logical_slices`=1", "got 2"],
        ),
        (
            ("actor.logical_shards=3", "actor.workers=4"),
            ["`actor.logical_shards`", "a multiple of 2", "got 3"],
        ),
        (("weights.transport=shared_memory",), ["`weights.transport`", "auto or stream", "shared_memory"]),
        (("cluster.share_device=offload",), ["`actor.layout.stages`", "moves whole states"]),
        (
            ("algorithm.beta=0.1", "reference.moving_average=0.9"),
            ["`actor.layout.stages`", "a reference that moves is not cut"],
        ),
    ],
)
def test_what_pipeline_stages_do_not_allow_is_refused_by_name(
    overrides: tuple[str, ...], parts: list[str]
) -> None:
    message = refusal("actor.workers=2", "actor.layout.stages=2", *overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "layout", [("actor.layout.shards=2",), ("actor.layout.stages=2", "actor.logical_shards=2")]
)
def test_a_state_can_be_cut_over_the_machines_of_a_hosts_file(layout: tuple[str, ...]) -> None:
    validate(resolved("actor.workers=4", *layout, "cluster.on=hosts.txt", "cluster.hosts=3"))


def test_stages_of_a_tied_model_are_valid_but_not_for_a_critic_that_would_begin_with_rounded_weights(
    tmp_path: Path,
) -> None:
    write_tied_model(tmp_path)
    given = ("actor.workers=2", "actor.layout.stages=2", "model.new=null", f"model.path={tmp_path}")
    validate(resolved(*given, "actor.dtype=bfloat16"))
    ppo = (*given, "algorithm.name=ppo")
    validate(resolved(*ppo, "actor.dtype=float32"))
    message = refusal(*ppo, "actor.dtype=bfloat16")
    parts = ["`actor.layout.stages`", "1 with tied embeddings, or a `critic.path`", "got bfloat16"]
    assert all(part in message for part in parts), message


def test_stages_are_valid_with_shards_and_replicas() -> None:
    for workers, shards, replicas in ((2, 1, 1), (4, 1, 2), (4, 2, 1), (8, 2, "null")):
        config = resolved(
            f"actor.workers={workers}",
            "actor.logical_shards=4",
            f"actor.layout.shards={shards}",
            "actor.layout.stages=2",
            f"actor.layout.replicas={replicas}",
        )
        validate(config)
        assert config.actor.data_parallel == workers // 2


def test_a_cut_state_is_valid_with_as_many_parts_as_divide_the_workers() -> None:
    for workers, shards, replicas in ((4, 4, 1), (4, 2, 2), (4, 2, "null"), (3, 3, "null")):
        validate(
            resolved(
                f"actor.workers={workers}",
                "actor.logical_shards=12",
                f"actor.layout.shards={shards}",
                f"actor.layout.replicas={replicas}",
            )
        )
