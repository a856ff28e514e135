"""Loss and gradient of TRL's own trainers on one small batch, as numbers that a test compares ours with.

Run in the environment of `benchmarks/constraints-trl.txt` (`make trl-losses`); writes
`tests/unit/training/trl_losses.json`, which needs neither TRL nor transformers to be read. Nothing of the trainers is
reimplemented here: they are built as a user would, and their `compute_loss` is given a batch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn

FIXTURE = Path(__file__).parents[1] / "tests" / "unit" / "training" / "trl_losses.json"
VOCABULARY = [f"t{index}" for index in range(9)] + ["<pad>", "<eos>"]
PAD = VOCABULARY.index("<pad>")
MODEL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "pad_token_id": PAD,
    "eos_token_id": PAD + 1,
}
SEQUENCES: list[tuple[list[int], list[int], list[int]]] = [
    ([1, 2, 3], [4, 5, 10], [1, 1, 1]),
    ([1, 2, 3], [6, 7, 8, 0, 10], [1, 1, 0, 1, 1]),
    ([4, 0], [2, 10], [1, 1]),
    ([4, 0], [3, 5, 1, 2], [1, 1, 1, 1]),
]
"""Prompt, completion, and where the policy chose the token: one of them has a gap, as between two turns."""
ADVANTAGES = [0.7, -1.3, 1.1, -0.4]
MAX_COMPLETION_LENGTH = 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def new_model(*, with_score: bool = False) -> Any:
    config = transformers.LlamaConfig(**MODEL, num_labels=1)
    kind = transformers.LlamaForSequenceClassification if with_score else transformers.LlamaForCausalLM
    model = kind(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.7 * values)
    return model


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def arguments(kind: type, folder: str, **options: Any) -> Any:
    return kind(
        output_dir=folder, use_cpu=True, report_to="none", gradient_checkpointing=False, bf16=False, **options
    )


def padded(rows: list[list[int]], *, value: int, left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    filled = [
        [value] * (longest - len(row)) + row if left else row + [value] * (longest - len(row)) for row in rows
    ]
    return torch.tensor(filled)


def policy_batch() -> dict[str, Tensor]:
    """Sampler and reference differ from the policy by seeded noise, far enough that some ratios are clipped."""
    prompts, completions, masks = (list(column) for column in zip(*SEQUENCES, strict=True))
    chosen = padded(masks, value=0)
    batch = {
        "prompt_ids": padded(prompts, value=PAD, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], value=0, left=True),
        "completion_ids": padded(completions, value=PAD),
        "completion_mask": padded([[1] * len(row) for row in completions], value=0),
        "tool_mask": chosen,
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": chosen.sum(),
    }
    generator = torch.Generator().manual_seed(1)
    logprobs = policy_logprobs(batch)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        batch[name] = logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator)
    return batch


@torch.no_grad()
def policy_logprobs(batch: Mapping[str, Tensor]) -> Tensor:
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = new_model()(input_ids=tokens, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    every = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return every[:, -batch["completion_ids"].shape[1] :]


def measured(loss: Tensor, model: nn.Module) -> dict[str, Any]:
    loss.backward()
    gradients = {
        name: rounded(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": float(loss.detach()), "gradient": gradients}


def rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.8g}") for value in values.flatten().tolist()]


def grpo(folder: str, batch: Mapping[str, Tensor], **options: Any) -> dict[str, Any]:
    """From a folder, because with a KL the trainer loads a reference from where the model came from."""
    saved = f"{folder}/model"
    new_model().save_pretrained(saved)
    trainer = trl.GRPOTrainer(
        model=transformers.LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=arguments(
            trl.GRPOConfig,
            folder,
            max_completion_length=MAX_COMPLETION_LENGTH,
            num_generations=2,
            per_device_train_batch_size=4,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t1 t2", "t3"]}),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    return measured(trainer.compute_loss(trainer.model, dict(batch)), trainer.model)


def rloo(folder: str, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Its loss knows no gaps, so here every token of a completion counts."""
    trainer = trl.RLOOTrainer(
        model=new_model(),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=arguments(
            trl.RLOOConfig,
            folder,
            num_generations=2,
            per_device_train_batch_size=4,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t1 t2", "t3"]}),
        processing_class=tokenizer(),
    )
    old = (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1)
    return measured(trainer.compute_loss(trainer.model, {**batch, "old_logps": old}), trainer.model)


def pairs_batch() -> dict[str, Tensor]:
    """Chosen: sequences 0 and 2; rejected: 1 and 3."""
    ordered = [SEQUENCES[index] for index in (0, 2, 1, 3)]
    rows = [prompt + completion for prompt, completion, _ in ordered]
    return {
        "input_ids": padded(rows, value=PAD),
        "attention_mask": padded([[1] * len(row) for row in rows], value=0),
        "completion_mask": padded(
            [[0] * len(prompt) + [1] * len(completion) for prompt, completion, _ in ordered], value=0
        ),
    }


PAIRS = {"prompt": ["t1", "t2"], "chosen": [" t3", " t4"], "rejected": [" t5", " t6"]}
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-8.5, -3.5], [-11.0, -9.0]
DPO_BETA = 0.5


def dpo(folder: str) -> dict[str, Any]:
    trainer = trl.DPOTrainer(
        model=new_model(),
        ref_model=new_model(),
        args=arguments(trl.DPOConfig, folder, beta=DPO_BETA),
        train_dataset=Dataset.from_dict(PAIRS),
        processing_class=tokenizer(),
    )
    trainer.precompute_ref_logps = True
    batch = {
        **pairs_batch(),
        "ref_chosen_logps": torch.tensor(REFERENCE_CHOSEN),
        "ref_rejected_logps": torch.tensor(REFERENCE_REJECTED),
    }
    return measured(trainer.compute_loss(trainer.model, batch), trainer.model)


def reward_model(folder: str) -> dict[str, Any]:
    trainer = trl.RewardTrainer(
        model=new_model(with_score=True),
        args=arguments(trl.RewardConfig, folder),
        train_dataset=Dataset.from_dict(PAIRS),
        processing_class=tokenizer(),
    )
    batch = pairs_batch()
    del batch["completion_mask"]
    return measured(trainer.compute_loss(trainer.model, batch), trainer.model)


def sft(folder: str) -> dict[str, Any]:
    trainer = trl.SFTTrainer(
        model=new_model(),
        args=arguments(trl.SFTConfig, folder),
        train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"], "completion": [" t3", " t4"]}),
        processing_class=tokenizer(),
    )
    batch = pairs_batch()
    completion_mask = batch.pop("completion_mask")
    batch["labels"] = batch["input_ids"].masked_fill(completion_mask == 0, -100)
    return measured(trainer.compute_loss(trainer.model, batch), trainer.model)


def main() -> None:
    batch = policy_batch()
    valid = batch["completion_mask"].bool()
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "grpo": grpo(folder, batch, loss_type="grpo", beta=0.0),
            "grpo with kl": grpo(folder, batch, loss_type="grpo", beta=0.1),
            "dapo": grpo(folder, batch, loss_type="dapo", beta=0.0),
            "dapo with kl and entropy": grpo(folder, batch, loss_type="dapo", beta=0.1, entropy_coef=0.05),
            "dr_grpo": grpo(folder, batch, loss_type="dr_grpo", beta=0.0),
            "gspo": grpo(folder, batch, loss_type="grpo", beta=0.0, importance_sampling_level="sequence"),
            "rloo": rloo(folder, batch),
            "sft": sft(folder),
            "reward_model": reward_model(folder),
            "dpo": dpo(folder),
        }
    fixture = {
        "made_with": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "model": MODEL,
        "weights": {name: rounded(values) for name, values in new_model(with_score=True).named_parameters()},
        "samples": [
            {
                "prompt": prompt,
                "completion": completion,
                "chosen_by_policy": chosen,
                "old_logprobs": rounded(batch["old_per_token_logps"][index][valid[index]]),
                "reference_logprobs": rounded(batch["ref_per_token_logps"][index][valid[index]]),
                "advantage": ADVANTAGES[index],
            }
            for index, (prompt, completion, chosen) in enumerate(SEQUENCES)
        ],
        "pairs": {
            "chosen": [0, 2],
            "rejected": [1, 3],
            "reference_chosen": REFERENCE_CHOSEN,
            "reference_rejected": REFERENCE_REJECTED,
            "beta": DPO_BETA,
        },
        "clip": [CLIP_LOW, CLIP_HIGH],
        "max_new_tokens": MAX_COMPLETION_LENGTH,
        "cases": cases,
    }
    FIXTURE.write_text(
        json.dumps(fixture, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8"
    )
    for name, case in cases.items():
        print(f"{name:<26} loss {case['loss']:+.7f}")


if __name__ == "__main__":
    main()
