"""All known tokens of the completions of one `Generate`, from any server: every token once, in order. Pure.

A server reports what it produces while it works (`Fragment`), and all of it again when it replies (`Completion`). If it
dies in between, the next server continues from the tokens known here; its reply must begin with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kintsugi.errors import IntegrityError
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.types import Completion, FinishReason, Fragment

_ITEM_BYTES = 4


class _Sample:
    """The columns of one completion, as in `Completion`."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = widths
        self.columns = tuple(bytearray() for _ in widths)
        self.finish: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.columns[0]) // _ITEM_BYTES


class Transcript:
    """`Transcript(request)` begins with the tokens that the request brings along."""

    def __init__(self, request: Generate) -> None:
        self._name = f"{request.ticket} turn {request.turn}"
        self._limit = request.sampling.max_new_tokens
        width = _ITEM_BYTES * request.sampling.top_logprobs
        widths = (_ITEM_BYTES, _ITEM_BYTES, _ITEM_BYTES, width, width)
        self._samples = {sample: _Sample(widths) for sample in request.wanted}
        self.num_unfinished = len(self._samples)
        for completion in request.produced:
            self.settle(completion)

    @property
    def unfinished(self) -> tuple[int, ...]:
        return tuple(number for number, sample in self._samples.items() if sample.finish is None)

    def add(self, fragments: Iterable[Fragment]) -> tuple[Fragment, ...]:
        """Add new tokens and return those that were new. A fragment that does not follow the known tokens is left out:
        an earlier one was lost, and its tokens arrive with the reply."""
        return tuple(new for fragment in fragments if (new := self._add(fragment)) is not None)

    def settle(self, completion: Completion) -> tuple[Fragment, ...]:
        """Add the completion that a server replied with, which must begin with the known tokens. Return the new
        tokens."""
        whole = Fragment(completion.sample, 0, *_columns(completion), completion.finish)
        known = self._samples.get(completion.sample)
        if known is not None and known.num_tokens > len(completion.tokens) // _ITEM_BYTES:
            raise IntegrityError(
                f"{self._where(completion.sample)}: expected the {known.num_tokens} tokens that were produced before, "
                f"got {len(completion.tokens) // _ITEM_BYTES}"
            )
        return self.add((whole,))

    def produced(self) -> tuple[Completion, ...]:
        """Tokens of the unfinished samples, with which another server continues."""
        return tuple(
            self._completion(number)
            for number, sample in self._samples.items()
            if sample.finish is None and sample.num_tokens
        )

    def completions(self) -> tuple[Completion, ...]:
        """Completions in the order in which they were requested."""
        return tuple(self._completion(number) for number in self._samples)

    def _completion(self, number: int) -> Completion:
        sample = self._samples[number]
        tokens, logprobs, versions, *top = map(bytes, sample.columns)
        return Completion(number, tokens, logprobs, versions, sample.finish, *top)

    def _add(self, fragment: Fragment) -> Fragment | None:
        columns = _columns(fragment)
        sample = self._verified(fragment, columns)
        known, end = sample.num_tokens, fragment.offset + len(fragment.tokens) // _ITEM_BYTES
        overlap = known - fragment.offset
        if overlap < 0:
            return None
        for column, more, width in zip(sample.columns, columns, sample.widths, strict=True):
            # `more` may end before the known tokens do: it is an old fragment.
            differs = not column.startswith(more[: overlap * width], fragment.offset * width)
            if differs or (sample.finish is not None and end > known):
                raise IntegrityError(
                    f"{self._where(fragment.sample)}: expected the {known} tokens that were produced before, got others"
                )
        if sample.finish is not None or end < known or (end == known and fragment.finish is None):
            return None
        new = [more[overlap * width :] for more, width in zip(columns, sample.widths, strict=True)]
        for column, more in zip(sample.columns, new, strict=True):
            column += more
        if fragment.finish is not None:
            sample.finish = fragment.finish
            self.num_unfinished -= 1
        return Fragment(fragment.sample, known, new[0], new[1], new[2], new[3], new[4], fragment.finish)

    def _verified(self, fragment: Fragment, columns: Sequence[bytes]) -> _Sample:
        """Check that a fragment belongs to a requested sample, has columns of equal length and is not too long."""
        sample = self._samples.get(fragment.sample)
        where = self._where(fragment.sample)
        if sample is None:
            raise IntegrityError(f"{where}: expected one of the samples {list(self._samples)}")
        count, rest = divmod(len(fragment.tokens), _ITEM_BYTES)
        sizes = [len(column) for column in columns]
        if rest or sizes != [count * width for width in sample.widths]:
            raise IntegrityError(f"{where}: expected columns of as many tokens each, got {sizes} bytes")
        if fragment.offset < 0 or fragment.offset + count > self._limit:
            raise IntegrityError(
                f"{where}: expected at most {self._limit} tokens, got {count} from {fragment.offset} on"
            )
        return sample

    def _where(self, sample: int) -> str:
        return f"sample {sample} of {self._name}"


def _columns(part: Fragment | Completion) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    return part.tokens, part.logprobs, part.versions, part.top_tokens, part.top_logprobs


def verify_answer(generated: Generated, request: Generate, *, server: str) -> None:
    """Check that a reply answers this request and has all of its samples."""
    found = tuple(sorted(completion.sample for completion in generated.completions))
    if (generated.ticket, generated.turn, found) != (
        request.ticket,
        request.turn,
        tuple(sorted(request.wanted)),
    ):
        raise IntegrityError(
            f"{server}: expected samples {request.wanted} of {request.ticket} turn {request.turn}, "
            f"got {found} of {generated.ticket} turn {generated.turn}"
        )
