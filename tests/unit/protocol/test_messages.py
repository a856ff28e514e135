from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kintsugi.errors import Fault
from kintsugi.protocol import messages, wire
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import ALLOWED_SENDERS, Envelope, Message, MessageKind
from kintsugi.types import Role

BODIES = typing.get_args(Body)


def sample(kind: type[object]) -> object:
    """Any value of an annotated type."""
    return msgspec.convert(_plain(kind), kind, strict=True)


def _plain(kind: typing.Any) -> object:
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        hints = typing.get_type_hints(kind)
        if config.array_like:
            return [_plain(hints[name]) for name in kind.__struct_fields__]
        fields = {
            encoded: None if hints[name] == kind | None else _plain(hints[name])
            for name, encoded in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        }
        return fields if config.tag is None else {**fields, "type": config.tag}
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return next(iter(typing.cast(typing.Any, kind))).value
    if origin is tuple:
        arguments = typing.get_args(kind)
        return [_plain(arguments[0])] if arguments[-1] is ... else [_plain(part) for part in arguments]
    if origin is dict:
        return {_plain(part): _plain(value) for part, value in [typing.get_args(kind)]}
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if origin is not None:
        return _plain(typing.get_args(kind)[0])
    return {str: "text", int: 7, float: 0.5, bytes: b"\0\1", bool: True}[kind]


ENVELOPE = Envelope("job", 1, "model-0", "a", 7, MessageKind.REQUEST)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[Body]) -> None:
    body = sample(kind)
    assert isinstance(body, kind)
    assert wire.decode(wire.encode(ENVELOPE, body)) == Message(ENVELOPE, body)


@given(
    st.builds(
        Envelope,
        st.text(),
        st.integers(0, 2**31),
        st.text(),
        st.text(),
        st.integers(0, 2**63),
        st.sampled_from(MessageKind),
        st.none() | st.text(),
    )
)
def test_every_envelope_survives_the_wire(envelope: Envelope) -> None:
    frame = wire.encode(envelope, Ok())
    assert wire.decode(frame).envelope == wire.decode_envelope(frame) == envelope


def test_a_wrong_field_is_named_in_the_error_and_the_sender_still_known() -> None:
    frame = msgspec.msgpack.encode([ENVELOPE, {"type": "CommitStep", "step": "three"}])
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$\[1\]\.step`"):
        wire.decode(frame)
    assert wire.decode_envelope(frame) == ENVELOPE


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Evil'"):
        wire.decode(msgspec.msgpack.encode([ENVELOPE, {"type": "Evil"}]))


@given(st.binary(max_size=200))
@example(b"\x92\x96\xa7\x00\x00\x00\x00\x00\x00\x80")
def test_decoding_nonsense_raises_nothing_but_a_decode_error(frame: bytes) -> None:
    for decode in (wire.decode, wire.decode_envelope):
        try:
            decode(frame)
        except msgspec.MsgspecError:
            continue


def test_defaults_take_no_room_on_the_wire() -> None:
    fault = Fault("f1", "StorageError", "model-0", "disk full", 0.0)
    assert b"cause" not in wire.encode(ENVELOPE, Failed(fault))


def rows_of_the_tables() -> list[list[str]]:
    assert messages.__doc__ is not None
    rows = [line.strip("|").split("|") for line in messages.__doc__.splitlines() if line.startswith("| ")]
    return [
        [cell.replace("(+ bulk frames)", "").strip() for cell in row] for row in rows if "→ to" not in row[1]
    ]


def roles(name: str) -> frozenset[Role]:
    return frozenset(Role) if name == "any" else frozenset({Role(name)})


def test_the_tables_name_every_message_once_as_sent_and_all_replies() -> None:
    rows = rows_of_the_tables()
    sent = [name for row in rows for name in row[0].split(", ")]
    replies = {name for row in rows if len(row) > 2 for name in row[2].split(", ")} | {"Failed"}
    assert sorted(sent) == sorted(set(sent)) and not replies & set(sent)
    assert replies | set(sent) == {kind.__name__ for kind in BODIES}


def test_the_tables_name_the_roles_that_may_send_a_message() -> None:
    kinds = {kind.__name__: kind for kind in BODIES}
    for names, links, *_ in rows_of_the_tables():
        senders = frozenset[Role]().union(*(roles(link.split(" → ")[0]) for link in links.split(", ")))
        for name in names.split(", "):
            assert ALLOWED_SENDERS[kinds[name]] == senders, name
