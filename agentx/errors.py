"""The errors agentx raises on purpose, each with the exit code a script can rely on."""

from __future__ import annotations

from collections.abc import Sequence


class AgentxError(Exception):
    """An expected failure: one sentence saying what, where and both values, and one hint.

    `exit_code` is the process exit code of the command that meets it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> list[str]:
        """The lines the command line prints on stderr."""
        hint = [f"hint: {self.hint}"] if self.hint else []
        return [f"error: {self.message}", *hint]


class InputError(AgentxError):
    """Your input is wrong: a file, a value, an option. Exit code 2."""

    exit_code = 2


class FaultsError(InputError):
    """Every fault found in one input, told at once."""

    def __init__(self, where: str, faults: Sequence[tuple[str, str]]) -> None:
        """`faults` are (message, hint) pairs; `where` is the file or object they are in."""
        self.where = where
        self.faults = list(faults)
        super().__init__("; ".join(message for message, _ in self.faults))

    def lines(self) -> list[str]:
        """One error line per fault, each followed by its hint."""
        out = []
        for message, hint in self.faults:
            out.append(f"error: {self.where}: {message}")
            if hint:
                out.append(f"hint: {hint}")
        return out


class DeploymentError(AgentxError):
    """The deployment does not do what a run needs: unreachable, refusing, stalled. Exit code 3."""

    exit_code = 3


class VerdictError(AgentxError):
    """The work was done and the verdict is no. Exit code 1."""

    exit_code = 1
