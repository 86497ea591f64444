"""Memory that other processes of this user can map.

On Linux it is an anonymous memory file: it leaves no file behind, does not count against the size of /dev/shm, and is freed
when the last process that has it open ends, however that happens. Elsewhere it is a temporary file on the disk.
"""

import mmap
import os
import tempfile
import weakref

import torch


class SharedMemory:
    """Memory of this process, which other processes can map by its ``path`` while this object exists."""

    def __init__(self, name: str) -> None:
        """``name``: shown in lists of the open files of a process."""
        self.size = 0
        try:
            self.fd = os.memfd_create(name)
            self.path, self.is_anonymous = f"/proc/{os.getpid()}/fd/{self.fd}", True
        except (AttributeError, OSError):  # another system than Linux, or a sandbox that forbids it
            (self.fd, self.path), self.is_anonymous = tempfile.mkstemp(prefix=name), False
            weakref.finalize(self, os.unlink, self.path)
        weakref.finalize(self, os.close, self.fd)

    def resize(self, num_bytes: int) -> None:
        """Makes the memory larger or smaller. Raises `OSError` if the system reports too little memory; otherwise it would
        end a process that writes."""
        os.ftruncate(self.fd, num_bytes)
        if num_bytes > self.size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, self.size, num_bytes - self.size)
        self.size = num_bytes


def tensor_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Returns the tensor at ``offset`` of mapped memory, which stays mapped while the tensor exists."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
