"""The TRL side of `grpo_step.py`: one GRPOTrainer run, timed step by step.

Runs in an environment of its own that has TRL. Reads one JSON order from its standard input and writes as its last line
`{"times": […], "completion_tokens": …, "version": …}`: the moments at which steps ended.
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


def main() -> None:
    order = json.load(sys.stdin)
    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    tokenizer = character_tokenizer(order["alphabet"])
    assert len(tokenizer("0a1b")["input_ids"]) == 4
    model = LlamaForCausalLM(
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
    lengths: list[int] = []

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
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=order["num_prompts"] * order["num_samples"],
                num_generations=order["num_samples"],
                max_completion_length=order["completion_tokens"],
                max_steps=order["steps"],
                beta=0.0,
                learning_rate=5e-4,
                gradient_checkpointing=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
        )
        trainer.train()
    answer = {"times": watch.times, "completion_tokens": statistics.mean(lengths), "version": trl.__version__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
