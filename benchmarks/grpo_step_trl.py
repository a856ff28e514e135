"""The TRL side of `grpo_step.py`: one GRPOTrainer run, timed step by step.

Runs in an environment of its own that has TRL. Reads one JSON order from its standard input and writes as its last line
`{"times": […], "generate_s": […], "completion_tokens": …, "version": …}`: the moments at which steps ended, and what of
each was generation. An order with `folder` trains the model of that folder on the GPU, with TRL's own generation or
with vLLM in the same process (`vllm`); one without builds a small model on the CPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.times.append(time.time())


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character, and two special ones."""
    vocabulary = {
        "<pad>": 0,
        "<eos>": 1,
        **{character: number for number, character in enumerate(alphabet, 2)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def small_model(order: dict[str, Any]) -> LlamaForCausalLM:
    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=order["vocab_size"],
            hidden_size=order["hidden_size"],
            intermediate_size=order["intermediate_size"],
            num_hidden_layers=order["num_layers"],
            num_attention_heads=order["num_heads"],
            num_key_value_heads=order["num_heads"],
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def options(order: dict[str, Any]) -> dict[str, Any]:
    """Those of the device; the rest is the same."""
    batch = order["num_prompts"] * order["num_samples"]
    if "folder" not in order:
        return {
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": batch,
            "learning_rate": 5e-4,
        }
    at_once = min(batch, order["sequences_at_once"])
    given = {
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": batch // at_once,
        "learning_rate": 1e-6,
        "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"},
    }
    if order["vllm"]:
        given |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": order["vllm_memory_share"],
            "vllm_max_model_length": order["prompt_tokens"] + order["completion_tokens"],
        }
    return given


def timed(trainer: GRPOTrainer, into: list[float]) -> None:
    """Note how long each generation takes, weights for vLLM included."""
    generate = trainer._generate

    def measured(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = generate(*arguments, **keywords)
        into.append(time.perf_counter() - start)
        return result

    trainer._generate = measured


def main() -> None:
    order = json.load(sys.stdin)
    if "folder" in order:
        model: Any = order["folder"]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(order["folder"], padding_side="left")
    else:
        model, tokenizer = small_model(order), character_tokenizer(order["alphabet"])
        assert len(tokenizer("0a1b")["input_ids"]) == 4
    lengths: list[int] = []
    generate_s: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": order["prompts"]}),
            callbacks=[watch],
            args=GRPOConfig(
                output_dir=folder,
                num_generations=order["num_samples"],
                max_completion_length=order["completion_tokens"],
                max_steps=order["steps"],
                beta=0.0,
                gradient_checkpointing=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
                **options(order),
            ),
        )
        timed(trainer, generate_s)
        trainer.train()
    answer = {
        "times": watch.times,
        "generate_s": generate_s,
        "completion_tokens": statistics.mean(lengths),
        "version": trl.__version__,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
