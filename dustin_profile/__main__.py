"""`python -m dustin_profile`: the same as `dustin-profile`, in the form that torchrun starts."""

from dustin_profile.cli.app import main

main()
