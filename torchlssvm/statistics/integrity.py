"""Marking a state that is being changed in place, so that an interruption cannot pass unnoticed."""

from __future__ import annotations

from torchlssvm.errors import InterruptedUpdateError, TorchLSSVMError


class Integrity:
    """A context in which a state is changed in place: marked first, cleared last.

    Whatever interrupts it (Ctrl-C, a lack of memory) leaves the mark, and every later use is refused. An error that this
    library names is raised where nothing was changed, or everything was put back, so it clears the mark.
    """

    def __init__(self) -> None:
        self.torn = False

    def check(self) -> None:
        """InterruptedUpdateError if a change was interrupted."""
        if self.torn:
            raise InterruptedUpdateError(
                "an update was interrupted while its sums were being changed, so the state is neither that before nor that "
                "after it. Load a saved state (head.load_state_dict(...)), or bring it back from its store (store.restore())."
            )

    def __enter__(self) -> None:
        self.check()
        self.torn = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None or issubclass(kind, TorchLSSVMError):
            self.torn = False
