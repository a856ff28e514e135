from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import ActorSection, CriticSection, ReferenceSection
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.snapshots import CopyCounters
from kintsugi.training.state import TrainingState
from tests.unit.training.world import TINY, StoredTensors, new_stage, new_state

ACTOR = ActorSection(learning_rate=0.01, weight_decay=0.1, schedule="linear", max_grad_norm=1e9)
STAGE = new_stage(actor=ACTOR, steps=10)


def gradient(state: TrainingState, seed: int) -> Tensor:
    """Random, except where it belongs to no parameter."""
    found = torch.randn(state.gradient.shape, generator=torch.Generator().manual_seed(seed))
    for part in state._layout.parts.values():
        for filling in part.fillings:
            found[filling.start : filling.stop] = 0
    return found


def advance(state: TrainingState, step: int) -> None:
    state.begin_update()
    state.update(gradient(state, step))
    state.end_update(step)


def test_updates_agree_with_torchs_optimizer() -> None:
    state = new_state(STAGE)
    twin = Transformer(TINY)
    initialize(twin, seed=3)
    decayed = [parameter for parameter in twin.parameters() if parameter.dim() >= 2]
    plain = [parameter for parameter in twin.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=0.01,
        betas=(ACTOR.beta1, ACTOR.beta2),
        eps=ACTOR.epsilon,
        fused=True,
    )
    for step in range(1, 4):
        flat = gradient(state, step)
        start = 0
        for parameter in decayed + plain:
            parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - (step - 1) / 10)
        optimizer.step()
        advance(state, step)
        state.commit(step)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(state.weights()[name], parameter.detach(), rtol=0, atol=1e-7)


def test_norms_and_biases_do_not_decay() -> None:
    state = new_state(STAGE)
    before = {name: tensor.clone() for name, tensor in state.weights().items()}
    state.begin_update()
    state.update(torch.zeros_like(state.gradient))
    state.end_update(1)
    state.commit(1)
    after = state.weights()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_large_gradient_is_clipped_to_the_norm_and_reported_unclipped() -> None:
    actor = ActorSection(max_grad_norm=0.5)
    clipped, scaled = new_state(new_stage(actor=actor)), new_state(new_stage(actor=actor))
    flat = gradient(clipped, 0)
    norm = float(torch.linalg.vector_norm(flat.double()))
    clipped.begin_update()
    assert clipped.update(flat.clone()).grad_norm == pytest.approx(norm)
    scaled.begin_update()
    scaled.update(flat * (0.5 / norm))
    clipped.end_update(1)
    scaled.end_update(1)
    assert clipped.digest() == scaled.digest()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad: float) -> None:
    state = new_state(STAGE)
    before = {name: tensor.clone() for name, tensor in state.weights().items()}
    flat = gradient(state, 0)
    flat[5] = bad
    state.begin_update()
    assert not state.update(flat).applied
    state.end_update(1)
    state.commit(1)
    assert state.counters == CopyCounters(step=1, stage="grpo", updates=0, skipped=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.weights().items())


def test_rollback_restores_the_committed_state_exactly() -> None:
    state = new_state(STAGE)
    advance(state, 1)
    state.commit(1)
    committed = state.digest()
    advance(state, 2)
    assert state.prepared_step == 2 and state.digest() != committed
    state.rollback(1)
    assert (state.digest(), state.counters.step) == (committed, 1)
    advance(state, 2)
    again = state.digest()
    twin = new_state(STAGE)
    for step in (1, 2):
        advance(twin, step)
        twin.commit(step)
    assert again == twin.digest()


def test_a_rank_that_missed_the_commit_adopts_it_by_rollback() -> None:
    state = new_state(STAGE)
    advance(state, 1)
    prepared = state.digest()
    state.rollback(1)
    assert (state.committed_step, state.digest()) == (1, prepared)


def test_an_update_that_did_not_end_shows_and_is_undone() -> None:
    state = new_state(STAGE)
    before = state.digest()
    state.begin_update()
    state.update(gradient(state, 0))
    assert state.half_updated and state.prepared_step is None
    with pytest.raises(RefusedError, match="cannot be committed"):
        state.commit(1)
    state.rollback(0)
    assert (state.digest(), bool(state.half_updated)) == (before, False)


def test_only_the_prepared_step_can_be_committed_and_twice_is_once() -> None:
    state = new_state(STAGE)
    with pytest.raises(RefusedError, match="step 1 cannot be committed"):
        state.commit(1)
    advance(state, 1)
    state.commit(1)
    digest = state.digest()
    state.commit(1)
    assert state.digest() == digest
    with pytest.raises(RefusedError, match="can return to step 1 only"):
        state.rollback(0)


def test_what_is_published_is_committed() -> None:
    state = new_state(STAGE)
    before = {name: tensor.clone() for name, tensor in state.weights().items()}
    advance(state, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.weights().items())
    state.commit(1)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in state.weights().items())


def test_a_new_stage_keeps_the_weights_and_forgets_the_optimizer() -> None:
    state = new_state(new_stage(name="sft", actor=ACTOR, steps=1))
    advance(state, 1)
    state.commit(1)
    weights = {name: tensor.clone() for name, tensor in state.weights().items()}
    state.start_stage(new_stage(first_step=2, actor=ACTOR), step=1)
    assert state.counters == CopyCounters(step=1, stage="grpo", updates=0)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state.weights().items())
    moments = [tensor for name, tensor in state.tensors().items() if name.startswith("moment")]
    assert all(not bool(tensor.any()) for tensor in moments)
    digest = state.digest()
    state.start_stage(new_stage(first_step=2, actor=ACTOR), step=1)
    assert state.digest() == digest


def test_a_stage_starts_only_where_it_begins() -> None:
    state = new_state(new_stage(name="sft", steps=2))
    advance(state, 1)
    with pytest.raises(RefusedError, match="not committed"):
        state.start_stage(new_stage(first_step=3), step=1)
    state.commit(1)
    with pytest.raises(RefusedError, match="begins at step 3, this rank stands at 1"):
        state.start_stage(new_stage(first_step=3), step=1)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_continues_with_the_same_bits(beta: float, dtype: torch.dtype) -> None:
    stage = new_stage(actor=ACTOR, beta=beta)
    state = new_state(stage, dtype=dtype)
    for step in (1, 2):
        advance(state, step)
        state.commit(step)
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    model = Transformer(TINY)
    initialize(model, seed=99)
    restored = TrainingState(model, compute_dtype=dtype)
    restored.restore(StoredTensors(saved), counters=state.committed_counters, stage=stage)
    assert restored.digest() == state.digest() and restored.committed_step == 2
    advance(state, 3)
    advance(restored, 3)
    assert restored.digest() == state.digest()
    for name, parameter in state.model.named_parameters():
        assert torch.equal(dict(restored.model.named_parameters())[name], parameter)
    if beta:
        for name, parameter in state.reference_model.named_parameters():
            assert torch.equal(dict(restored.reference_model.named_parameters())[name], parameter)


def test_the_state_of_another_model_is_refused_by_name_and_changes_nothing() -> None:
    state = new_state(STAGE)
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    before = state.digest()
    missing = {name: tensor for name, tensor in saved.items() if name != "weights/model.norm.weight"}
    with pytest.raises(IntegrityError, match=r"weights/model\.norm\.weight"):
        state.restore(StoredTensors(missing), counters=CopyCounters(stage="grpo"), stage=STAGE)
    with pytest.raises(IntegrityError, match=r"expected moment1/model\.norm\.weight"):
        state.restore(
            StoredTensors({**saved, "moment1/model.norm.weight": torch.zeros(3)}),
            counters=CopyCounters(stage="grpo"),
            stage=STAGE,
        )
    assert state.digest() == before


def test_the_reference_weights_are_part_of_every_digest() -> None:
    plain, penalised = new_state(new_stage(actor=ACTOR)), new_state(new_stage(actor=ACTOR, beta=0.1))
    assert plain.counters.reference == "" and penalised.counters.reference != ""
    assert plain.digest() != penalised.digest()
    for state in (plain, penalised):
        advance(state, 1)
        state.commit(1)
    assert plain.digest() != penalised.digest()


def test_a_state_whose_reference_weights_were_changed_is_refused_and_changes_nothing() -> None:
    stage = new_stage(actor=ACTOR, beta=0.1)
    state, other = new_state(stage), new_state(stage)
    advance(state, 1)
    state.commit(1)
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    saved["reference/model.norm.weight"][0] += 1
    before = other.digest()
    with pytest.raises(IntegrityError, match="the reference weights of stage 'grpo' hash to"):
        other.restore(StoredTensors(saved), counters=state.committed_counters, stage=stage)
    assert (other.digest(), other.committed_step) == (before, 0)


def test_a_state_that_was_saved_without_its_references_digest_is_still_restored() -> None:
    stage = new_stage(actor=ACTOR, beta=0.1)
    state, other = new_state(stage), new_state(stage)
    advance(state, 1)
    state.commit(1)
    counters = msgspec.structs.replace(state.committed_counters, reference="")
    other.restore(StoredTensors(state.tensors()), counters=counters, stage=stage)
    assert other.digest() == state.digest()


def test_the_critic_has_an_optimizer_of_its_own_that_counts_for_itself() -> None:
    """Both models get the same gradient; the actor's first update comes after the critic's second one."""
    critic = CriticSection(learning_rate=0.02, warmup_steps=2)
    stage = new_stage(name="ppo", actor=ACTOR, critic=critic, steps=10)
    state = new_state(stage)
    weight = torch.nn.Parameter(critic_weights(state)["value_head.weight"].clone())
    optimizer = torch.optim.AdamW(
        [weight], lr=0.02, betas=(ACTOR.beta1, ACTOR.beta2), eps=ACTOR.epsilon, weight_decay=0.1, fused=True
    )
    given = state.gradient_of("critic").clone().normal_(generator=torch.Generator().manual_seed(1))
    for step in (1, 2, 3):
        state.begin_update()
        if not state.actor_waits(step):
            state.update(torch.ones_like(state.gradient_of("actor")))
        state.pause_update()
        state.begin_update()
        update = state.update(given, part="critic")
        state.end_update(step)
        state.commit(step)
        optimizer.param_groups[0]["lr"] = update.learning_rate
        weight.grad = slot_of(state, "value_head.weight", given)
        optimizer.step()
    assert (state.counters.updates, state.counters.critic_updates) == (1, 3)
    assert update.learning_rate == pytest.approx(0.02 * 0.8)
    torch.testing.assert_close(critic_weights(state)["value_head.weight"], weight.detach(), rtol=0, atol=1e-6)


def critic_weights(state: TrainingState) -> dict[str, Tensor]:
    return dict(state.critic.named_parameters())


def slot_of(state: TrainingState, name: str, gradient: Tensor) -> Tensor:
    """A critic's parameter's share of its gradient."""
    state.gradient_of("critic").copy_(gradient)
    found = critic_weights(state)[name].grad
    assert found is not None
    return found.clone()


def test_each_models_gradient_is_clipped_by_its_own_norm() -> None:
    stage = new_stage(name="ppo", actor=ActorSection(max_grad_norm=1.0))
    alone, both = new_state(stage), new_state(stage)
    for state in (alone, both):
        state.begin_update()
        state.update(torch.full_like(state.gradient_of("critic"), 1e-6), part="critic")
    both.update(torch.full_like(both.gradient_of("actor"), 1e6))
    for name, tensor in critic_weights(alone).items():
        assert torch.equal(critic_weights(both)[name], tensor)


def test_a_gradient_that_is_not_finite_is_skipped_for_its_own_model_only() -> None:
    state = new_state(new_stage(name="ppo"))
    state.begin_update()
    assert not state.update(torch.full_like(state.gradient_of("critic"), float("nan")), part="critic").applied
    assert state.update(torch.ones_like(state.gradient_of("actor"))).applied
    state.end_update(1)
    counters = state.counters
    assert (counters.updates, counters.skipped, counters.critic_updates, counters.critic_skipped) == (
        1,
        0,
        0,
        1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moving_reference_follows_the_actor_and_goes_back_with_it(dtype: torch.dtype) -> None:
    stage = new_stage(actor=ACTOR, beta=0.1, reference=ReferenceSection(moving_average=0.75))
    state = new_state(stage, dtype=dtype)
    name = "model.norm.weight"
    expected = state.weights()[name].float().clone()
    for step in (1, 2):
        advance(state, step)
        state.commit(step)
        expected = 0.75 * expected + 0.25 * state.tensors()[f"weights/{name}"]
    torch.testing.assert_close(state.tensors()[f"reference/{name}"], expected)
    committed = dict(state.reference_model.named_parameters())[name].clone()
    torch.testing.assert_close(committed, expected.to(dtype))
    advance(state, 3)
    assert not torch.equal(dict(state.reference_model.named_parameters())[name], committed)
    state.rollback(2)
    assert torch.equal(dict(state.reference_model.named_parameters())[name], committed)


def test_a_copied_reference_is_replaced_every_so_many_steps() -> None:
    stage = new_stage(actor=ACTOR, beta=0.1, reference=ReferenceSection(copy_every=2), first_step=1)
    state = new_state(stage)

    def distance() -> float:
        actor = state.weights()
        return max(
            float((tensor - actor[name]).abs().max())
            for name, tensor in state.reference_model.named_parameters()
        )

    distances = []
    for step in (1, 2, 3, 4):
        advance(state, step)
        state.commit(step)
        distances.append(distance())
    assert [each == 0 for each in distances] == [False, True, False, True]


def test_an_actor_is_published_without_its_critic() -> None:
    state = new_state(new_stage(name="ppo"))
    assert state.weights().keys() == dict(state.model.named_parameters()).keys()
    assert "moment2/critic.value_head.weight" in state.tensors()


def test_a_rollback_measures_the_reference_weights_too() -> None:
    state = new_state(new_stage(actor=ACTOR, beta=0.1))
    weight = next(state.reference_model.parameters())
    before = weight.clone()
    weight[0] += 1
    state.rollback(0)
    assert torch.equal(weight, before)


def test_an_update_reports_how_far_it_changed_the_weights() -> None:
    state = new_state(STAGE)
    before = torch.cat([tensor.flatten().clone() for tensor in state.weights().values()])
    state.begin_update()
    update = state.update(gradient(state, 1))
    state.end_update(1)
    state.commit(1)
    after = torch.cat([tensor.flatten() for tensor in state.weights().values()])
    expected = torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before)
    assert float(update.ratio) == pytest.approx(float(expected), rel=1e-4)


def test_an_update_that_is_skipped_changed_nothing() -> None:
    state = new_state(STAGE)
    state.begin_update()
    update = state.update(torch.full_like(state.gradient, torch.inf))
    assert (update.applied, float(update.ratio)) == (False, 0.0)
