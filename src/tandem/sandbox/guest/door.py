"""The one way out of a sandbox: a program asks for a socket and gets one that is connected already, to one address.

The program can connect nothing itself. The kernel holds its calls `socket` and `connect` until this process has answered
them: the first with a socket that Tandem made outside and connected to the address, the second by comparing addresses, since
nothing is left to connect.
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
    """Answers the held calls of one program.

    ``listener``: the descriptor of its filter. ``outside``: a socket on which a byte asks Tandem for a connection; an answer
    without a descriptor means that there is none.
    """

    def __init__(self, listener: int, outside: socket.socket, address: tuple[str, int]):
        self.listener, self.outside = listener, outside.fileno()
        self._outside = outside
        self._host, self._port = socket.inet_aton(address[0]), address[1]
        self._waiting: deque[tuple[int, int]] = deque()

    def ask(self) -> None:
        """Takes one held call: answers it, or asks outside for what it needs."""
        held = bytearray(_ASKED.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, held, True)
        except OSError:
            return  # its process has ended meanwhile
        number, thread, _, call, _, _, *arguments = _ASKED.unpack(held)
        if call == number_of("connect"):
            self._answer(number, -self._refusal(number, thread, arguments[1], arguments[2]))
            return
        try:
            self._outside.send(b"?")
            self._waiting.append((number, arguments[1]))
        except OSError:  # nobody listens outside any more, or too many ask at once
            self._answer(number, -errno.ECONNREFUSED)

    def give(self) -> bool:
        """Hands what came from outside to the call that has waited longest. False: nobody is outside any more."""
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
        if not self._waiting:  # asked for by a program that has ended
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        number, kind = self._waiting.popleft()
        if not descriptors:
            self._answer(number, -errno.ECONNREFUSED)
            return True
        os.set_blocking(descriptors[0], not kind & socket.SOCK_NONBLOCK)
        flags = os.O_CLOEXEC if kind & socket.SOCK_CLOEXEC else 0
        with contextlib.suppress(OSError):  # its process has ended, or may have no more descriptors
            new = bytearray(_NEW.pack(number, 0, descriptors[0], 0, flags))
            self._answer(number, fcntl.ioctl(self.listener, _ADD, new, True))
            number = -1
        os.close(descriptors[0])
        if number >= 0:
            self._answer(number, -errno.EMFILE)
        return True

    def close(self) -> None:
        """Calls that are still held fail."""
        os.close(self.listener)

    def _refusal(self, number: int, thread: int, pointer: int, size: int) -> int:
        """0 if the program wants to connect to the address; else the error."""
        try:
            with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
                memory.seek(pointer)
                wanted = memory.read(min(size, 16))
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("=Q", number))  # else it was another process that was read
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
