"""Hosts on other machines: `--on`, `kintsugi hosts`, and the supervisor that an engine starts (`kintsugi agent`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kintsugi.cli.arguments import Overrides, Recipe
from kintsugi.cli.output import say

if TYPE_CHECKING:
    from kintsugi.config.recipe import Resolved
    from kintsugi.config.schema import ClusterSection, Config

app = typer.Typer()

CLOCK = "clock "
"""Begin of the lines with which a host tells its time."""
ENGINE_OPTIONS = {
    "partition": ("slurm", "cluster.slurm.partition"),
    "nodes": ("slurm", "cluster.slurm.nodes"),
    "address": ("ray", "cluster.ray.address"),
    "namespace": ("k8s", "cluster.kubernetes.namespace"),
    "image": ("k8s", "cluster.kubernetes.image"),
}
"""Option of the command line → the engine that it belongs to, and the field that it stands for."""

On = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS",
        help="The machines of the run: a hosts file, over ssh; `slurm`: nodes of a job; `ray`: nodes of a Ray cluster; "
        "`k8s`: pods of a Kubernetes cluster. Default: this machine.",
    ),
]
Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="With `--on k8s`: namespace of the pods.")
]
Image = Annotated[str | None, typer.Option(metavar="IMAGE", help="With `--on k8s`: image of the pods.")]


Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="With --on ray: address of the cluster. Default: Ray's own."),
]


Partition = Annotated[
    str | None, typer.Option(help="Partition of the job, with `--on slurm`. Default: that of the site.")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes of the job, with `--on slurm`.")]


def with_engine(overrides: list[str] | None, *, on: str | None, **options: str | int | None) -> list[str]:
    """Return the overrides with those that `--on` and the options of engines stand for."""
    from kintsugi.errors import UserError

    given: dict[str, str | int] = {} if on is None else {"cluster.on": on}
    for option, value in options.items():
        if value is not None:
            engine, field = ENGINE_OPTIONS[option]
            if on not in (None, engine):
                raise UserError(f"--{option}: expected `--on {engine}` with it, got `--on {on}`")
            given[field] = value
    return [*(overrides or ()), *(f"{field}={value}" for field, value in given.items())]


def needs_job(config: Config) -> bool:
    """Whether a run goes to Slurm and this process is in no allocation yet."""
    if config.cluster.on != "slurm":
        return False
    # Imported here: no other run needs what speaks with Slurm.
    from kintsugi.cluster.backends.slurm import job_of

    return not job_of(os.environ)


def placed(resolved: Resolved) -> Resolved:
    """Derive the number of hosts, their slots and this machine's address from `cluster.on`."""
    if not resolved.config.cluster.on:
        return resolved
    from kintsugi.config.recipe import anchored

    config = anchored(resolved.config)
    config = msgspec.structs.replace(config, cluster=placed_cluster(config.cluster))
    return msgspec.structs.replace(resolved, config=config)


def placed_again(config: Config, before: Config) -> Config:
    """Derive the same for a run that goes on with other machines than before, or on this one alone."""
    from kintsugi.config.recipe import anchored

    if config.cluster.on == before.cluster.on:
        return config
    alone = msgspec.structs.replace(config.cluster, hosts=1, slots=(), spare_hosts=0, address="")
    config = anchored(msgspec.structs.replace(config, cluster=alone))
    if not config.cluster.on:
        return config
    return msgspec.structs.replace(config, cluster=placed_cluster(config.cluster))


def placed_cluster(cluster: ClusterSection) -> ClusterSection:
    """Return the section with what follows from its hosts file, or its engine. ConfigError names what is wrong."""
    match cluster.on:
        case "slurm":
            from kintsugi.cli import slurm

            return slurm.placed_cluster(cluster)
        case "ray":
            return _placed_on_ray(cluster)
        case "k8s":
            return _placed_in_pods(cluster)
    from kintsugi.cluster.backends.ssh import read_hosts_file, split_hosts
    from kintsugi.errors import ConfigError

    here, remote = split_hosts(read_hosts_file(Path(cluster.on)))
    if not remote:
        raise ConfigError(f"{cluster.on}: expected a host on another machine; without one, leave `--on` out")
    return msgspec.structs.replace(
        cluster,
        hosts=1 + len(remote),
        slots=(here.slots if here is not None else 0, *(host.slots for host in remote)),
        spare_hosts=sum(host.spare for host in remote),
        address=cluster.address or _address_for([host.machine for host in remote]),
    )


def _placed_on_ray(cluster: ClusterSection) -> ClusterSection:
    from kintsugi.cluster.backends.ray import choose_nodes, find_nodes

    nodes = choose_nodes(find_nodes(cluster.ray), cluster.ray)
    return msgspec.structs.replace(
        cluster,
        hosts=1 + len(nodes),
        slots=(0, *(max(1, cluster.ray.gpus) for _ in nodes)),
        spare_hosts=0,
        address=cluster.address or _address_for([node.address for node in nodes]),
    )


def _placed_in_pods(cluster: ClusterSection) -> ClusterSection:
    """Return the section with one host per pod, and the address of this machine on the way to the API server."""
    from urllib.parse import urlsplit

    from kintsugi.cluster.backends.kubernetes.access import load_access
    from kintsugi.cluster.backends.kubernetes.opening import check_settings, placed_in_pods

    check_settings(cluster.kubernetes)
    address = cluster.address or _address_for([urlsplit(load_access().server).hostname or ""])
    return msgspec.structs.replace(placed_in_pods(cluster), address=address)


def moved(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration of a run that is resumed here, and what had to change: pods have other addresses than
    their predecessors."""
    from urllib.parse import urlsplit

    from kintsugi.cluster.backends.kubernetes.access import load_access

    cluster = config.cluster
    if cluster.on != "k8s" or _is_own(cluster.address):
        return config, []
    address = _address_for([urlsplit(load_access().server).hostname or ""])
    changed = msgspec.structs.replace(cluster, address=address)
    change = f"cluster.address: {address} (was {cluster.address})"
    return msgspec.structs.replace(config, cluster=changed), [change]


def _is_own(address: str) -> bool:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _address_for(machines: list[str]) -> str:
    """Return the address of this machine on its route to all others."""
    from kintsugi.cluster.joining import local_address
    from kintsugi.errors import ConfigError

    found: dict[str, str] = {}
    for machine in machines:
        try:
            found.setdefault(local_address(machine), machine)
        except OSError as error:
            raise ConfigError(f"{machine}: no route to this host: {error.strerror or error}") from error
    if len(found) > 1:
        named = " and ".join(f"{machine} by {address}" for address, machine in list(found.items())[:2])
        raise ConfigError(
            f"expected all hosts to be reached by one interface of this machine, found {named}; name an address that "
            "all of them reach: cluster.address=ADDRESS"
        )
    return next(iter(found))


@app.command()
def agent(
    join: Annotated[
        str, typer.Option("--join", metavar="FILE", help="Ticket of the run; -: read it from standard input.")
    ],
    scratch: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for files of the run on this host.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once this host has joined the run.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for a ticket in FILE that this run takes, as the first process of a pod."
        ),
    ] = False,
) -> None:
    """Join a run as one of its hosts, with a ticket that the run has made. Engines call this, not people."""
    from kintsugi.cluster.host_supervisor import default_scratch, supervise_host
    from kintsugi.cluster.joining import read_ticket
    from kintsugi.runtime.owned_files import open_owned

    if wait:
        from kintsugi.cluster.ticket_file import supervise_with_file

        sys.exit(supervise_with_file(Path(join), scratch=scratch or default_scratch()))
    descriptor = 0 if join == "-" else open_owned(Path(join), os.O_RDONLY, secret=True)
    ticket = read_ticket(descriptor)
    if descriptor:
        os.close(descriptor)
    sys.exit(supervise_host(ticket, scratch=scratch or default_scratch(), detach=detach))


@app.command()
def manifest(
    recipe: Recipe, overrides: Overrides = None, namespace: Namespace = None, image: Image = None
) -> None:
    """Print the Kubernetes objects that `kintsugi train RECIPE --on k8s` would create. Asks no cluster."""
    from kintsugi.cli.arguments import load_validated
    from kintsugi.cluster.backends.kubernetes.opening import planned_objects
    from kintsugi.config.recipe import anchored

    given = with_engine(overrides, on="k8s", namespace=namespace, image=image)
    say(planned_objects(anchored(load_validated(recipe, given).config)), nl=False, wrap=False)


@app.command()
def hosts(
    on: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Hosts file, or `slurm` or `ray`. Default: this machine."),
    ] = None,
    address: Address = None,
) -> None:
    """Show cores, memory, GPUs, versions and clock of each host, and what would keep it out of a run."""
    from kintsugi.cli.host_table import host_lines, ray_lines
    from kintsugi.errors import UserError

    if on == "k8s":
        raise UserError(
            "--on: expected a hosts file, `slurm` or `ray`, got k8s: pods exist during a run only, and are compared "
            "when they join; `kintsugi manifest RECIPE` shows what would be created"
        )
    lines, all_fit = ray_lines(address or "") if on == "ray" else host_lines(on)
    for line in lines:
        say(line)
    if not all_fit:
        raise typer.Exit(1)


@app.command(hidden=True)
def host_facts(
    reached: Annotated[str, typer.Argument(help="Address of the machine that asks.")],
    clock: Annotated[
        bool, typer.Option("--clock", help="Then answer each line of standard input with the wall clock.")
    ] = False,
) -> None:
    """Print what a run has to know of this host, as JSON: `kintsugi hosts` calls it on each host."""
    import time

    from kintsugi.cluster.host_supervisor import default_scratch
    from kintsugi.cluster.joining import facts_of_this_host, local_address

    scratch = default_scratch()
    existing = next(folder for folder in (scratch, *scratch.parents) if folder.exists())
    say(
        msgspec.json.encode(facts_of_this_host(address=local_address(reached), scratch=existing)).decode(),
        wrap=False,
    )
    if clock:
        sys.stdout.flush()
        for _ in sys.stdin:
            sys.stdout.write(f"{CLOCK}{time.time()!r}\n")
            sys.stdout.flush()
