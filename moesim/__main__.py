"""`python -m moesim`."""

from moesim.commands import main

main()
