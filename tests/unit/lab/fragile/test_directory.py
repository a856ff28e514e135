from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.fragile.directory import Address, address_of, announce, find


def test_who_announced_himself_is_found(tmp_path: Path) -> None:
    announce(tmp_path, "model-0", Address("127.0.0.1", 4711))
    assert find(tmp_path, "model-0", timeout_s=1.0) == Address("127.0.0.1", 4711)


def test_who_did_not_is_named_with_those_who_did(tmp_path: Path) -> None:
    announce(tmp_path, "model-0", Address("127.0.0.1", 4711))
    with pytest.raises(UserError, match="expected one of model-0, got 'meta'"):
        address_of(tmp_path, "meta")
