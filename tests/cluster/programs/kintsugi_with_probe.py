"""`python -m kintsugi_with_probe …`: the command line, with accelerators as `cluster_programs.FileProbe` reads them."""

from __future__ import annotations

import msgspec

from kintsugi.cli.main import main
from kintsugi.cli.supervisor import supervise
from kintsugi.cluster.handover import PROGRAMS

if __name__ == "__main__":
    programs = msgspec.structs.replace(PROGRAMS, probe="cluster_programs:file_probe")
    supervise.__kwdefaults__ = {**(supervise.__kwdefaults__ or {}), "programs": programs}
    main()
