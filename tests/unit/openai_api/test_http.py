"""What every HTTP server keeps off the operator's screen."""

from __future__ import annotations

import logging
import sys

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from kintsugi.openai_api.http import _is_logged


@pytest.mark.parametrize(("error", "is_told"), [(BadHttpMessage("no HTTP"), False), (OSError("ours"), True)])
def test_what_is_no_http_is_not_worth_a_line(error: Exception, is_told: bool) -> None:
    try:
        raise error
    except type(error):
        record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert _is_logged(record) == is_told
