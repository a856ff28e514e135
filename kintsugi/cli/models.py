"""Commands about model folders: `export`, `import`, `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli.arguments import Best, Run, Step
from kintsugi.cli.output import say

app = typer.Typer()


@app.command()
def export(
    run: Run,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write; must not exist. Default: NAME-step-N in the current folder.",
        ),
    ] = None,
    step: Step = None,
    best: Best = False,
) -> None:
    """Verify a checkpoint and export it as a Hugging Face folder."""
    from kintsugi.cli.export import export_checkpoint
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    written = export_checkpoint(folder, to=to, step=reader.best_step(folder) if best else step)
    say(f"{written[0].parent}: {', '.join(sorted(path.name for path in written))}")


@app.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Hugging Face folder or GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to write; must not exist.")],
) -> None:
    """Convert a model to a folder that `model.path` accepts."""
    from kintsugi.cli.import_progress import import_bar
    from kintsugi.model.import_gguf import import_model

    with import_bar() as progress:
        written = import_model(source, destination, progress=progress)
    say(f"{destination}: {', '.join(sorted(path.name for path in written))}")


@app.command()
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="Hugging Face folder, e.g. of an export, name of one on the hub, or a run."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other hosts.")
    ] = "127.0.0.1",
    servers: Annotated[int, typer.Option(min=1, max=64, help="Number of generation servers.")] = 1,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KINTSUGI_API_KEY",
            help="API key that clients must send; default: none. Arguments are visible in `ps`: prefer the file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the API key, readable by you alone.")
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the key for /admin: weights and number of servers."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of named keys with roles and quotas (`kintsugi token add`); admins may use /admin.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept connections from other hosts without any key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Further host name of this service, e.g. of a proxy; may be repeated."
        ),
    ] = None,
    weights_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Folder that /admin/weights may load from; default: the one with the model."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that a server decodes concurrently.")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum prompt + completion in tokens; default: that of the model, at most 4096."
        ),
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV cache size of one server, in GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    queue: Annotated[
        int,
        typer.Option(
            min=1,
            max=65536,
            help="Maximum number of completions in flight; further ones are refused with 429.",
        ),
    ] = 1024,
    strategy: Annotated[
        str, typer.Option(help="Routing: least_loaded, round_robin or prefix_affine.")
    ] = "least_loaded",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise reproducible completions; slower.")
    ] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API: completions and chat, with streaming."""
    from kintsugi.cli.local_models import model_folder
    from kintsugi.errors import UserError
    from kintsugi.serving.credentials import Credentials, read_key
    from kintsugi.serving.session import ServeOptions
    from kintsugi.serving.session import serve as serve_model

    if api_key is not None and api_key_file is not None:
        raise UserError("expected either --api-key or --api-key-file, got both")
    credentials = Credentials(
        api_key=api_key if api_key_file is None else read_key(api_key_file),
        admin_key=None if admin_key_file is None else read_key(admin_key_file),
        token_file=tokens,
        host=host,
        allowed_hosts=tuple(allowed_host or ()),
    )
    options = ServeOptions(
        model=model_folder(model, field="MODEL"),
        host=host,
        port=port,
        num_servers=servers,
        queue=queue,
        credentials=credentials,
        insecure=insecure,
        weights_folders=tuple(weights_folder or ()),
        max_length=max_length,
    )
    plan = {
        "slots": slots,
        "kv_cache_gib": kv_cache_gib,
        "dtype": dtype,
        "device": device,
        "strategy": strategy,
        "deterministic": deterministic,
    }
    raise typer.Exit(serve_model(options, plan, print_line=say))
