"""`python -m kintsugi` is the command `kintsugi`."""

from kintsugi.cli.main import main

main()
