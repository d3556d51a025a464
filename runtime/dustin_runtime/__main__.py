"""`python -m dustin_runtime`: the same as `dustin-run`, in the form that torchrun starts."""

from dustin_runtime.cli.app import main

main()
