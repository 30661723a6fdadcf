"""``python -m volcano_locks``: the command without its script."""

from .cli import main

main(prog_name="volcano-locks")
