import pytest

from kintsugi.generation.router import Health, ServerView, choose

_HEALTHY, _SUSPECT, _STALE, _DEAD = Health.HEALTHY, Health.SUSPECT, Health.STALE, Health.DEAD


@pytest.mark.parametrize(
    ("servers", "chosen"),
    [
        pytest.param([], None, id="nobody is there"),
        pytest.param([("a", _HEALTHY, 3, 0)], "a", id="the only one"),
        pytest.param([("a", _HEALTHY, 3, 9), ("b", _HEALTHY, 3, 5)], "b", id="fewest tokens in flight"),
        pytest.param([("b", _HEALTHY, 3, 5), ("a", _HEALTHY, 3, 5)], "a", id="first name on a tie"),
        pytest.param(
            [("a", _HEALTHY, 2, 0), ("b", _HEALTHY, 3, 9)], "b", id="an older version is not enough"
        ),
        pytest.param([("a", _HEALTHY, 4, 0)], "a", id="a newer version is enough"),
        pytest.param([("a", _STALE, 3, 0), ("b", _HEALTHY, 3, 9)], "b", id="stale is never chosen"),
        pytest.param([("a", _STALE, 4, 0)], None, id="stale is not chosen alone either"),
        pytest.param([("a", _DEAD, 3, 0)], None, id="dead"),
        pytest.param([("a", _SUSPECT, 3, 0), ("b", _HEALTHY, 3, 99)], "b", id="healthy before suspect"),
        pytest.param([("a", _SUSPECT, 3, 0), ("b", _STALE, 3, 0)], "a", id="suspect is better than nobody"),
    ],
)
def test_a_request_goes_to(servers: list[tuple[str, Health, int, int]], chosen: str | None) -> None:
    choice = choose([ServerView(*server) for server in servers], version=3)
    assert choice.server == chosen
    assert choice.reason


def test_the_reason_to_wait_names_every_server_and_what_it_lacks() -> None:
    servers = [ServerView("server-0", _STALE, 2), ServerView("server-1", _DEAD, 3)]
    reason = choose(servers, version=3).reason
    assert reason == "no server can serve version 3: server-0 stale at version 2, server-1 dead at version 3"
