"""`python -m kintsugi` is the command `kintsugi`."""

from kintsugi.cli import main

main()
