"""``python -m normscope`` is the ``normscope`` command."""

from normscope.cli import main

main()
