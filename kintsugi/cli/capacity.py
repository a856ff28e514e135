"""Whether a run fits this machine: the memory of its cards and of its host, and the disk of its checkpoints.

`kintsugi check` shows the estimate and refuses what no card here can hold. `kintsugi train` and `resume` also refuse a
card that other programs have filled, a host that can not hold the models, and a disk without room for one checkpoint.
What may be enough is a warning.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kintsugi.checkpoint.copies import open_target
from kintsugi.cluster.device_memory import read_devices
from kintsugi.config.schema import Config
from kintsugi.config.stages import num_processes, stages
from kintsugi.control.placement import plan_layout
from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.model.memory import DeviceReading, ProcessMemory, RunMemory
from kintsugi.model.partition import part_of
from kintsugi.model.plan import plan_companions, plan_model
from kintsugi.model.seats import Seat, mesh_of
from kintsugi.model.tensor_slices import slices_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.descriptors import descriptor_limit, num_descriptors
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.collect.cgroups import available_memory_bytes, swap_bytes, usable_memory_bytes
from kintsugi.transport import most_peers
from kintsugi.types import Role, process_id, role_of

FREED_S = 10.0
"""Time for the memory of a run that was just killed to be released before a card counts as full."""
POLL_S = 0.25
LEAST_MICRO_BATCH = 1024
"""Smallest `actor.micro_batch_tokens` that is advised."""
Room = Callable[[DeviceReading], int]


def run_memory(config: Config, *, num_devices: int) -> RunMemory:
    """Return the estimates of a validated configuration."""
    model, _ = plan_model(config)
    return RunMemory(config, model, plan_companions(config), num_devices)


def memory_lines(config: Config) -> Iterator[str]:
    """Describe the memory of each process, card and host, and the disk of the checkpoints."""
    devices = read_devices()
    memory = run_memory(config, num_devices=len(devices))
    plan = plan_layout(config)
    if config.actor.layout.boxes > 1:
        yield from _layout_lines(memory)
    yield f"  {'':8} {'number':>6} {'host each':>12} {'device each':>12}"
    for role in dict.fromkeys(process.role for process in plan):
        count, each = sum(process.role is role for process in plan), memory.of_role(role)
        on_device = gigabytes(each.device_bytes) if each.device else "–"
        yield f"  {role.value:8} {count:4} × {gigabytes(each.host_bytes):>12} {on_device:>12}  {_parts(each)}".rstrip()
    total = memory.of_host(process.role for process in plan)
    available = available_memory_bytes()
    note = "" if total <= available else ": warning, not enough memory"
    yield f"  host     {gigabytes(total)} of {gigabytes(available)} available{note}"
    for index, device in enumerate(devices):
        names = memory.on_device(index)
        needed = memory.needed_on_device(index)
        note = "" if needed <= device.free_bytes else ": warning, not enough is free now"
        yield (
            f"  device {index} ({device.name}): {', '.join(names) or 'unused'} need at least {gigabytes(needed)} "
            f"of {gigabytes(device.total_bytes)}, {gigabytes(device.free_bytes)} free{note}"
        )
    if not devices:
        yield from _elsewhere(config)
    yield from (f"  {line}" for line in _disk_lines(memory, folder=Path(config.run_dir or "runs")))


def _layout_lines(memory: RunMemory) -> Iterator[str]:
    """Describe which rank holds which part of the optimizer's state."""
    actor, mesh = memory.config.actor, mesh_of(memory.config.actor.layout)
    axes = [f"{actor.workers // mesh.boxes} replicas", f"{mesh.shards} shards"]
    axes += [f"{mesh.stages} stages"] if mesh.stages > 1 else []
    axes += [f"{mesh.tensors} tensor ranks"] if mesh.tensors > 1 else []
    most = max(memory.box_bytes(mesh.seat(box)) for box in range(mesh.boxes))
    yield (
        f"  layout   {actor.workers} ranks = {' × '.join(axes)}: each rank holds "
        f"{f'1/{mesh.boxes}' if mesh.model_ranks == 1 else 'at most a part'} of weights and moments "
        f"({gigabytes(most)} of {gigabytes(memory.state_bytes)})"
    )
    if actor.layout.gathers_layers:
        yield (
            "           weights are gathered layer by layer: no rank has whole weights or a whole gradient, and "
            "`actor.recompute` is implied"
        )
    has_hosts = memory.config.cluster.hosts > 1
    for part, holders in _holders(memory.config).items():
        named = (f"{rank} ({host})" if has_hosts else rank for rank, host in holders.items())
        yield f"           part {part}: {', '.join(named)}{_layers(memory, mesh.seat(part - 1))}"
    if has_hosts:
        alone = [
            str(part) for part, holders in _holders(memory.config).items() if len(set(holders.values())) == 1
        ]
        yield (
            f"           a host is lost: part {', '.join(alone)} comes from the copy that another host keeps"
            if alone
            else "           a host is lost: every part is on another one, no step is undone"
        )
    yield "           no replacement starts: " + (
        "the other ranks go on while each part has one"
        if actor.workers > mesh.boxes and mesh.model_ranks == 1
        else "the run waits, then ends; `kintsugi resume` with another layout goes on"
    )


def _layers(memory: RunMemory, seat: Seat) -> str:
    """Part of a model that a rank computes, and the memory that it needs; empty if it computes all of it."""
    if seat.mesh.model_ranks == 1:
        return ""
    part = part_of(memory.model, seat)
    layers = part.layers
    ends = " with the embedding" if part.is_first else " with the head" if part.is_last else ""
    if part.is_tied and part.uses_embedding:
        ends = " with a copy of the embedding" if part.is_first else " with the head, which is the embedding"
    ends = "" if seat.stages == 1 else ends
    if seat.tensors > 1:
        slices = slices_of(seat.tensor, tensors=seat.tensors, count=memory.config.actor.logical_slices)
        ends += f", slices {slices.start} to {slices.stop - 1}"
    needed = memory.of_process(process_id(Role.MODEL, seat.number))
    return f": layers {layers[0]} to {layers[-1]}{ends}, {gigabytes(needed.host_bytes + needed.device_bytes)}"


def _holders(config: Config) -> dict[int, dict[str, str]]:
    """Return the ranks that hold each part of a state that is cut, with their hosts."""
    ranks = [plan for plan in plan_layout(config) if plan.role is Role.MODEL]
    boxes = config.actor.layout.boxes
    return {part + 1: {plan.process: plan.host for plan in ranks[part::boxes]} for part in range(boxes)}


def limit_lines(config: Config) -> Iterator[str]:
    """Describe what each process needs of the limits of this user and of ZeroMQ."""
    number = num_processes(config)
    yield f"  file descriptors: up to {num_descriptors(number):,} each, at most {descriptor_limit():,} (ulimit -Hn)"
    yield f"  connections: up to {number:,} each, at most {most_peers():,}"


def check_limits(config: Config) -> None:
    """Raise UserError if a process could not connect to all others."""
    number = num_processes(config)
    needed, limit = num_descriptors(number), descriptor_limit()
    if needed > limit:
        raise UserError(
            f"{number:,} processes need up to {needed:,} file descriptors each, this user can have {limit:,}; "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=), or start fewer processes"
        )
    if number > most_peers():
        raise UserError(
            f"{number:,} processes: ZeroMQ allows at most {most_peers():,}; start fewer processes"
        )


def check_devices(config: Config) -> None:
    """Raise UserError if a card of this machine is too small for the processes that would use it."""
    if (
        config.cluster.on
    ):  # Most processes use cards of other machines; each host compares its own when it joins.
        return
    devices = read_devices()
    problem = _shortage(run_memory(config, num_devices=len(devices)), devices, room=_total)
    if problem:
        raise UserError(problem)


def check_start(config: Config, *, run_dir: Path, resume: bool) -> list[str]:
    """Check cards and disk before the processes of a run start; return warnings, raise UserError for what must fail.

    Records what other programs use of the cards in the run folder, for servers that size their KV cache.
    """
    check_limits(config)
    check_devices(config)
    if config.checkpoint.copy_to:
        open_target(config.checkpoint.copy_to)
    devices = read_devices()
    memory = run_memory(config, num_devices=len(devices))
    warnings = [] if config.cluster.on else _check_host(memory)
    if not config.cluster.on and _shortage(memory, devices, room=_free):
        devices = _await_room(memory)
        if problem := _shortage(memory, devices, room=_free):
            raise UserError(problem)
    if devices:
        write_atomically(RunFolder(run_dir).devices_file, msgspec.json.encode(devices), durable=False)
    return warnings + _check_disk(memory, folder=run_dir, resume=resume)


def _check_host(memory: RunMemory) -> list[str]:
    """Refuse what this host can not hold even with its swap space; what may be too much is a warning."""
    most, needed = usable_memory_bytes() + swap_bytes(), memory.needed_on_host
    if memory.held_on_host > most:
        parts = "; ".join(
            f"{name} {gigabytes(sum(each.values()))}: {_listed(each)}"
            for name in memory.computing()
            for each in (memory.host_parts(name),)
        )
        what_fits = _advice(
            memory, lambda smaller: smaller.needed_on_host > most, what="host", share=most / needed
        )
        raise UserError(
            f"this host: expected {gigabytes(needed)} of memory for {parts}; got {gigabytes(most)}. {what_fits}"
        )
    available = available_memory_bytes()
    if needed <= available:
        return []
    what = f"this host has {gigabytes(available)} of memory available, ranks and servers may need {gigabytes(needed)}"
    return [f"{what}: the system may kill some of them"]


def _await_room(memory: RunMemory) -> tuple[DeviceReading, ...]:
    """Wait until there is room, for a while: a killed process is gone seconds before its memory."""
    pause = threading.Event()

    def attempt(remaining_s: float) -> tuple[DeviceReading, ...] | None:
        pause.wait(min(POLL_S, remaining_s))
        devices = read_devices()
        return None if _shortage(memory, devices, room=_free) else devices

    try:
        return wait(attempt, whom="other processes", what="free device memory", timeout_s=FREED_S)
    except DeadlineExceeded:
        return read_devices()


def check_more_servers(config: Config, *, servers: int, now: int) -> None:
    """Raise UserError if more servers do not fit into the memory that is free now."""
    devices = read_devices()
    memory = run_memory(
        msgspec.structs.replace(
            config, generation=msgspec.structs.replace(config.generation, servers=servers)
        ),
        num_devices=len(devices),
    )
    each, available = memory.of_role(Role.SERVER).host_bytes, available_memory_bytes()
    most = now + int(available // each)
    what = f"one more takes about {megabytes(each)}, {megabytes(available)} are available"
    if devices:
        each = memory.server_bytes + memory.request_bytes
        fitting = [
            _num_fitting(memory, index, each=each, free=d.free_bytes, now=now)
            for index, d in enumerate(devices)
        ]
        if sum(fitting) < most - now:
            most = now + sum(fitting)
            what = f"one more takes about {megabytes(each)} of a device, {_free_of(devices)}"
    if servers > most:
        raise UserError(f"--servers: expected at most {most}: {what}; got {servers}")


def _num_fitting(memory: RunMemory, index: int, *, each: int, free: int, now: int) -> int:
    """Number of the new servers of a card that fit into what is free."""
    added = [
        name
        for name in memory.on_device(index)
        if role_of(name) is Role.SERVER and int(name.rpartition("-")[2]) >= now
    ]
    return min(len(added), free // each)


def _total(device: DeviceReading) -> int:
    return device.total_bytes


def _free(device: DeviceReading) -> int:
    return device.free_bytes


def _shortage(memory: RunMemory, devices: Sequence[DeviceReading], *, room: Room) -> str:
    """Return which card is too small and what would fit; empty if all are large enough."""

    def is_short(smaller: RunMemory) -> bool:
        return any(smaller.needed_on_device(index) > room(device) for index, device in enumerate(devices))

    for index, device in enumerate(devices):
        needed = memory.needed_on_device(index)
        if needed <= room(device):
            continue
        processes = "; ".join(
            f"{name} {gigabytes(sum(each.values()))}: {_listed(each)}"
            for name in memory.on_device(index)
            for each in (_least(memory, name),)
        )
        found = f"{gigabytes(device.free_bytes)} free of {gigabytes(device.total_bytes)}"
        expected = f"device {index} ({device.name}): expected {gigabytes(needed)} for {processes}"
        what_fits = _advice(memory, is_short, what="card", share=room(device) / needed)
        return f"{expected}; got {found}. {what_fits}"
    return ""


def _least(memory: RunMemory, process: str) -> dict[str, int]:
    """Parts of what a process needs of its card; a server's cache holds one request."""
    parts = dict(memory.of_process(process).device)
    return parts | {"KV cache": memory.request_bytes} if role_of(process) is Role.SERVER else parts


def _advice(memory: RunMemory, is_short: Callable[[RunMemory], bool], *, what: str, share: float) -> str:
    """Name the settings that would make a run fit, else the size of a model that would; `share` of what this one needs
    is there."""
    fitting: dict[str, str] = {}
    for text, config in _smaller(memory.config):
        if not is_short(msgspec.structs.replace(memory, config=config)):
            fitting.setdefault(text.partition("=")[0], text)  # The least change of each kind.
    if fitting:
        return f"It would fit with {' or with '.join(fitting.values())}"
    trained = memory.num_actor + memory.num_critic
    size = (
        f"{trained * share / 1e9:.1f} billion"
        if trained * share > 1e8
        else f"{trained * share / 1e6:.0f} million"
    )
    return (
        f"No setting makes it fit: {trained / 1e9:.2f} billion trained parameters have "
        f"{gigabytes(memory.state_bytes)} of state alone; take a smaller model, of about {size} parameters with these "
        f"settings, or a {what} with more free memory"
    )


def _smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Configurations that need less device memory, the least intrusive ones first."""
    actor = config.actor

    def changed(**values: object) -> Config:
        return msgspec.structs.replace(config, actor=msgspec.structs.replace(actor, **values))

    can_cut = config.cluster.share_device != "offload"
    if can_cut and not any(stage.moves_reference or stage.has_critic for stage in stages(config)):
        for shards in range(actor.layout.shards + 1, actor.workers + 1):
            if actor.workers % (shards * actor.layout.model_ranks) == 0:
                layout = msgspec.structs.replace(actor.layout, shards=shards, replicas=None)
                yield f"`actor.layout.shards={shards}`", changed(layout=layout)
        yield from _gathered_layers(config)
        yield from _more_stages(config)
    sizes = [
        LEAST_MICRO_BATCH << power
        for power in range(16)
        if LEAST_MICRO_BATCH << power < actor.micro_batch_tokens
    ]
    if actor.num_shards > actor.workers:
        yield "`actor.logical_shards=null`", changed(logical_shards=None)
    for size in reversed(sizes):
        yield f"`actor.micro_batch_tokens={size}`", changed(micro_batch_tokens=size)
    if not actor.recompute:
        yield "`actor.recompute=true`", changed(recompute=True)
        yield from (
            (
                f"`actor.recompute=true actor.micro_batch_tokens={size}`",
                changed(recompute=True, micro_batch_tokens=size),
            )
            for size in sizes[:1]
        )
    if actor.dtype == "float32":
        yield "`actor.dtype=bfloat16`", changed(dtype="bfloat16")
        yield (
            "`actor.dtype=bfloat16 actor.recompute=true`",
            changed(dtype="bfloat16", recompute=True),
        )
    if config.cluster.share_device != "offload" and config.generation.backend == "embedded":
        cluster = msgspec.structs.replace(config.cluster, share_device="offload")
        yield "`cluster.share_device=offload`", msgspec.structs.replace(config, cluster=cluster)


def _gathered_layers(config: Config) -> Iterator[tuple[str, Config]]:
    """The layout in which no rank has whole weights, with as many shards as there are workers."""
    actor = config.actor
    is_possible = actor.layout.model_ranks == actor.logical_slices == 1 and actor.framework == "torch"
    if actor.workers > 1 and is_possible and not any(each.begins_as_actor for each in stages(config)[1:]):
        layout = msgspec.structs.replace(actor.layout, shards=actor.workers, gather="layer", replicas=None)
        yield (
            f"`actor.layout.shards={actor.workers} actor.layout.gather=layer`",
            msgspec.structs.replace(config, actor=msgspec.structs.replace(actor, layout=layout)),
        )


def _more_stages(config: Config) -> Iterator[tuple[str, Config]]:
    """Layouts with more pipeline stages on the same workers."""
    actor, model = config.actor, plan_model(config)[0]
    for number in range(actor.layout.stages + 1, min(actor.workers, model.num_layers) + 1):
        layout = msgspec.structs.replace(actor.layout, stages=number, replicas=None)
        if actor.workers % layout.boxes == 0:
            changed = msgspec.structs.replace(actor, layout=layout)
            yield f"`actor.layout.stages={number}`", msgspec.structs.replace(config, actor=changed)


def _elsewhere(config: Config) -> Iterator[str]:
    """Memory that the run would need of accelerators, where there is none to compare with."""
    memory = run_memory(config, num_devices=config.actor.workers + config.generation.servers)
    needs = [
        f"{role.value} {gigabytes(each.device_bytes)} ({_listed(each.device)})"
        for role in (Role.MODEL, Role.SERVER)
        if (each := memory.of_role(role)).device
    ]
    yield f"  no accelerator is present here; with one per process: {'; '.join(needs)}"


def _check_disk(memory: RunMemory, *, folder: Path, resume: bool) -> list[str]:
    free, each = _free_disk(folder), memory.checkpoint_bytes
    if each > free:
        raise UserError(
            f"{folder}: expected {gigabytes(each)} of free disk space for one checkpoint "
            f"({gigabytes(memory.state_bytes)} of them weights and optimizer state), got {gigabytes(free)}; "
            "free some, or set `run_dir` to a folder on another disk"
        )
    at_once = 1 if resume else _num_at_once(memory.config)
    if at_once * each > free:
        taken = f"{at_once} checkpoints take {gigabytes(at_once * each)}"
        then = "saves will fail, and the last one will wait, unless space becomes free or `checkpoint.keep` is smaller"
        return [f"{folder} has {gigabytes(free)} of free disk space, {taken}: {then}"]
    return []


def _num_at_once(config: Config) -> int:
    """Checkpoints that are on the disk together: those that are kept, and the one that is being written."""
    steps, every = stages(config)[-1].last_step, config.checkpoint.every
    num_saves = 1 if every == 0 else -(-steps // every)
    return min(num_saves, config.checkpoint.keep + 1)


def _disk_lines(memory: RunMemory, *, folder: Path) -> Iterator[str]:
    each, at_once, free = memory.checkpoint_bytes, _num_at_once(memory.config), _free_disk(folder)
    note = "" if at_once * each <= free else ": warning, not enough space"
    yield (
        f"disk     {gigabytes(each)} a checkpoint, {gigabytes(at_once * each)} with those that are kept, "
        f"{gigabytes(free)} free{note}"
    )


def _free_disk(folder: Path) -> int:
    """Free space of the file system that a folder is on, or will be on."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def _parts(memory: ProcessMemory) -> str:
    return _listed(memory.device or memory.host) if len(memory.device or memory.host) > 1 else ""


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def _free_of(devices: Sequence[DeviceReading]) -> str:
    free = ", ".join(f"device {index} {megabytes(device.free_bytes)}" for index, device in enumerate(devices))
    return f"free are: {free}"


def gigabytes(size: int) -> str:
    """Show a size in the unit that fits: `gigabytes(21_300_000_000) == "21.3 GB"`."""
    return f"{size / 1e9:,.1f} GB" if size >= 10**9 else megabytes(size)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
