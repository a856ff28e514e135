"""What no single one says: what several processes have said, or stopped saying, put together. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kintsugi.diagnosis.evidence import MASTER, Bundle, Said
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.diagnosis.words import committed_in, is_of_the_users_code, shortened, states_in

NO_EPISODES = "EpisodesFailed"
"""What the master calls it that nothing can be scored."""
USER_GROUPS = 3
"""So many groups that nothing came of because of the user's code, and it is no odd sample any more."""
TOGETHER_S = 2.5
"""Who was last heard within this ended together: heartbeats are half a second apart, looks a second."""
BROKEN = "GroupBroken"
AGAIN = 2
"""So many groups of ranks in a row that break while all of them live."""
AROUND_S = 3.0
"""Who ends or begins so close to a group's end has ended it."""
_GROUP = re.compile(r"of generation (\d+) with (model-\d+) failed: (.*)")
_BY_PEER = re.compile(r"reset by peer|closed by peer", re.IGNORECASE)


def jointly(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """All of [since, until]."""
    yield from _differing(bundle, since=since, until=until)
    yield from _user_code(bundle, since=since, until=until)
    yield from _broken_again(bundle, since=since, until=until)


def _broken_again(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """Connections of a rank that break in one group after the other, though nobody has ended: whoever sees its own end
    break names itself, whoever sees the other's names that."""
    generations: dict[str, dict[str, Said]] = {}
    for said in bundle.faults:
        if said.fault is None or said.fault.kind != BROKEN or said.by == MASTER:
            continue
        found = _GROUP.search(said.message)
        if found is None or not since <= said.time <= until:
            continue
        generation, peer, why = found.groups()
        if any(_changed(bundle, process, said.time) for process in (said.by, peer)):
            continue
        generations.setdefault(peer if _BY_PEER.search(why) else said.by, {}).setdefault(generation, said)
    blamed = max(generations, key=lambda each: (len(generations[each]), each), default=None)
    if blamed is None or len(generations[blamed]) < AGAIN:
        return
    broken = list(generations[blamed].values())
    yield Finding(
        process=blamed,
        kind=FaultKind.NETWORK_CUT,
        onset=broken[0].time,
        until=broken[-1].time,
        strength=0.85,
        what=f"its connections broke in {len(broken)} groups one after the other, though nobody had ended",
        evidence=tuple(Evidence(said.source, said.time, shortened(said.message)) for said in broken[-3:]),
        is_fact=True,
        rules_out=("an end of a rank: none ended or began then",),
    )


def _changed(bundle: Bundle, process: str, time: float) -> bool:
    """Whether a process ended or began about then."""
    moments = chain(
        (end.time for end in bundle.ends if end.process == process),
        (born for born, _ in bundle.births.get(process, ())),
    )
    return any(abs(moment - time) <= AROUND_S for moment in moments)


def _differing(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """Ranks that came to another state than the others: few against many, or those whom the commit proved wrong.

    Of two, nobody knows which one is wrong until a step was committed; till then both may be.
    """
    for said in bundle.faults:
        states = states_in(said.message)
        if len(states) < 2 or not since <= said.time <= until:
            continue
        committed = next(
            (
                found
                for note in bundle.notes
                if note.time >= said.time and (found := committed_in(note.message))
            ),
            None,
        )
        counts = Counter(states.values())
        (most, number), (_, second), *_ = [*counts.most_common(2), ("", 0)]
        right = committed or (most if number > second else None)
        for process, state in states.items():
            if state != right:
                yield Finding(
                    process=process,
                    kind=FaultKind.NUMERIC,
                    onset=said.time,
                    until=said.time,
                    strength=0.92 if right else 0.6,
                    what="came to another state than its peers from the same samples",
                    evidence=(Evidence(said.source, said.time, shortened(said.message)),),
                    is_fact=True,
                    others=tuple(other for other in states if other != process),
                )


def _user_code(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """Groups of which nothing came because the user's code failed at every attempt: a worker notes each. It is the same
    code everywhere: who has most of them speaks for all."""
    by_process: dict[str, list[Said]] = {}
    for note in bundle.notes:
        if since <= note.time <= until and is_of_the_users_code(note.message):
            by_process.setdefault(note.by, []).append(note)
    count = sum(map(len, by_process.values()))
    if not count or (count < USER_GROUPS and not _no_episodes(bundle, since=since, until=until)):
        return
    process = max(by_process, key=lambda each: (len(by_process[each]), each))
    others = tuple(sorted(by_process.keys() - {process}))
    notes = sorted(chain.from_iterable(by_process.values()), key=lambda note: note.time)
    where = f" there and at {', '.join(others)}" if others else ""
    last = by_process[process][-1]
    yield Finding(
        process=process,
        kind=FaultKind.USER_CODE,
        onset=notes[0].time,
        until=notes[-1].time,
        strength=0.85,
        what=f"nothing came of {count} groups{where}; the last: {shortened(last.message)}",
        evidence=(Evidence(last.source, last.time, shortened(last.message)),),
        is_fact=True,
        others=others,
    )


def _no_episodes(bundle: Bundle, *, since: float, until: float) -> bool:
    """Whether the run ended because nothing could be scored."""
    return any(
        said.fault is not None and said.fault.kind == NO_EPISODES and since <= said.time <= until
        for said in bundle.faults
    )


def fallen_silent(bundle: Bundle) -> Iterator[Finding]:
    """Everybody's last words are of one moment, and none is a good-bye: whoever would have told of an end ended too."""
    last = {process: beats[-1].time for process, beats in bundle.beats.items() if beats}
    if len(last) < 2 or bundle.is_over(bundle.at):
        return
    first, latest = min(last.values()), max(last.values())
    said_goodbye = any(time >= first for times in bundle.goodbyes.values() for time in times)
    if latest - first > TOGETHER_S or said_goodbye:
        return
    yield Finding(
        process=MASTER,
        kind=FaultKind.KILLED,
        onset=latest,
        until=bundle.at,
        strength=0.8,
        what=(
            f"and {len(last) - 1} others ended within {latest - first:.1f} s, and nobody was left to say how: a "
            "person, a scheduler or a loss of power ended everything at once"
        ),
        evidence=tuple(
            Evidence(f"figures/{process}.jsonl", time, f"{process}: its last heartbeat")
            for process, time in sorted(last.items())
        ),
        is_fact=True,
        rules_out=("the end of the run: it had not finished, and nobody had asked it to stop",),
    )


def unrecorded(bundle: Bundle, *, seconds: float) -> Finding:
    """Nobody of the run has written anything for so long, as whoever follows it sees."""
    what = f"and all others have recorded nothing for {seconds:.0f} s: the disk of the run folder takes nothing more"
    return Finding(
        process=MASTER,
        kind=FaultKind.DISK_SLOW,
        onset=bundle.at,
        until=bundle.at + seconds,
        strength=0.7,
        what=what,
        evidence=(Evidence("events/", bundle.at, "the last line of any process"),),
        rules_out=("a single process: all of them are silent",),
    )
