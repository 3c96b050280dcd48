"""``python -m apportion``."""

from apportion.cli.main import main

main()
