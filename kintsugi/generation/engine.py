"""Continuous batching over fixed slots: every step feeds one token to every slot, whatever the slots hold.

A free slot takes the next waiting request, is fed its prompt token by token, and from the prompt's last token on
is fed what it sampled, until its end token or its length limit. Prompts pass through the same fixed-shape step as
everything else, and so do the tokens of a request that is resumed: a sample's bits then depend on its own tokens and
noise only, not on its slot, its neighbours, the engine or an interruption.

All state of the slots lives in tensors that are allocated once and updated in place. The host looks at the device
once per step, and only at steps that can end a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.errors import DataError, ModelError, UserError
from kintsugi.generation.noise import uniforms
from kintsugi.generation.sampler import sample
from kintsugi.model.transformer import Transformer
from kintsugi.types import MIN_TEMPERATURE, Finish

MAX_STOP_TOKENS = 16
"""End tokens of the model and stop tokens of a request together."""

_NEVER = np.iinfo(np.int64).max
_ENDED_BY_STOP = 2
_NUM_FIELDS = 6


RequestId = tuple[int, int]
"""(what the caller numbers its requests by, sample); unique among the requests that an engine holds."""


class Tokens(NamedTuple):
    """Sampled tokens of one request: ids (int32), log-probabilities (float32), weight versions (int32)."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def followed_by(self, more: Tokens) -> Tokens:
        return Tokens(
            np.concatenate([self.ids, more.ids]),
            np.concatenate([self.logprobs, more.logprobs]),
            np.concatenate([self.versions, more.versions]),
        )


NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to be made: `Request((17, 3), prompt=ids, noise_key=…, temperature=1.0, max_new_tokens=5)`."""

    id: RequestId
    prompt: NDArray[np.int32]
    noise_key: int
    """Of `noise.stream_key`."""
    temperature: float
    max_new_tokens: int
    """`produced` counts towards it."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    produced: Tokens = NO_TOKENS
    """Tokens of an interrupted attempt; they are replayed, not sampled again."""

    @property
    def num_forced(self) -> int:
        return len(self.prompt) + len(self.produced.ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True, eq=False)
class Output:
    """What became of a request. `finish` is None when it was interrupted."""

    request: Request
    tokens: Tokens
    finish: Finish | None

    @property
    def finite(self) -> bool:
        """False when the model's logits overflowed; the tokens then mean nothing."""
        return bool(np.isfinite(self.tokens.logprobs).all())

    def resume(self) -> Request:
        """The request that continues an interrupted one from its last token."""
        assert self.finish is None, f"request {self.request.id} ended by {self.finish} and cannot be resumed"
        return replace(self.request, produced=self.tokens)


class Engine:
    """Samples with one model. Not thread-safe: whoever calls `step` also submits, interrupts and loads."""

    def __init__(
        self, model: Transformer, *, slots: int, max_length: int, end_token_ids: Sequence[int] = ()
    ) -> None:
        self._model = model
        self._cache = model.new_cache(num_slots=slots, max_length=max_length)
        self._max_length = max_length
        self._end_token_ids = tuple(end_token_ids)
        self._version = -1
        self._num_steps = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free = list(reversed(range(slots)))
        self._state = _SlotState(slots, max_length=max_length, device=model.device)
        self._samples_from_step = np.full(slots, _NEVER, dtype=np.int64)
        self._started_at_step = np.zeros(slots, dtype=np.int64)

    @property
    def version(self) -> int:
        """Of the weights that the next step uses; -1 before the first `load`."""
        return self._version

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def num_requests(self) -> int:
        """Waiting and running."""
        return len(self._waiting) + len(self._running)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; they start in this order as slots become free. Refuses all of them if it refuses one."""
        requests = list(requests)
        for request in requests:
            self._check(request)
        self._waiting.extend(requests)

    @torch.no_grad()
    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy new weights into the model's memory, between two steps. Running requests go on with the cache they
        have; their next token carries the new version."""
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != tensors.keys():
            different = sorted(parameters.keys() ^ tensors.keys())
            raise ModelError(
                f"expected weights of exactly the model's parameters, got a difference in {different[:4]}"
            )
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ModelError(
                    f"expected weight `{name}` of shape {tuple(parameter.shape)}, got {tuple(tensors[name].shape)}"
                )
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
        self._version = version

    def interrupt(self, request_id: RequestId) -> Output | None:
        """Take a request out, with what it has produced; None if the engine does not hold it."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return Output(request, request.produced, None)
        for slot, request in self._running.items():
            if request.id == request_id:
                num_fed = self._num_steps - int(self._started_at_step[slot])
                length = max(request.num_forced, num_fed + 1)
                (output,) = self._release([slot], lengths=[length], finishes=[None])
                return output
        return None

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Feed one token to every slot, sample where a prompt is through, and give the requests that ended."""
        self._admit()
        if not self._running:
            return []
        state = self._state
        hidden = self._model.forward_decode(state.tokens, state.positions, self._cache)
        finished: list[Output] = []
        if self._samples_from_step.min() <= self._num_steps:
            ended = state.sample(self._model.logits(hidden), version=self._version)
            self._num_steps += 1
            finished = self._collect(ended)
        else:
            self._num_steps += 1
        state.advance()
        return finished

    def _check(self, request: Request) -> None:
        name = "/".join(map(str, request.id))
        if len(request.prompt) == 0:
            raise DataError(f"expected a prompt of at least one token, got none for {name}")
        if request.max_new_tokens < 1:
            raise UserError(
                f"expected `max_new_tokens` of at least 1, got {request.max_new_tokens} for {name}"
            )
        if request.max_length > self._max_length:
            raise DataError(
                f"expected prompt + `max_new_tokens` within `generation.max_length` {self._max_length}, "
                f"got {len(request.prompt)} + {request.max_new_tokens} for {name}"
            )
        if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
            raise UserError(
                f"expected `temperature` 0 or at least {MIN_TEMPERATURE}, got {request.temperature} for {name}"
            )
        if len(self._end_token_ids) + len(request.stop_token_ids) > MAX_STOP_TOKENS:
            raise UserError(f"expected at most {MAX_STOP_TOKENS} end and stop tokens, got more for {name}")
        vocab_size = self._model.config.vocab_size
        if request.prompt.min() < 0 or request.prompt.max() >= vocab_size:
            raise DataError(
                f"expected prompt tokens within the vocabulary of {vocab_size}, got others for {name}"
            )
        if any(not 0 <= token < vocab_size for token in request.stop_token_ids):
            raise UserError(
                f"expected stop tokens within the vocabulary of {vocab_size}, got others for {name}"
            )
        assert len(request.produced.ids) < request.max_new_tokens, f"{name} is already finished"

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served."""
        num_admitted = min(len(self._free), len(self._waiting))
        if num_admitted == 0:
            return
        slots = [self._free.pop() for _ in range(num_admitted)]
        requests = [self._waiting.popleft() for _ in range(num_admitted)]
        for slot, request in zip(slots, requests, strict=True):
            self._running[slot] = request
            self._started_at_step[slot] = self._num_steps
            self._samples_from_step[slot] = self._num_steps + request.num_forced - 1
        self._state.start(slots, requests=requests, end_token_ids=self._end_token_ids)

    def _collect(self, ended: Tensor) -> list[Output]:
        """The requests whose rows `ended` names: 0 goes on, 1 reached its limit, 2 sampled an end token."""
        codes = ended.cpu().numpy()
        slots = np.flatnonzero(codes).tolist()
        if not slots:
            return []
        lengths = [self._num_steps - int(self._started_at_step[slot]) + 1 for slot in slots]
        finishes = [Finish.EOS if codes[slot] == _ENDED_BY_STOP else Finish.LENGTH for slot in slots]
        return self._release(slots, lengths=lengths, finishes=finishes)

    def _release(
        self, slots: list[int], *, lengths: Sequence[int], finishes: Sequence[Finish | None]
    ) -> list[Output]:
        rows = self._state.stop(slots)
        outputs = []
        for row, (slot, length, finish) in enumerate(zip(slots, lengths, finishes, strict=True)):
            request = self._running.pop(slot)
            new = slice(request.num_forced, length)
            sampled = Tokens(rows.ids[row, new], rows.logprobs[row, new], rows.versions[row, new])
            outputs.append(Output(request, request.produced.followed_by(sampled), finish))
            self._samples_from_step[slot] = _NEVER
            self._free.append(slot)
            if not outputs[-1].finite:
                self._clear(slot)
        return outputs

    def _clear(self, slot: int) -> None:
        """Values that are not finite would reach the slot's next request through the mask."""
        for layer in range(self._model.config.num_layers):
            for stored in self._cache.read(layer):
                stored[slot].zero_()


class _SlotState:
    """One row per slot, on the model's device.

    `sequences`, `logprobs` and `versions` have a column per position and one more, which takes what is sampled while
    the next token is already known.
    """

    def __init__(self, slots: int, *, max_length: int, device: torch.device) -> None:
        self._spare_column = max_length
        self._fields = torch.zeros(_NUM_FIELDS + MAX_STOP_TOKENS, slots, dtype=torch.int64, device=device)
        (
            self.tokens,
            self.positions,
            self._advance,
            self._num_forced,
            self._max_lengths,
            self._noise_keys,
            *_,
        ) = self._fields.unbind()
        self._stop_token_ids = self._fields[_NUM_FIELDS:]
        self._temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        columns = (slots, max_length + 1)
        self._sequences = torch.zeros(columns, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(columns, dtype=torch.float32, device=device)
        self._versions = torch.zeros(columns, dtype=torch.int32, device=device)
        self._num_forced.fill_(max_length + 1)

    def start(self, slots: list[int], *, requests: Sequence[Request], end_token_ids: tuple[int, ...]) -> None:
        fields = np.zeros((self._fields.shape[0], len(slots)), dtype=np.int64)
        fields[_NUM_FIELDS:] = -1
        sequences = np.zeros((len(slots), self._spare_column + 1), dtype=np.int64)
        for row, request in enumerate(requests):
            forced = sequences[row, : request.num_forced]
            forced[: len(request.prompt)] = request.prompt
            forced[len(request.prompt) :] = request.produced.ids
            fields[:_NUM_FIELDS, row] = (
                forced[0],
                0,
                1,
                request.num_forced,
                request.max_length,
                request.noise_key,
            )
            stops = (*end_token_ids, *request.stop_token_ids)
            fields[_NUM_FIELDS : _NUM_FIELDS + len(stops), row] = stops
        temperatures = torch.tensor([request.temperature for request in requests], dtype=torch.float32)
        device = self._fields.device
        where = torch.tensor(slots, device=device)
        self._fields.index_copy_(1, where, torch.from_numpy(fields).to(device))
        self._sequences.index_copy_(0, where, torch.from_numpy(sequences).to(device))
        self._temperatures.index_copy_(0, where, temperatures.to(device))

    def sample(self, logits: Tensor, *, version: int) -> Tensor:
        """Write down a token for every row whose next token is open, and say which rows end with it."""
        next_positions = self.positions + 1
        sampled = sample(
            logits,
            temperatures=self._temperatures,
            uniforms=uniforms(self._noise_keys, counters=next_positions),
        )
        is_open = next_positions >= self._num_forced
        column = torch.where(is_open, next_positions, self._spare_column).unsqueeze(-1)
        self._sequences.scatter_(1, column, sampled.tokens.unsqueeze(-1))
        self._logprobs.scatter_(1, column, sampled.logprobs.unsqueeze(-1))
        self._versions.scatter_(1, column, version)
        stopped = (self._stop_token_ids == sampled.tokens).any(dim=0)
        ended = torch.where(stopped, _ENDED_BY_STOP, next_positions + 1 >= self._max_lengths)
        return ended.mul_(is_open)

    def advance(self) -> None:
        """Move every running row to its next token; idle rows feed token 0 at position 0."""
        self.positions.add_(self._advance)
        torch.gather(self._sequences, 1, self.positions.unsqueeze(-1), out=self.tokens.unsqueeze(-1))

    def stop(self, slots: list[int]) -> Tokens:
        """Make rows idle; gives what they hold, a row per slot and a column per position."""
        where = torch.tensor(slots, device=self._fields.device)
        idle = torch.zeros(self._fields.shape[0], len(slots), dtype=torch.int64)
        idle[3] = self._spare_column + 1
        self._fields.index_copy_(1, where, idle.to(self._fields.device))
        return Tokens(
            self._sequences.index_select(0, where).cpu().numpy().astype(np.int32),
            self._logprobs.index_select(0, where).cpu().numpy(),
            self._versions.index_select(0, where).cpu().numpy(),
        )
