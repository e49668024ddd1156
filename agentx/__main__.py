"""`python -m agentx`: the same as the command `agentx`."""

from agentx.cli import main

main()
