"""The only connection out of a sandbox: a program that creates a socket gets one that is already connected to one address.

The program cannot connect by itself. The kernel suspends its calls `socket` and `connect` until this process answers:
`socket` gets a socket that Tandem has created outside and connected to the address; `connect` succeeds if its address is the
same, because the socket is already connected.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections import deque

from tandem.sandbox.guest.syscall_filter import number_of

_RECEIVE, _SEND, _IS_VALID, _ADD = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103  # ioctls of a filter's listener
_ASKED = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_ANSWER = struct.Struct("=Qqii")  # struct seccomp_notif_resp
_NEW = struct.Struct("=QIIII")  # struct seccomp_notif_addfd
_ADDRESS = struct.Struct("!2sH4s")


class Door:
    """Answers the suspended calls of one program.

    ``listener``: descriptor of its filter's listener. ``outside``: a socket to Tandem: one byte requests a connection; an
    answer without a descriptor means that no connection is possible.
    """

    def __init__(self, listener: int, outside: socket.socket, address: tuple[str, int]):
        self.listener, self.outside = listener, outside.fileno()
        self._outside = outside
        self._host, self._port = socket.inet_aton(address[0]), address[1]
        self._waiting: deque[tuple[int, int]] = deque()

    def ask(self) -> None:
        """Receives one suspended call. Answers a `connect`; for a `socket`, requests a connection from outside."""
        held = bytearray(_ASKED.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, held, True)
        except OSError:
            return  # the calling process has ended
        number, thread, _, call, _, _, *arguments = _ASKED.unpack(held)
        if call == number_of("connect"):
            self._answer(number, -self._refusal(number, thread, arguments[1], arguments[2]))
            return
        try:
            self._outside.send(b"?")
            self._waiting.append((number, arguments[1]))
        except OSError:  # nobody listens outside any more, or too many requests are waiting
            self._answer(number, -errno.ECONNREFUSED)

    def give(self) -> bool:
        """Passes a connection from outside to the call that has waited longest. Returns False if the other end is closed."""
        try:
            word, descriptors, _, _ = socket.recv_fds(self._outside, 16, 1)
        except BlockingIOError:
            return True
        except OSError:
            word, descriptors = b"", []
        if not word:
            while self._waiting:
                self._answer(self._waiting.popleft()[0], -errno.ECONNREFUSED)
            return False
        if not self._waiting:  # requested by a program that has ended
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        number, kind = self._waiting.popleft()
        if not descriptors:
            self._answer(number, -errno.ECONNREFUSED)
            return True
        os.set_blocking(descriptors[0], not kind & socket.SOCK_NONBLOCK)
        flags = os.O_CLOEXEC if kind & socket.SOCK_CLOEXEC else 0
        with contextlib.suppress(OSError):  # the process has ended, or has reached its limit of descriptors
            new = bytearray(_NEW.pack(number, 0, descriptors[0], 0, flags))
            self._answer(number, fcntl.ioctl(self.listener, _ADD, new, True))
            number = -1
        os.close(descriptors[0])
        if number >= 0:
            self._answer(number, -errno.EMFILE)
        return True

    def close(self) -> None:
        """Closes the listener. Calls that are still suspended fail."""
        os.close(self.listener)

    def _refusal(self, number: int, thread: int, pointer: int, size: int) -> int:
        """Returns 0 if the program connects to the allowed address, else the error number."""
        try:
            with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
                memory.seek(pointer)
                wanted = memory.read(min(size, 16))
            # raises if the call has ended: then another process may have been read
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("=Q", number))
        except (OSError, OverflowError, ValueError):
            return errno.EFAULT
        if len(wanted) < _ADDRESS.size:
            return errno.EINVAL
        family, port, host = _ADDRESS.unpack_from(wanted)
        same = (int.from_bytes(family, "little"), port, host) == (socket.AF_INET, self._port, self._host)
        return 0 if same else errno.EACCES

    def _answer(self, number: int, result: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(number, max(0, result), min(0, result), 0))
