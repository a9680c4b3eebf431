import errno
import os

import pytest


@pytest.fixture
def full(monkeypatch):
    """Whether the disk is full; call it to say so."""
    write, state = os.write, {"full": False}

    def refuse(descriptor, content):
        if state["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refuse)
    return lambda whether: state.update(full=whether)
