"""TRL's GRPOTrainer on GSM8K with the budget of the recipe `grpo_qwen_gsm8k`, evaluated at the same points.

    python benchmarks/gsm8k_trl.py --model FOLDER --data GSM8K_FOLDER --out DIR [--steps 150] [--minutes 15] [--vllm]

Runs in an environment that has TRL, which may be a folder of wheels on PYTHONPATH. The same model folder, system
prompt, reward function, number of prompts and answers, temperature, optimizer and learning rate as the recipe; float32
weights and bfloat16 computation, so that small updates are not rounded away. Evaluation is greedy on the first problems
of the test file and is not counted as time of training. Writes DIR/log.jsonl: a line of what ran, one for each step,
and one with `accuracy` for each evaluation. `plot_gsm8k.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.rollout.rewards import gsm8k_answer

SYSTEM = "Solve the problem step by step. Write the final number after ####."
EVAL_BATCH = 500


def rows(path: Path, *, count: int | None = None) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
        yield {"prompt": conversation, "answer": row["answer"]}


def reward(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """The recipe's, for conversations."""
    texts = [completion[-1]["content"] for completion in completions]
    return [float(score) if isinstance(score, float) else 0.0 for score in gsm8k_answer(texts, answer=answer)]


class Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

    def add(self, **line: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


class Watch(TrainerCallback):
    """Notes steps, evaluates when due, and ends training when its time is over. Evaluation stops the clock."""

    def __init__(self, arguments: argparse.Namespace, *, log: Log, tokenizer: Any) -> None:
        self._arguments, self._log, self._tokenizer = arguments, log, tokenizer
        self._problems = list(rows(arguments.data / "test.jsonl", count=arguments.num_eval))
        self._began = time.perf_counter()
        self._evaluated_s = 0.0
        self._last = 0.0
        self.rewards: list[float] = []

    @property
    def train_s(self) -> float:
        return time.perf_counter() - self._began - self._evaluated_s

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._began = time.perf_counter()
        if not self._arguments.trained_only:
            self._evaluate(0, keywords["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        seconds, self._last = self.train_s - self._last, self.train_s
        mean = sum(self.rewards) / max(1, len(self.rewards))
        self.rewards.clear()
        self._log.add(
            step=state.global_step, seconds=round(seconds, 3), train_s=round(self.train_s, 2), reward=mean
        )
        over = self.train_s >= 60 * self._arguments.minutes
        is_last = over or state.global_step >= self._arguments.steps
        if is_last or state.global_step % self._arguments.eval_every == 0:
            self._evaluate(state.global_step, keywords["model"])
        control.should_training_stop = is_last

    def _evaluate(self, step: int, model: Any) -> None:
        start, train_s = time.perf_counter(), self.train_s
        was_training = model.training
        model.eval()
        scores: list[float] = []
        for first in range(0, len(self._problems), EVAL_BATCH):
            batch = self._problems[first : first + EVAL_BATCH]
            texts = greedy(model, self._tokenizer, batch, new_tokens=self._arguments.new_tokens)
            scores += reward(
                [[{"role": "assistant", "content": text}] for text in texts],
                answer=[row["answer"] for row in batch],
            )
        model.train(was_training)
        self._evaluated_s += time.perf_counter() - start
        self._log.add(
            step=step,
            accuracy=sum(scores) / len(scores),
            problems=len(scores),
            train_s=round(train_s, 2),
            evaluation_s=round(time.perf_counter() - start, 2),
        )


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, batch: Sequence[dict[str, Any]], *, new_tokens: int) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in batch
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.device.type == "cuda"):
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
        )
    answers: list[str] = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return answers


def trainer_config(arguments: argparse.Namespace) -> GRPOConfig:
    on_gpu = torch.cuda.is_available()
    batch = arguments.prompts * arguments.samples
    at_once = min(batch, arguments.at_once)
    vllm = (
        {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.25,
            "vllm_max_model_length": arguments.max_length,
        }
        if arguments.vllm
        else {}
    )
    return GRPOConfig(
        output_dir=str(arguments.out / "trainer"),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=batch // at_once,
        num_generations=arguments.samples,
        max_completion_length=arguments.new_tokens,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=arguments.warmup,
        weight_decay=0.0,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        loss_type="dapo",
        temperature=1.0,
        gradient_checkpointing=arguments.recompute,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
        **vllm,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, evaluation not counted")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--num-eval", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--at-once", type=int, default=32, help="sequences of one backward pass")
    parser.add_argument("--recompute", action="store_true", help="activations are recomputed: less memory")
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trained-only", action="store_true", help="do not evaluate the model before training"
    )
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left", trust_remote_code=False)
    log = Log(arguments.out / "log.jsonl")
    watch = Watch(arguments, log=log, tokenizer=tokenizer)

    def noted_reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        scores = reward(completions, answer)
        watch.rewards.extend(scores)
        return scores

    log.add(
        what=f"TRL {trl.__version__}{' with vLLM' if arguments.vllm else ''}",
        transformers=transformers.__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        arguments={name: str(value) for name, value in vars(arguments).items()},
    )
    GRPOTrainer(
        model=str(arguments.model),
        processing_class=tokenizer,
        reward_funcs=noted_reward,
        train_dataset=Dataset.from_list(list(rows(arguments.data / "train.jsonl"))),
        callbacks=[watch],
        args=trainer_config(arguments),
    ).train()


if __name__ == "__main__":
    main()
