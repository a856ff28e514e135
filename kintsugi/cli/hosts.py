"""Hosts on other machines: `--on`, `kintsugi hosts`, and the supervisor that an engine starts (`kintsugi agent`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kintsugi.cli.output import say

if TYPE_CHECKING:
    from kintsugi.config.recipe import Resolved
    from kintsugi.config.schema import ClusterSection

app = typer.Typer()

On = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS",
        help="Hosts file: the machines of the run, over ssh. slurm: the nodes of a job. Default: this machine.",
    ),
]


Partition = Annotated[
    str | None, typer.Option(help="Partition of the job, with `--on slurm`. Default: that of the site.")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes of the job, with `--on slurm`.")]


def with_engine(
    overrides: list[str] | None, *, on: str | None, partition: str | None = None, nodes: int | None = None
) -> list[str]:
    """Return the overrides with those that `--on` and its options stand for."""
    given = {"cluster.on": on, "cluster.slurm.partition": partition, "cluster.slurm.nodes": nodes}
    return [
        *(overrides or ()),
        *(f"{field}={value}" for field, value in given.items() if value is not None),
    ]


def placed(resolved: Resolved) -> Resolved:
    """Derive the number of hosts, their slots and this machine's address from `cluster.on`."""
    if not resolved.config.cluster.on:
        return resolved
    from kintsugi.config.recipe import anchored

    config = anchored(resolved.config)
    config = msgspec.structs.replace(config, cluster=placed_cluster(config.cluster))
    return msgspec.structs.replace(resolved, config=config)


def placed_cluster(cluster: ClusterSection) -> ClusterSection:
    """Return the section with what follows from its hosts file or allocation. ConfigError names what is wrong with
    it."""
    if cluster.on == "slurm":
        from kintsugi.cli import slurm

        return slurm.placed_cluster(cluster)
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
) -> None:
    """Join a run as one of its hosts, with a ticket that the run has made. Engines call this, not people."""
    from kintsugi.cluster.host_supervisor import default_scratch, supervise_host
    from kintsugi.cluster.joining import read_ticket
    from kintsugi.runtime.owned_files import open_owned

    descriptor = 0 if join == "-" else open_owned(Path(join), os.O_RDONLY, secret=True)
    ticket = read_ticket(descriptor)
    if descriptor:
        os.close(descriptor)
    sys.exit(supervise_host(ticket, scratch=scratch or default_scratch(), detach=detach))


@app.command()
def hosts(
    on: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Hosts file, or slurm. Default: this machine.")
    ] = None,
) -> None:
    """Show cores, memory, GPUs, versions and clock of each host, and what would keep it out of a run."""
    from kintsugi.cli.host_table import host_lines

    lines, all_fit = host_lines(on)
    for line in lines:
        say(line)
    if not all_fit:
        raise typer.Exit(1)


@app.command(hidden=True)
def host_facts(reached: Annotated[str, typer.Argument(help="Address of the machine that asks.")]) -> None:
    """Print what a run has to know of this host, as JSON: `kintsugi hosts` calls it on each host."""
    from kintsugi.cluster.host_supervisor import default_scratch
    from kintsugi.cluster.joining import facts_of_this_host, local_address

    scratch = default_scratch()
    existing = next(folder for folder in (scratch, *scratch.parents) if folder.exists())
    say(
        msgspec.json.encode(facts_of_this_host(address=local_address(reached), scratch=existing)).decode(),
        wrap=False,
    )
